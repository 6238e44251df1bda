"""What the parts of a speculative round cost, each timed as a compiled loop of its own: the symbols of eq. 33.15.

The loops are compiled as that of `generate` is, so that what they cost adds up to what it takes.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.pairs import Pair
from flashspec.costs import RoundCosts
from flashspec.language_model import Cache, LanguageModel, Params
from flashspec.measure import HOST, Call, compile_call, time_call
from flashspec.recording import loop_compiler_options
from flashspec.sampling import SamplingParams
from flashspec.speculative import ModelDrafter, State, Totals, init_state, run


@dataclasses.dataclass(frozen=True)
class Shape:
    """At which sizes the parts are timed.

    Attributes:
      batch: rows, B.
      capacity: positions that the caches have room for; a forward reads all of them.
      steps: iterations of each timed loop.
      repeats: timed calls of each loop; the median counts.
    """

    batch: int
    capacity: int
    steps: int = 32
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of one round's parts.

    Attributes:
      draft_step: c_d, one forward of the draft over one token.
      verify: c_v(D), the target's forward over D + 1 tokens.
      management: c_m, drawing, verifying and committing: a round of models that cost nothing.
      round: a whole round, in a loop like that of generation.
      predicates: branches in a round's program, and the loop's own condition. Where the loop is recorded
        (`loop_compiler_options`) the GPU decides by them itself, else its runtime reads each back to choose what to
        launch next; Python reads none.
    """

    draft_step: float
    verify: float
    management: float
    round: float
    predicates: int

    def overhead(self, draft_length: int) -> float:
        """(round - (D + 1) c_d - c_v) / round: the share of a round that is spent outside of the models."""
        return (self.round - (draft_length + 1) * self.draft_step - self.verify) / self.round


@dataclasses.dataclass(frozen=True)
class Loop:
    """A compiled loop over one part of a round.

    Attributes:
      call: runs it.
      count: how often the part runs in one call.
      repeats: timed calls; the median counts.
    """

    call: Call
    count: int
    repeats: int

    def seconds(self) -> float:
        """Seconds of the part."""
        return time_call(self.call, repeats=self.repeats, clock=HOST).steady_s / self.count


def forward_loop(model: LanguageModel, params: Params, width: int, shape: Shape, forwards: int = 1) -> Loop:
    """Forwards over `width` tokens, against a cache that is half full.

    Args:
      model: timed.
      params: its parameters.
      width: tokens in a forward.
      shape: sizes and repeats.
      forwards: in one iteration of the loop, so that a short forward does not carry the loop's own time.

    Returns:
      The loop.
    """

    def loop(params: Params, cache: Cache, tokens: Array) -> tuple[Array, Cache]:
        length = jnp.full(shape.batch, shape.capacity // 2, jnp.int32)

        def forward(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
            logits, cache = model.logits(params, tokens, cache)
            # The next tokens depend on all logits of this step, so that no step can be hoisted or thinned out.
            bits = lax.bitcast_convert_type(jnp.max(logits, axis=-1), jnp.int32)
            return (bits & 0x7FFFFFFF) % model.vocab_size, model.rollback(cache, length)

        def iteration(_: int, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
            for _ in range(forwards):
                carry = forward(*carry)
            return carry

        return lax.fori_loop(0, shape.steps, iteration, (tokens, cache))

    tokens = jnp.ones((shape.batch, width), jnp.int32)
    operands = (params, half_full(model, shape), tokens)
    call = compile_call(loop, *operands, compiler_options=loop_compiler_options())
    return Loop(call, shape.steps * forwards, shape.repeats)


def forward_seconds(model: LanguageModel, params: Params, width: int, shape: Shape) -> float:
    """Seconds of one forward of `forward_loop`."""
    return forward_loop(model, params, width, shape).seconds()


def half_full(model: LanguageModel, shape: Shape) -> Cache:
    """An empty cache that says it holds capacity / 2 positions: zeros cost as much to read as anything."""
    cache = model.init_cache(shape.batch, shape.capacity)
    return dataclasses.replace(cache, length=jnp.full(shape.batch, shape.capacity // 2, jnp.int32))


def round_loop(
    target: LanguageModel, params: Params, drafter: Any, draft_length: int, sampling: SamplingParams, shape: Shape
) -> Loop:
    """Rounds inside generation's own loop, from a one-token prompt on."""
    budget = max(shape.capacity - draft_length - 1, shape.steps * (draft_length + 1))
    state = init_state(
        jax.random.key(0),
        target,
        params,
        jnp.ones((shape.batch, 1), jnp.int32),
        jnp.ones(shape.batch, jnp.int32),
        drafter=drafter,
        draft_length=draft_length,
        sampling=sampling,
        max_new_tokens=budget,
    )

    def loop(state: State) -> Totals:
        return run(state, max_rounds=shape.steps).totals

    call = compile_call(loop, state, compiler_options=loop_compiler_options())
    return Loop(call, shape.steps, shape.repeats)


def count_branches(program: str) -> int:
    """Conditional instructions in a compiled program's text."""
    return len(re.findall(r"= [^=]* conditional\(", program))


def free_model(vocab_size: int) -> LanguageModel:
    """A model without a forward: its logits are its parameters [V], moved a little by the token read."""

    def apply(params: Array, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        logits = params[None, None, :] + 1e-3 * (tokens % 7)[..., None].astype(jnp.float32)
        return logits, {"length": cache["length"] + tokens.shape[1]}

    return LanguageModel(apply, lambda batch, capacity: {"length": jnp.zeros(batch, jnp.int32)}, vocab_size)


def draft_loop(drafter: ModelDrafter, draft_length: int, shape: Shape) -> Loop:
    """Forwards of the draft model, a round's D + 1 in each iteration."""
    return forward_loop(drafter.model, drafter.params, 1, shape, forwards=draft_length + 1)


def draft_seconds(drafter: Any, draft_length: int, shape: Shape) -> float:
    """Seconds of one of a round's D + 1 forwards of the draft model; 0 for a drafter without a model."""
    return draft_loop(drafter, draft_length, shape).seconds() if isinstance(drafter, ModelDrafter) else 0.0


def management_loop(vocab_size: int, drafter: Any, draft_length: int, sampling: SamplingParams, shape: Shape) -> Loop:
    """Rounds of free models: c_m, measured without subtracting anything.

    A drafter without a model stays what it is: its lookup is part of c_m.
    """
    rows = jax.random.normal(jax.random.key(1), (2, vocab_size), jnp.float32)
    model = free_model(vocab_size)
    free = ModelDrafter(model, rows[1]) if isinstance(drafter, ModelDrafter) else drafter
    return round_loop(model, rows[0], free, draft_length, sampling, shape)


def management_seconds(
    vocab_size: int, drafter: Any, draft_length: int, sampling: SamplingParams, shape: Shape
) -> float:
    """Seconds of a round of `management_loop`."""
    return management_loop(vocab_size, drafter, draft_length, sampling, shape).seconds()


def part_loops(
    pair: Pair, lengths: Iterable[int], sampling: SamplingParams, shape: Shape
) -> dict[tuple[str, int], Callable[[], Loop]]:
    """What compiles the parts of a round of a pair with a draft model, by the part and D; plain decoding's has D = 0.

    Args:
      pair: whose drafter is a model.
      lengths: of drafts, D.
      sampling: of the target and the draft.
      shape: sizes and repeats.
    """
    target, vocab_size = (pair.target, pair.target_params), pair.target.vocab_size
    made: dict[tuple[str, int], Callable[[], Loop]] = {("forward", 0): partial(forward_loop, *target, 1, shape)}
    for length in lengths:
        made["forward", length] = partial(forward_loop, *target, length + 1, shape)
        made["draft", length] = partial(draft_loop, pair.drafter, length, shape)
        made["management", length] = partial(management_loop, vocab_size, pair.drafter, length, sampling, shape)
    return made


def parts(loops: Mapping[tuple[str, int], Loop]) -> dict[int, RoundCosts]:
    """c_t, c_d, c_v(D) and c_m of the loops of `part_loops`, by D."""
    seconds = {name: loop.seconds() for name, loop in loops.items()}
    verify = {length: value for (part, length), value in seconds.items() if part == "forward" and length}
    return {
        length: RoundCosts(seconds["forward", 0], seconds["draft", length], verify, seconds["management", length])
        for length in verify
    }


def symbols(parts: RoundCosts, draft_length: int) -> dict[str, float]:
    """c_t, c_d, c_v(D) and c_m, for a record."""
    each = {"c_t": parts.target_step, "c_d": parts.draft_step, "c_v": parts.verify_at(draft_length)}
    return {name: float(seconds) for name, seconds in (each | {"c_m": parts.overhead}).items()}


def measure_costs(
    target: LanguageModel, params: Params, drafter: Any, draft_length: int, sampling: SamplingParams, shape: Shape
) -> Costs:
    """Every part of a round with D drafts, each as its own loop at the same batch and capacity."""
    rounds = round_loop(target, params, drafter, draft_length, sampling, shape)
    return Costs(
        draft_step=draft_seconds(drafter, draft_length, shape),
        verify=forward_seconds(target, params, draft_length + 1, shape),
        management=management_seconds(target.vocab_size, drafter, draft_length, sampling, shape),
        round=rounds.seconds(),
        predicates=count_branches(rounds.call.executable.as_text() or "") + 1,
    )
