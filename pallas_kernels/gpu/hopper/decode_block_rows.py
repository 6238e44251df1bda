"""Rows in registers for the small work of the fused decoder step on Hopper: every fourth in one warp."""

from typing import Any

from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.gpu.hopper.decode_block_config import TOGETHER, WARP


def rows_layout(columns: int) -> Any:
    """Rows, every fourth in one warp."""
    return plgpu.Layout.TILED(plgpu.Tiling(((TOGETHER, columns), (columns // WARP,))), (-3,), (-2,), -1)


def scatter(ref: Any, x: Array, *index: Array, column: Array | None = None) -> None:
    """Write the rows of x, each where the indices say; nowhere, where that is not within the reference.

    Args:
      ref: of device memory; its last axis takes a row from `column` on, or has the size of one.
      x: [rows, columns] in `rows_layout`.
      index: [rows] for each axis but the last.
      column: [rows], where in the last axis each begins.
    """
    layout = rows_layout(x.shape[1])
    numbers = (*index, *(() if column is None else (column,)))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[layout.reduce(1)] * len(numbers)))
    def scatter_rows(_: Any, ref: Any, x: Any, *numbers: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(mgpu.thread_idx(), mgpu.c(WARP, i32))
        within = arith.muli(lane, mgpu.c(x.shape[1] // WARP, i32))
        held = [[vector.extract(number, [], [0]) for number in each.registers.flat] for each in numbers]
        for mine, *own in zip(x.registers.flat, *held, strict=True):
            start = within if column is None else arith.addi(within, own.pop())
            inside = mgpu.c(1, ir.IntegerType.get_signless(1))
            for number, size in zip(own, ir.MemRefType(ref.type).shape, strict=False):
                inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ult, number, mgpu.c(size, i32)))
            with mgpu.when(inside):
                vector.store(mine, mgpu.memref_slice(ref, tuple(map(_index, own))), [_index(start)])

    scatter_rows(ref, x, *numbers)


def _index(number: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), number)
