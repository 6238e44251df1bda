"""dQ on sm_90, one block of queries to a thread block: the second kernel of the deterministic backward.

Two warpgroups own 64 queries each while the keys that they see stream by: dQ += dS K (eq. 33.8), with dS in registers.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_backward_config import BLOCK_Q, BackwardConfig
from pallas_kernels.gpu.hopper.attention_backward_tile import (
    Operands,
    Scores,
    hide,
    load_ids,
    met,
    ranges_of,
    visit,
)
from pallas_kernels.gpu.hopper.attention_tile import COLUMN, ROW, TILE, place, tiled
from pallas_kernels.launch import cdiv

WARPGROUPS = BLOCK_Q // TILE


class Block(NamedTuple):
    """A thread block's queries, and the blocks [begin, end) of keys that they meet.

    Those outside of [full_begin, full_end) have to be masked.
    """

    batch: Any
    head: Any
    q_start: Any
    row: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


class QueryBlocks:
    """The program of one launch: static facts, and the two roles of its warpgroups."""

    def __init__(self, scores: Scores, config: BackwardConfig) -> None:
        self.scores, self.config, self.shape = scores, config, scores.shape
        self.q_blocks = cdiv(self.shape.T, BLOCK_Q)
        self.kv_blocks = cdiv(self.shape.S, config.block_kv)
        self.programs = self.shape.B * self.shape.N * self.q_blocks

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers."""
        c, s = self.config, self.shape
        ring = functools.partial(plgpu.Barrier, num_barriers=c.kv_stages)
        return {
            "q_smem": tiled((WARPGROUPS, TILE, s.H), dtype),
            "do_smem": tiled((WARPGROUPS, TILE, s.Hv), dtype),
            "k_smem": tiled((c.kv_stages, c.block_kv, s.H), dtype),
            "v_smem": tiled((c.kv_stages, c.block_kv, s.Hv), dtype),
            "q_full": plgpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=2),
            "k_full": ring(),
            "v_full": ring(),
            "k_free": ring(num_arrivals=WARPGROUPS),
            "v_free": ring(num_arrivals=WARPGROUPS),
        }

    def body(self, operands: Operands, outputs: tuple[Any, ...], scratch: dict[str, Any]) -> None:
        """The kernel; dQ is its output."""
        self.gmem, (self.dq,) = operands, outputs
        self.chip: Any = SimpleNamespace(**scratch)
        block = self._block(lax.axis_index("program"))
        warpgroup = lax.axis_index("warpgroup")
        # A branch for each warpgroup: addresses in shared memory are then constants, and do not take registers.
        for w in range(WARPGROUPS):
            pl.when(warpgroup == w)(functools.partial(self._compute, block, w))
        pl.when(warpgroup == WARPGROUPS)(functools.partial(self._copy, block))

    def _block(self, index: Any) -> Block:
        s, mask = self.shape, self.scores.mask
        head, block = place(index, s.B * s.N, self.q_blocks, self.config.section * s.G)
        block = self.q_blocks - 1 - block  # Under a causal mask the last queries see the most keys.
        batch, q_start = lax.div(head, s.N), block * BLOCK_Q
        row = mask.row(self.gmem.bounds, batch)
        seen, full = mask.visible_keys(row, q_start, BLOCK_Q), mask.full_keys(row, q_start, BLOCK_Q)
        ranges = ranges_of(self.gmem.q_ranges, batch, block)
        blocks = met(seen, full, ranges, self.config.block_kv, self.kv_blocks)
        return Block(batch, lax.rem(head, s.N), q_start, row, *blocks)

    def _each(self, block: Block, step: Any) -> None:
        """Call step(j, masked, i) for every block j of keys, of which i counts."""
        visit(block, step, jnp.int32(0), unmasked=self.scores.unmasked(self.config.block_kv))

    def _copy(self, block: Block) -> None:
        """The memory warpgroup: blocks of keys and values as stages become free."""
        plgpu.set_max_registers(self.config.copy_registers, action="decrease")
        kv_head = lax.div(block.head, self.shape.G)

        def step(j: Any, masked: bool, i: Any) -> None:
            slot, keys = lax.rem(i, self.config.kv_stages), pl.ds(j * self.config.block_kv, self.config.block_kv)
            for ring, source in (("k", self.gmem.key), ("v", self.gmem.value)):
                smem, full, free = (getattr(self.chip, f"{ring}_{part}").at[slot] for part in ("smem", "full", "free"))
                pl.when(i >= self.config.kv_stages)(functools.partial(plgpu.barrier_wait, free))
                plgpu.copy_gmem_to_smem(source.at[block.batch, keys, kv_head], smem, full)

        self._each(block, step)

    def _compute(self, block: Block, w: int) -> None:
        """A compute warpgroup: dQ of its 64 queries."""
        plgpu.set_max_registers(self.config.compute_registers, action="increase")
        gmem, rows = self.gmem, pl.ds(block.q_start + w * TILE, TILE)
        plgpu.copy_gmem_to_smem(
            gmem.query.at[block.batch, rows, block.head], self.chip.q_smem.at[w], self.chip.q_full.at[w]
        )
        source = gmem.output_gradient.at[block.batch, rows, block.head]
        plgpu.copy_gmem_to_smem(source, self.chip.do_smem.at[w], self.chip.q_full.at[w])
        lse, delta = (
            plgpu.load(x.at[block.batch, block.head, rows], layout=ROW, optimized=False) for x in (gmem.lse, gmem.delta)
        )
        plgpu.barrier_wait(self.chip.q_full.at[w])

        def total(dq: Any) -> Any:
            self._each(block, functools.partial(self._step, block, w, lse, delta, dq))
            return dq[...]

        dq = pl.run_scoped(total, plgpu.ACC((TILE, self.shape.H), jnp.float32))
        self.chip.q_smem.at[w][...] = (dq * self.scores.scale).astype(self.chip.q_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.chip.q_smem.at[w], self.dq.at[block.batch, rows, block.head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _step(self, block: Block, w: int, lse: Any, delta: Any, dq: Any, j: Any, masked: bool, i: Any) -> None:
        """One block of keys."""
        slot, shape = lax.rem(i, self.config.kv_stages), (TILE, self.config.block_kv)
        k, v = self.chip.k_smem.at[slot], self.chip.v_smem.at[slot]

        def gradients(s: Any, dp: Any) -> Any:
            plgpu.barrier_wait(self.chip.k_full.at[slot])
            plgpu.wgmma(s, self.chip.q_smem.at[w], k.transpose((1, 0)))
            plgpu.barrier_wait(self.chip.v_full.at[slot])
            plgpu.wgmma(dp, self.chip.do_smem.at[w], v.transpose((1, 0)))
            p, slope = self.scores.weights(plgpu.wgmma_accumulator_load(s, wait_n=1), lse, 0)
            if masked:
                p = self._hide(p, block, block.q_start + w * TILE, j * self.config.block_kv)
            p_gradient = p if slope is None else p * slope
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=0)
            plgpu.barrier_arrive(self.chip.v_free.at[slot])
            return (p_gradient * (dp - lax.broadcast_in_dim(delta, shape, [0]))).astype(self.chip.q_smem.dtype)

        ds = pl.run_scoped(gradients, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
        plgpu.wgmma(dq, ds, k)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.chip.k_free.at[slot])

    def _hide(self, p: Any, block: Block, q_start: Any, k_start: Any) -> Any:
        """P with 0 for hidden pairs."""
        span = self.scores.keys_of_queries(block.row, q_start, TILE)
        row_ids = load_ids(self.gmem.q_ids, block.batch, q_start, TILE, ROW)
        column_ids = load_ids(self.gmem.kv_ids, block.batch, k_start, self.config.block_kv, COLUMN)
        return hide(p, span, k_start, row_ids, column_ids)
