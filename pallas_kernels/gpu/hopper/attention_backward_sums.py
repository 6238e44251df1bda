"""The float32 sums of dQ in device memory: how blocks of keys add to them, and how they leave as rows of dQ.

Each tile of 64 x 64 is stored in the order in which the threads of a warpgroup hold an accumulator: four numbers of
each thread, then the next four of each. What is added goes from registers to whole lines of memory; by the copy engine
it would pass through shared memory, which is busy with the products.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.gpu.hopper.attention_tile import MATRIX, TILE, block_of_rows, tiled
from pallas_kernels.launch import cdiv

THREADS = 128  # of a warpgroup
TOGETHER = 4  # numbers of a thread that lie side by side: the most that one instruction takes
ROUND = TOGETHER * THREADS  # numbers that all threads touch with one instruction


def _start(tile: Any) -> Any:
    """Where the first numbers of a thread lie."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.thread_idx(), mgpu.c(THREADS, i32))
    offset = arith.muli(thread, mgpu.c(TOGETHER, i32))
    return mgpu.getelementptr(mgpu.memref_ptr(tile), [offset], ir.F32Type.get())


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), MATRIX))
def add_fragments(_: Any, target: Any, tile: Any) -> None:
    """Add a tile [64, 64] to one in device memory; whoever else adds to it comes before or after, number by number."""
    start = _start(target)
    numbers = [vector.extract(pair, [], [n]) for pair in tile.registers.flat for n in range(2)]
    for i in range(0, len(numbers), TOGETHER):
        mgpu.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
            mgpu.getelementptr(start, [i * THREADS], ir.F32Type.get()),
            *numbers[i : i + TOGETHER],
            has_side_effects=True,
        )


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.float32, layout=MATRIX)
)
def load_fragments(_: Any, source: Any) -> Any:
    """The tile [64, 64] that `add_fragments` has added to."""
    f32, start, layout = ir.F32Type.get(), _start(source), mosaic.WGMMA_LAYOUT
    registers = np.empty(TILE * TILE // THREADS // 2, object)
    for i in range(TILE * TILE // ROUND):
        numbers = mgpu.inline_ptx(
            "ld.global.nc.L1::no_allocate.v4.f32 {$0, $1, $2, $3}, [$4];",
            mgpu.getelementptr(start, [i * ROUND], f32),
            result_types=[f32] * TOGETHER,
        )
        for n in range(2):
            pair = numbers[2 * n : 2 * n + 2]
            registers[2 * i + n] = vector.from_elements(ir.VectorType.get((2,), f32), pair)
    return mosaic.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((TILE, TILE))), _layout=layout, _is_signed=None
    )


def rows_of(sums: Array, length: int, *, scale: float, dtype: Any) -> Array:
    """dQ from its sums.

    Args:
      sums: float32 in `BackwardShape.dq_tiles`, each tile as `add_fragments` leaves it.
      length: T, a multiple of 8.
      scale: factor of every number.
      dtype: of the result.

    Returns:
      [B, T, N, H] of the dtype.
    """
    B, N, _, columns = sums.shape[:4]
    blocks = cdiv(length, TILE)

    def body(sums: Any, dq: Any, rows: Any) -> None:
        batch, head, block = block_of_rows(N, blocks)
        for column in range(columns):
            part = load_fragments(sums.at[batch, head, block, column])
            rows[:, pl.ds(column * TILE, TILE)] = (part * scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(rows, dq.at[batch, pl.ds(block * TILE, TILE), head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, length, N, columns * TILE), dtype),
        scratch_types=[tiled((TILE, columns * TILE), dtype)],
        grid=(B * N * blocks,),
        grid_names=("program",),
        kernel_name="flashspec_hopper_attention_backward_rows",
    )
    with jax.enable_x64(False):  # indices within a kernel are 32 bits wide, whatever the caller's numbers are
        rows: Array = run(sums)
    return rows
