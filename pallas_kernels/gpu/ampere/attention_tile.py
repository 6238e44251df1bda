"""What the portable attention kernels share: register layouts, products on mma, and copies into shared memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # of a thread block: one warpgroup
DEPTH = 16  # of one mma
ROW_BYTES = 64  # of a row of a tile: in wider ones `ldmatrix` would fetch four columns for a product that takes two
TILE = 64  # rows of one mma over the four warps of a warpgroup, 16 to a warp
# The accumulators of mma and of wgmma have one and the same layout, and so have the row and column vectors beside them.
MATRIX, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def tiled(shape: tuple[int, ...], dtype: Any, row_bytes: int | None = None) -> Any:
    """Shared memory in rows of `ROW_BYTES`, swizzled: `ldmatrix` reads them without bank conflicts either way round."""
    row_bytes = row_bytes or ROW_BYTES
    columns = row_bytes // jnp.dtype(dtype).itemsize
    transforms: tuple[Any, ...] = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(row_bytes))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def full(shape: tuple[int, ...], value: float, layout: Any) -> Any:
    """A float32 array of one value in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def left_parts(x: Any) -> tuple[Any, ...]:
    """An accumulator, rounded to the operands' dtype, as left operands of `DEPTH` columns each.

    Each thread keeps its registers: those of two neighbouring 8 x 8 blocks of an accumulator are those of one 16 x 16
    block of a left operand.
    """
    layout = plgpu.Layout.MMA_LHS(x.dtype)
    part = plgpu.ShapeDtypeStruct((x.shape[0], DEPTH), x.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(MATRIX,), return_type=(part,) * (x.shape[1] // DEPTH))
    def relabel(_: Any, x: Any) -> Any:
        registers = x.registers.reshape(layout.to_mgpu().registers_shape(x.shape))
        return tuple(
            mgpu.FragmentedArray(_registers=registers[:, i : i + 1], _layout=layout.to_mgpu(), _is_signed=None)
            for i in range(registers.shape[1])
        )

    return relabel(x)


def add_product(total: Any, x: Any, y: Any) -> Any:
    """total + x y, for x in registers like an accumulator and y in shared memory, `DEPTH` rows of y at once."""
    for i, part in enumerate(left_parts(x.astype(y.dtype))):
        total = plgpu.mma(total, part, right(y.at[pl.ds(i * DEPTH, DEPTH)]))
    return total


def left(ref: Any) -> Any:
    """A tile in shared memory as the left operand of a product."""
    return plgpu.load(ref, layout=plgpu.Layout.MMA_LHS(ref.dtype))


def right(ref: Any) -> Any:
    """A tile in shared memory as the right operand of a product."""
    return plgpu.load(ref, layout=plgpu.Layout.MMA_RHS(ref.dtype))


def scores(x: Any, y: Any) -> Any:
    """x y^T of two tiles in shared memory, [m, h] and [n, h]."""
    width = ROW_BYTES // jnp.dtype(x.dtype).itemsize
    slices = [pl.ds(i, width) for i in range(0, x.shape[1], width)]
    parts = [left(x.at[:, columns]) for columns in slices]  # all before the first product, or more registers are spilt
    total = full((x.shape[0], y.shape[0]), 0, MATRIX)
    for part, columns in zip(parts, slices, strict=True):
        total = plgpu.mma(total, part, right(y.at[:, columns].transpose((1, 0))))
    return total


@plgpu.inline_mgpu()
def sync(_: Any) -> None:
    """Wait for all threads of the thread block."""
    mgpu.warpgroup_barrier()


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies from device memory into shared memory.

    Args:
      bulk: by the copy engine, with a barrier for each tile (from compute capability 9.0 on); else by `cp.async`, whose
        copies are waited for in order, and seen by the other threads after a `sync`.
    """

    bulk: bool

    def start(self, source: Any, destination: Any, barrier: Any) -> None:
        """Start a copy that lies within the source."""
        if self.bulk:
            plgpu.copy_gmem_to_smem(source, destination, barrier)
        else:
            plgpu.copy_gmem_to_smem(source, destination, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def wait(self, barrier: Any) -> None:
        """Wait for the copy of a barrier; without barriers, for all copies."""
        if self.bulk:
            plgpu.barrier_wait(barrier)
        else:
            plgpu.wait_gmem_to_smem(0)


def flat(x: jax.Array) -> jax.Array:
    """[B, length, heads, size] as [B, length, heads * size], where a head's tile is a slice of two axes."""
    return x.reshape(*x.shape[:2], -1)


def whole(ids: jax.Array, size: int) -> jax.Array:
    """[B, n] with the last id repeated up to `size`."""
    return jnp.pad(ids, ((0, 0), (0, size - ids.shape[1])), mode="edge")


def compiler_params() -> Any:
    """How the kernels are compiled: barriers are where the kernels put them."""
    return plgpu.CompilerParams(
        approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
    )
