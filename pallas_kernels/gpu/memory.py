"""Device memory, as jax 0.11 and 0.12 write it."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def store(ref: Any, value: Any) -> None:
    """Write an array from registers to device memory: once per tile, so that parts of sectors do no harm."""
    if hasattr(plgpu, "store"):  # jax 0.12, which asks for consent to them
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
