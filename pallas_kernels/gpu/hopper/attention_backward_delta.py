"""What the Hopper attention backward needs of its rows, in one pass over device memory: delta, and zeros to add dQ to.

Both are bound by bytes. A pass that reads and writes at once takes less time than one that reads and one that writes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_backward_config import BackwardShape
from pallas_kernels.gpu.hopper.attention_tile import TILE, block_of_rows, tiled


def delta_and_zeros(output: Array, output_gradient: Array, *, head_size: int) -> tuple[Array, Array]:
    """Sums of output times its gradient (delta of eq. 33.7), and zeros.

    Args:
      output, output_gradient: [B, T, N, Hv] bfloat16 or float16; T is a multiple of 8 and Hv one of 64.
      head_size: H of the query, a multiple of 64.

    Returns:
      float32 [B, N, T in whole blocks of 128], the sums over Hv in float32; float32 zeros in `BackwardShape.dq_tiles`.

    Raises:
      ValueError: shapes or dtypes that differ or are others, or sizes that are no such multiples.
    """
    if output.ndim != 4 or output.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"`output`: expected bfloat16 or float16 [B, T, N, Hv], got {output.dtype} {list(output.shape)}"
        )
    if (output.shape, output.dtype) != (output_gradient.shape, output_gradient.dtype):
        raise ValueError(
            f"`output_gradient`: expected {output.dtype} {list(output.shape)} as `output`, "
            f"got {output_gradient.dtype} {list(output_gradient.shape)}"
        )
    B, T, N, Hv = output.shape
    for name, size, multiple in (("T", T, 8), ("Hv", Hv, TILE), ("head_size", head_size, TILE)):
        if size % multiple:
            raise ValueError(f"`{name}`: expected a multiple of {multiple}, got {size}")
    tiles = BackwardShape(B, T, T, N, N, head_size, Hv).dq_tiles
    blocks = tiles[2]
    if 0 in tiles:
        return jnp.zeros((B, N, blocks * TILE), jnp.float32), jnp.zeros(tiles, jnp.float32)

    def body(o: Any, do: Any, delta: Any, dq: Any, o_smem: Any, do_smem: Any, sums: Any, zeros: Any, full: Any) -> None:
        batch, head, block = block_of_rows(N, blocks)
        rows = pl.ds(block * TILE, TILE)
        plgpu.copy_gmem_to_smem(o.at[batch, rows, head], o_smem, full)
        plgpu.copy_gmem_to_smem(do.at[batch, rows, head], do_smem, full)
        zeros[...] = jnp.zeros_like(zeros)
        plgpu.commit_smem()
        for column in range(tiles[3]):
            plgpu.copy_smem_to_gmem(zeros, dq.at[batch, head, block, column])
        plgpu.barrier_wait(full)
        parts = (pl.ds(column, TILE) for column in range(0, Hv, TILE))  # of a row: whole ones take too many registers
        sums[...] = sum((_wide(o_smem, part) * _wide(do_smem, part)).sum(axis=1) for part in parts)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, delta.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    factor = tiled((TILE, Hv), output.dtype)
    run = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((B, N, blocks * TILE), jnp.float32),
            jax.ShapeDtypeStruct(tiles, jnp.float32),
        ],
        scratch_types=[
            factor,
            factor,
            plgpu.SMEM((TILE,), jnp.float32),
            tiled((TILE, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(B * N * blocks,),
        grid_names=("program",),
        kernel_name="flashspec_hopper_attention_backward_delta",
    )
    with jax.enable_x64(False):  # indices within a kernel are 32 bits wide, whatever the caller's numbers are
        delta, zeros = run(output, output_gradient)
    return delta, zeros


def _wide(smem: Any, columns: Any) -> Array:
    return smem[:, columns].astype(jnp.float32)
