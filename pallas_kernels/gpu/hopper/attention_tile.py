"""What the Hopper attention kernels share: register layouts, shared-memory tiles, the order of thread blocks, tanh."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
TILE = 64  # rows of one wgmma
MATRIX, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that wgmma and the copy engine share: rows of 128 bytes, swizzled."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms: tuple[Any, ...] = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def place(index: Any, heads: int, blocks: int, section: int) -> tuple[Any, Any]:
    """(head, block) at a place of the order of thread blocks; `heads` counts over batch and heads.

    Heads whose operands fit the L2 cache together, a section, are worked on together: block 0 of each, then block 1.
    Where block 0 is the longest, the last blocks to run are short ones.
    """
    section = max(1, min(heads, section))
    index = jnp.asarray(index, jnp.int32)
    number, rest = lax.div(index, section * blocks), lax.rem(index, section * blocks)
    first = number * section
    if heads % section == 0:
        return first + lax.rem(rest, section), lax.div(rest, section)
    width = jnp.minimum(section, heads - first)
    return first + lax.rem(rest, width), lax.div(rest, width)


def index_of(start: Any, size: int, layout: Any) -> Any:
    """start, start + 1, ...: int32 [size], made anew wherever it is used.

    The barrier keeps the compiler from holding the numbers in registers throughout a loop, where they would spill.
    """
    return lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)) + start


def tanh(x: Any) -> Any:
    """tanh(x) = 1 - 2 / (1 + e^(2x)), which is exact to rounding where the fast instruction has 11 bits."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2E)))


def block_of_rows(heads: int, blocks: int) -> tuple[Any, Any, Any]:
    """Batch, head, and block of rows that a program of a pass over [B, T, N, H] has.

    Heads come first: thread blocks that run at once touch whole rows of memory.
    """
    index = lax.axis_index("program")
    rest = lax.div(index, heads)
    return lax.div(index, heads * blocks), lax.rem(index, heads), lax.rem(rest, blocks)
