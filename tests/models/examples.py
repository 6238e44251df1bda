"""Tiny models for the tests, with norms that are not all ones, and what they are compared by."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flashspec import models
from flashspec.attention import dot_product_attention
from flashspec.models.tensor_files import locate

SIZES = (37, 16, 24, 2, 4, 2, 8)
SCALING = models.RopeScaling("llama3", 4.0, 1.0, 4.0, original_max_position_embeddings=8)
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 5.0, "sliding_window": 3, "tie_embeddings": True}
CONFIGS = {
    "llama": models.DecoderConfig("llama", *SIZES, rms_norm_eps=0.02),
    "llama tied, one kv head": models.DecoderConfig("llama", 37, 16, 24, 2, 3, 1, 8, tie_embeddings=True),
    "llama, wide heads": models.DecoderConfig("llama", 37, 16, 24, 1, 2, 2, 12, rope_theta=100.0),
    "llama with scaled positions": models.DecoderConfig("llama", *SIZES, rope_theta=50.0, rope_scaling=SCALING),
    "qwen2": models.DecoderConfig("qwen2", *SIZES, sliding_window=3, full_layers=(0,)),
    "qwen3": models.DecoderConfig("qwen3", *SIZES, rms_norm_eps=0.02, tie_embeddings=True),
    "mistral": models.DecoderConfig("mistral", *SIZES, sliding_window=4),
    "qwen3 with a window": models.DecoderConfig("qwen3", *SIZES, sliding_window=3),
    "gemma 2": models.DecoderConfig(
        "gemma2", *SIZES, full_layers=(1,), attention_soft_cap=2.0, final_soft_cap=3.0, **GEMMA
    ),
    "gemma 3": models.DecoderConfig(
        "gemma3_text",
        *SIZES,
        full_layers=(1,),
        local_rope_theta=100.0,
        rope_scaling=models.RopeScaling("linear", 8.0),
        **GEMMA,
    ),
}


@functools.cache
def example(name: str) -> tuple[models.DecoderConfig, nnx.State]:
    """A configuration of `CONFIGS` with random parameters."""
    return CONFIGS[name], random_params(CONFIGS[name])


def random_params(config: models.DecoderConfig) -> nnx.State:
    """Parameters large enough that every part matters."""
    rng = np.random.default_rng(7)
    abstract = nnx.state(nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)

    def values(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(noise * 0.5 if len(leaf.shape) > 1 else 1 + 0.3 * noise, leaf.dtype)

    return jax.tree.map(values, abstract)


@functools.cache
def full(name: str, tokens: tuple[tuple[int, ...], ...], positions: tuple[tuple[int, ...], ...] | None = None) -> Any:
    """Logits of whole rows in one forward without a cache."""
    config, params = example(name)
    return forward(
        config, params, jnp.asarray(tokens, jnp.int32), None if positions is None else jnp.asarray(positions)
    )


@functools.partial(jax.jit, static_argnums=0)
def forward(
    config: models.DecoderConfig, params: nnx.State, tokens: jax.Array, positions: jax.Array | None = None
) -> jax.Array:
    """The decoder over whole rows [B,T], as one program."""
    return models.merge(config, params)(tokens, attention=dot_product_attention, positions=positions)


def rows(tokens: Any) -> tuple[tuple[int, ...], ...]:
    """An array [B,T] as nested tuples, which can be remembered."""
    return tuple(map(tuple, np.asarray(tokens).tolist()))


def stored(directory: Path, config: models.DecoderConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint of these parameters, by their names in the file."""
    models.save(directory, config, params)
    return {name: tensor.read() for name, tensor in locate(directory).items()}


def assert_close(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    """Differences below `tolerance` of the largest wanted magnitude, compared in numpy."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())
