"""Rotary positions (RoPE), in the half-split layout of Hugging Face's checkpoints.

Pair i of a head joins coordinates i and i + H/2, and position t turns it by the angle t * theta^(-2i/H). Scores then
depend on positions only through their differences, and the angle uses a token's *logical* position, never its slot in a
cache.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rotary_angles(positions: Int[Array, "B T"], head_dim: int, theta: float) -> tuple[Array, Array]:
    """(cos, sin) of every angle, float32 [B, T, H/2]; computed once per forward and shared by its layers."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None, :]
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
