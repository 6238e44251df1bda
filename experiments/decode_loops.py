"""One greedy decode step of a model, and three ways to stop a loop of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from experiments.pairs import Pair
from flashspec.language_model import Cache, Params
from flashspec.measure import Call


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model after its prompt.

    Attributes:
      pair: the model.
      token: [1], the last token of the prompt, in no cache yet.
      cache: of all tokens before it.
      budget: most new tokens.
    """

    pair: Pair
    token: Array
    cache: Cache
    budget: int

    def step(self, params: Params, token: Array, cache: Cache) -> tuple[Array, Cache]:
        """The most probable next token [1], and the cache with `token` added."""
        logits, cache = self.pair.target.logits(params, token[:, None], cache)
        return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache

    @property
    def operands(self) -> tuple[Params, Array, Cache]:
        """Of the first step."""
        return self.pair.target_params, self.token, self.cache


def prepare(pair: Pair, prompt: str, budget: int) -> Decoder:
    """The cache of all but the prompt's last token."""
    tokens, lengths = pair.tokenizer.encode([prompt])
    last = int(lengths[0]) - 1
    before = jnp.asarray(tokens[:, :last])
    cache = jax.jit(functools.partial(pair.target.fill, capacity=last + budget + 1))(
        pair.target_params, before, jnp.array([last], jnp.int32)
    )
    return Decoder(pair, jnp.asarray(tokens[:, last]), cache, budget)


def op_by_op(decoder: Decoder) -> tuple[Array, Cache]:
    """Every operation a program and a dispatch of its own."""
    with jax.disable_jit():
        return decoder.step(*decoder.operands)


def count_operations(jaxpr: core.Jaxpr) -> int:
    """Primitive operations that run when nothing is compiled together; a loop's as often as it turns."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [value for value in equation.params.values() if isinstance(value, core.Jaxpr | core.ClosedJaxpr)]
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        bodies = (value.jaxpr if isinstance(value, core.ClosedJaxpr) else value for value in inner)
        total += turns * sum(map(count_operations, bodies)) if inner else 1
    return total


def by_shape(
    decoder: Decoder, params: Params, token: Array, cache: Cache, stop: Array | int, *, budget: int
) -> tuple[Array, Array]:
    """The number of steps is a shape: known while tracing, so another budget is another program.

    Nothing is decided on the way; what comes after the stop token is computed and cut.
    """

    def one(carry: tuple[Array, Cache], _: None) -> tuple[tuple[Array, Cache], Array]:
        token, cache = decoder.step(params, *carry)
        return (token, cache), token[0]

    _, tokens = lax.scan(one, (token, cache), None, length=budget)
    stopped = tokens == stop
    length = jnp.where(stopped.any(), jnp.argmax(stopped) + 1, budget).astype(jnp.int32)
    return jnp.where(jnp.arange(budget, dtype=jnp.int32) < length, tokens, 0), length


def by_value(
    decoder: Decoder, params: Params, token: Array, cache: Cache, stop: Array | int, budget: Array | int
) -> tuple[Array, Array]:
    """Whether to go on is a traced value: it stays on the device, and one program serves every budget."""

    def unfinished(carry: tuple[Array, Array, Array, Cache]) -> Array:
        _, length, token, _ = carry
        return (length < budget) & ((length == 0) | (token[0] != stop))

    def one(carry: tuple[Array, Array, Array, Cache]) -> tuple[Array, Array, Array, Cache]:
        tokens, length, token, cache = carry
        token, cache = decoder.step(params, token, cache)
        return tokens.at[length].set(token[0]), length + 1, token, cache

    start = (jnp.zeros(decoder.budget, jnp.int32), jnp.zeros((), jnp.int32), token, cache)
    tokens, length, _, _ = lax.while_loop(unfinished, one, start)
    return tokens, length


def by_host(decoder: Decoder, step: Call, stop: int, budget: int, *, read: bool = True) -> tuple[np.ndarray, int]:
    """Python decides: reading the token waits for the device, and nothing can be recorded across the read.

    With `read=False` the same number of steps is dispatched and nothing is read before the end, which the stop
    condition does not allow; the difference is what reading costs.
    """
    params, token, cache = decoder.operands
    tokens = []
    for _ in range(budget):
        token, cache = step.executable(params, token, cache)
        tokens.append(token)
        if read and np.asarray(token)[0] == stop:
            break
    host = np.concatenate([np.asarray(token) for token in tokens])
    return np.pad(host, (0, decoder.budget - len(host))), len(host)
