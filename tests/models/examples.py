"""Tiny models for the tests, with norms that are not all ones, and what they are compared by."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from flashspec import models
from flashspec.models.tensor_files import locate

CONFIGS = {
    "llama": models.DecoderConfig("llama", 37, 16, 24, 2, 4, 2, 8, rms_norm_eps=0.02),
    "llama tied, one kv head": models.DecoderConfig("llama", 37, 16, 24, 2, 3, 1, 8, tie_embeddings=True),
    "llama, wide heads": models.DecoderConfig("llama", 37, 16, 24, 1, 2, 2, 12, rope_theta=100.0),
    "qwen3": models.DecoderConfig("qwen3", 37, 16, 24, 2, 4, 2, 8, rms_norm_eps=0.02, tie_embeddings=True),
    "mistral": models.DecoderConfig("mistral", 37, 16, 24, 2, 4, 2, 8, sliding_window=4),
    "qwen3 with a window": models.DecoderConfig("qwen3", 37, 16, 24, 2, 4, 2, 8, sliding_window=3),
}


@functools.cache
def example(name: str) -> tuple[models.DecoderConfig, nnx.State]:
    """A configuration of `CONFIGS` with random parameters, large enough that every part matters."""
    config = CONFIGS[name]
    params = nnx.state(models.Decoder(config, rngs=nnx.Rngs(7)), nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noisy = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype) for leaf, key in zip(leaves, keys, strict=True)
    ]
    return config, jax.tree.unflatten(tree, noisy)


def stored(directory: Path, config: models.DecoderConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint of these parameters, by their names in the file."""
    models.save(directory, config, params)
    return {name: tensor.read() for name, tensor in locate(directory).items()}


def assert_close(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    """Differences below `tolerance` of the largest wanted magnitude, compared in numpy."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())
