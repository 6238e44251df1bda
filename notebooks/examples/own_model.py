"""`python notebooks/examples/own_model.py`: a model of your own, a Flax nnx module, in the generation loop.

Generation needs pure functions of a model (`flashspec.LanguageModel`). For an nnx module they are made by splitting it
once into its structure and its parameters, and merging the two inside of `apply`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flashspec import (
    Contiguous,
    Generation,
    LanguageModel,
    ModelDrafter,
    SamplingParams,
    dot_product_attention,
    generate,
)

VOCAB, HEADS, HEAD_SIZE = 64, 2, 16
Cache = dict[str, jax.Array]


class TinyModel(nnx.Module):
    """One attention layer and one MLP over a cache that it manages itself."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.qkv = nnx.LinearGeneral(width, (3, HEADS, HEAD_SIZE), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, HEAD_SIZE), width, axis=(-2, -1), rngs=rngs)
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)
        self.head = nnx.Linear(width, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """tokens [B, T] at positions length, length + 1, ... -> logits [B, T, V], and the cache with them in it."""
        start, new = cache["length"], tokens.shape[1]
        x = self.embed(tokens)
        query, key, value = jnp.moveaxis(self.qkv(x), 2, 0)
        rows, columns = jnp.arange(len(tokens))[:, None], start[:, None] + jnp.arange(new)[None, :]
        keys = cache["key"].at[rows, columns].set(key, mode="drop")
        values = cache["value"].at[rows, columns].set(value, mode="drop")
        attended = dot_product_attention(
            query, keys, values, is_causal=True, q_positions=Contiguous(start), kv_lengths=start + new
        )
        x = x + self.out(attended)
        x = x + self.down(nnx.gelu(self.up(x)))
        return self.head(x), {"key": keys, "value": values, "length": start + new}


def init_cache(batch: int, capacity: int) -> Cache:
    """A dict with `length`: all that the loop's default rollback asks of a cache."""
    empty = jnp.zeros((batch, capacity, HEADS, HEAD_SIZE))
    return {"key": empty, "value": empty, "length": jnp.zeros(batch, jnp.int32)}


def as_language_model(module: nnx.Module) -> tuple[LanguageModel, Any]:
    """What generation needs of the module, and its parameters. Build it once: programs are kept per model."""
    structure, params = nnx.split(module)

    def apply(params: Any, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return nnx.merge(structure, params)(tokens, cache)

    return LanguageModel(apply, init_cache, VOCAB), params


def main() -> tuple[LanguageModel, Any, Generation]:
    """Greedy decoding of two rows, drafted by the same model with coarse weights; target, its parameters, result."""
    target, target_params = as_language_model(TinyModel(64, nnx.Rngs(0)))
    coarse = jax.tree.map(lambda weight: jnp.round(32 * weight) / 32, target_params)
    result = generate(
        jax.random.key(0),
        target,
        target_params,
        [[1, 2, 3], [4, 5, 0]],
        [3, 2],
        drafter=ModelDrafter(target, coarse),
        draft_length=2,
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=12,
    )
    for row, length in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True):
        print(row[:length])
    print(int(result.info.emitted.sum()), "tokens in", int(result.info.rounds.sum()), "rounds")
    return target, target_params, result


if __name__ == "__main__":
    main()
