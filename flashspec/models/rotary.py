"""Rotary positions (RoPE), in the half-split layout of Hugging Face's checkpoints.

Pair i of a head joins coordinates i and i + H/2, and position t turns it by the angle t * theta^(-2i/H). Scores then
depend on positions only through their differences, and the angle uses a token's *logical* position, never its slot in a
cache. Models that were taken to longer contexts after training turn their slow pairs more slowly: `RopeScaling`.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from flashspec.checks import at_least, fail, one_of

LINEAR, LLAMA3 = "linear", "llama3"


def positive(name: str, value: Any) -> None:
    """ValueError for what is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise fail(name, "a finite number above 0", repr(value))


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are lowered, by Hugging Face's names.

    Attributes:
      kind: "linear" divides every frequency by `factor`; "llama3" only those of pairs that make few turns in the
        original context: at most `low_freq_factor` turns fully, from `high_freq_factor` on not at all, between them by
        linear interpolation.
      factor: above 0.
      low_freq_factor, high_freq_factor: in turns, low < high; of "llama3" alone.
      original_max_position_embeddings: the context before the extension; of "llama3" alone.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        one_of("rope_type", self.kind, (LINEAR, LLAMA3))
        positive("factor", self.factor)
        positive("low_freq_factor", self.low_freq_factor)
        positive("high_freq_factor", self.high_freq_factor)
        at_least("original_max_position_embeddings", self.original_max_position_embeddings, 1)
        if self.low_freq_factor >= self.high_freq_factor:
            raise fail("low_freq_factor", f"less than high_freq_factor = {self.high_freq_factor}", self.low_freq_factor)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position of every pair, float32 [H/2], in the order of operations that checkpoints were trained with.

    Source: `modeling_rope_utils.py` of Hugging Face's transformers; Llama 3.1's `apply_scaling`.
    """
    own = np.float32(1) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    if scaling is None:
        return own
    factor = np.float32(scaling.factor)
    if scaling.kind == LINEAR:
        return own / factor
    turns = scaling.original_max_position_embeddings * own / np.float32(2 * math.pi)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * own / factor + kept * own


def rotary_angles(positions: Int[Array, "B T"], per_position: np.ndarray) -> tuple[Array, Array]:
    """(cos, sin) of every angle, float32 [B, T, H/2], for frequencies [H/2]; once per forward, shared by its layers."""
    angles = positions.astype(jnp.float32)[..., None] * per_position[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T *heads H"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]) -> Array:
    """Turn every head of `x` by its position's angles, in float32, and return `x`'s dtype.

    Source: Su et al., "RoFormer" (arXiv:2104.09864), equation 34, with the pairs of the half-split layout.
    """
    work = np.promote_types(x.dtype, np.float32)
    between = (1,) * (x.ndim - 3)
    cos, sin = (angle.reshape(*angle.shape[:2], *between, angle.shape[-1]).astype(work) for angle in (cos, sin))
    first, second = jnp.split(x.astype(work), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
