"""dK and dV on sm_90, one block of keys to a thread block, and with them that block's part of dQ.

The block stays in shared memory while the queries that see it stream by. Two warpgroups own 64 keys each and work on
transposed scores S^T = K Q^T, so that P^T and dS^T are in registers what the sums dV += P^T dO and dK += dS^T Q
(eq. 33.7 and 33.8) take as their left factor. For dQ = dS K they exchange dS through shared memory, and add each part
from their registers to a float32 array in device memory: five products for each pair of blocks where a kernel of its
own for dQ makes it seven, at the price of sums whose order, hence last bits, differ from run to run.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_backward_config import BackwardConfig
from pallas_kernels.gpu.hopper.attention_backward_sums import add_fragments
from pallas_kernels.gpu.hopper.attention_backward_tile import (
    WARPGROUPS,
    KeyTile,
    Operands,
    Scores,
    hide,
    load_ids,
    meet,
    met,
    ranges_of,
    visit,
)
from pallas_kernels.gpu.hopper.attention_tile import COLUMN, ROW, TILE, place, tiled
from pallas_kernels.launch import cdiv

EXCHANGES = 2  # buffers of dS: one is read while the next is written


class KeyBlocks:
    """The program of one launch: static facts, and the two roles of its warpgroups.

    Args:
      scores: what is static about the call.
      config: the launch settings.
      dq: a reference to float32 in `BackwardShape.dq_tiles`, to which dQ / scale is added; None to leave dQ out.
    """

    def __init__(self, scores: Scores, config: BackwardConfig, dq: Any = None) -> None:
        self.scores, self.config, self.shape = scores, config, scores.shape
        self.dq, self.fused = dq, dq is not None
        self.block_kv = self.shape.block_kv
        self.q_blocks = cdiv(self.shape.T, config.block_q)
        self.kv_blocks = cdiv(self.shape.S, self.block_kv)
        self.programs = self.shape.B * self.shape.K * self.kv_blocks
        # A warpgroup's share of a block of dQ, a tile of 64 x 64: its queries, or half of the columns.
        self.by_rows = config.block_q == WARPGROUPS * TILE

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers."""
        c, s = self.config, self.shape
        ring = functools.partial(plgpu.Barrier, num_barriers=c.stages)
        buffers = {
            "k_smem": tiled((self.block_kv, s.H), dtype),
            "v_smem": tiled((self.block_kv, s.Hv), dtype),
            "q_smem": tiled((c.stages, c.block_q, s.H), dtype),
            "do_smem": tiled((c.stages, c.block_q, s.Hv), dtype),
            "lse_smem": plgpu.SMEM((c.stages, c.block_q), jnp.float32),
            "delta_smem": plgpu.SMEM((c.stages, c.block_q), jnp.float32),
            "kv_full": plgpu.Barrier(num_arrivals=2),
            "q_full": ring(num_arrivals=2),
            "do_full": ring(num_arrivals=2),
            "q_free": ring(num_arrivals=WARPGROUPS),
            "do_free": ring(num_arrivals=WARPGROUPS),
        }
        if self.fused:
            buffers["ds_smem"] = tiled((EXCHANGES, self.block_kv, c.block_q), dtype)
        return buffers

    def body(self, operands: Operands, outputs: tuple[Any, ...], scratch: dict[str, Any]) -> None:
        """The kernel; dK and dV are its outputs."""
        self.gmem, (self.dk, self.dv) = operands, outputs
        self.chip: Any = SimpleNamespace(**scratch)
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        # A branch for each warpgroup: addresses in shared memory are then constants, and do not take registers. Each
        # works out its block itself, once it has its registers: numbers from before the branch would be spilled.
        for w in range(WARPGROUPS):
            pl.when(warpgroup == w)(functools.partial(self._compute, program, w))
        pl.when(warpgroup == WARPGROUPS)(functools.partial(self._copy, program))

    def _block(self, index: Any) -> KeyTile:
        s, mask, size = self.shape, self.scores.mask, self.config.block_q
        head, block = place(index, s.B * s.K, self.kv_blocks, self.config.section)
        batch, k_start = lax.div(head, s.K), block * self.block_kv
        row = mask.row(self.gmem.bounds, batch)
        blocks = met(
            mask.visible_queries(row, k_start, self.block_kv),
            mask.full_queries(row, k_start, self.block_kv),
            ranges_of(self.gmem.kv_ranges, batch, block),
            size,
            self.q_blocks,
            # Without a limit at that end, the last queries are hidden by their lse at most.
            open_ended=not (mask.left or mask.segments),
        )
        return KeyTile(batch, lax.rem(head, s.K), k_start, row, *blocks)

    def _each(self, block: KeyTile, step: Any) -> None:
        """Call step(head, q_start, masked, i) for every block of queries, of which i counts."""

        def of_head(member: Any, i: Any) -> Any:
            def call(j: Any, masked: bool, i: Any) -> None:
                step(block.kv_head * self.shape.G + member, j * self.config.block_q, masked, i)

            return visit(block, call, i, unmasked=self.scores.unmasked(self.block_kv))

        if self.shape.G == 1:
            of_head(0, jnp.int32(0))
        else:
            lax.fori_loop(0, self.shape.G, of_head, jnp.int32(0))

    def _copy(self, program: Any) -> None:
        """The memory warpgroup: K and V once, then blocks of queries as stages become free."""
        plgpu.set_max_registers(self.config.copy_registers, action="decrease")
        block = self._block(program)
        gmem, keys = self.gmem, pl.ds(block.k_start, self.block_kv)
        plgpu.copy_gmem_to_smem(gmem.key.at[block.batch, keys, block.kv_head], self.chip.k_smem, self.chip.kv_full)
        plgpu.copy_gmem_to_smem(gmem.value.at[block.batch, keys, block.kv_head], self.chip.v_smem, self.chip.kv_full)

        def step(head: Any, q_start: Any, masked: bool, i: Any) -> None:
            slot, rows = lax.rem(i, self.config.stages), pl.ds(q_start, self.config.block_q)
            for names in (("q", "query", "lse"), ("do", "output_gradient", "delta")):
                ring, matrix, vector = names
                full = getattr(self.chip, f"{ring}_full").at[slot]
                free = getattr(self.chip, f"{ring}_free").at[slot]
                pl.when(i >= self.config.stages)(functools.partial(plgpu.barrier_wait, free))
                source = getattr(gmem, matrix).at[block.batch, rows, head]
                plgpu.copy_gmem_to_smem(source, getattr(self.chip, f"{ring}_smem").at[slot], full)
                source = getattr(gmem, vector).at[block.batch, head, rows]
                plgpu.copy_gmem_to_smem(source, getattr(self.chip, f"{vector}_smem").at[slot], full)

        self._each(block, step)

    def _compute(self, program: Any, w: int) -> None:
        """A compute warpgroup: the sums of its 64 keys."""
        plgpu.set_max_registers(self.config.compute_registers, action="increase")
        block = self._block(program)
        s, mine = self.shape, pl.ds(w * TILE, TILE)
        plgpu.barrier_wait(self.chip.kv_full)

        def sums(dk: Any, dv: Any) -> tuple[Any, Any]:
            self._each(block, functools.partial(self._step, block, w, dk, dv))
            return dk[...], dv[...]

        dk, dv = pl.run_scoped(sums, plgpu.ACC((TILE, s.H), jnp.float32), plgpu.ACC((TILE, s.Hv), jnp.float32))
        if self.fused:
            meet()  # The other warpgroup multiplies by all of K.
        dtype = self.chip.k_smem.dtype
        self.chip.k_smem[mine] = (dk * self.scores.scale).astype(dtype)
        self.chip.v_smem[mine] = dv.astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(block.k_start + w * TILE, TILE)
        plgpu.copy_smem_to_gmem(self.chip.k_smem.at[mine], self.dk.at[block.batch, rows, block.kv_head])
        plgpu.copy_smem_to_gmem(self.chip.v_smem.at[mine], self.dv.at[block.batch, rows, block.kv_head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _step(self, block: KeyTile, w: int, dk: Any, dv: Any, head: Any, q_start: Any, masked: bool, i: Any) -> None:
        """One block of queries: S, dP, dV, dQ, dK are issued in this order, and each waited for as late as can be."""
        slot, mine = lax.rem(i, self.config.stages), pl.ds(w * TILE, TILE)
        q, do = self.chip.q_smem.at[slot], self.chip.do_smem.at[slot]
        p, ds = self._tile(block, w, slot, q_start, masked)
        plgpu.wgmma(dv, p, do)
        if self.fused:
            exchange = lax.rem(i, EXCHANGES)
            self.chip.ds_smem.at[exchange][mine] = ds
            meet()

        def products(dq: Any) -> None:
            if self.fused:
                ds_smem, k = self.chip.ds_smem.at[exchange], self.chip.k_smem
                ds_smem, k = (ds_smem.at[:, mine], k) if self.by_rows else (ds_smem, k.at[:, mine])
                plgpu.wgmma(dq, ds_smem.transpose((1, 0)), k)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(self.chip.do_free.at[slot])
            plgpu.wgmma(dk, ds, q)
            if self.fused:
                self._add(block, w, head, q_start, plgpu.wgmma_accumulator_load(dq, wait_n=1))
            else:
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(self.chip.do_free.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.chip.q_free.at[slot])

        if self.fused:
            pl.run_scoped(products, plgpu.ACC((TILE, TILE), jnp.float32))
        else:
            products(None)

    def _tile(self, block: KeyTile, w: int, slot: Any, q_start: Any, masked: bool) -> tuple[Any, Any]:
        """P^T and dS^T = P^T (dP^T - delta) (eq. 33.8) of a warpgroup's keys, in the dtype of the operands."""
        shape, mine = (TILE, self.config.block_q), pl.ds(w * TILE, TILE)
        dtype, sums = self.chip.k_smem.dtype, plgpu.ACC(shape, jnp.float32)

        def scores(s: Any) -> tuple[Any, Any]:
            plgpu.wgmma(s, self.chip.k_smem.at[mine], self.chip.q_smem.at[slot].transpose((1, 0)))
            plgpu.barrier_wait(self.chip.do_full.at[slot])
            return pl.run_scoped(functools.partial(gradients, s), sums)

        def gradients(s: Any, dp: Any) -> tuple[Any, Any]:
            plgpu.wgmma(dp, self.chip.v_smem.at[mine], self.chip.do_smem.at[slot].transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s, wait_n=1)
            p, slope = self._weights(block, s, block.k_start + w * TILE, slot, q_start, masked)
            if self.fused and self.by_rows:
                # Or else the compiler finds too few registers with 128 queries, and lets products wait for each other.
                p = lax.optimization_barrier(p)
            p_gradient = p if slope is None else p * slope
            late = self.fused and (masked or self.by_rows)  # where registers are short
            delta = None if late else self._delta(slot, shape)
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=0)
            ds = p_gradient * (dp - (self._delta(slot, shape) if late else delta))
            return p.astype(dtype), ds.astype(dtype)

        # A sum that begins once its factors are there starts from its first product, and clears no registers.
        plgpu.barrier_wait(self.chip.q_full.at[slot])
        return pl.run_scoped(scores, sums)

    def _delta(self, slot: Any, shape: tuple[int, int]) -> Any:
        return lax.broadcast_in_dim(plgpu.load(self.chip.delta_smem.at[slot], layout=COLUMN), shape, [1])

    def _weights(self, block: KeyTile, s: Any, k_start: Any, slot: Any, q_start: Any, masked: bool) -> tuple[Any, Any]:
        """P^T of products S^T, and the slope of the soft cap."""
        p, slope = self.scores.weights(s, plgpu.load(self.chip.lse_smem.at[slot], layout=COLUMN), 1)
        return self._hide(p, block, k_start, q_start) if masked else p, slope

    def _hide(self, p: Any, block: KeyTile, k_start: Any, q_start: Any) -> Any:
        """P^T with 0 for hidden pairs."""
        span = self.scores.queries_of_keys(block.row, k_start, TILE)
        row_ids = load_ids(self.gmem.kv_ids, block.batch, k_start, TILE, ROW)
        column_ids = load_ids(self.gmem.q_ids, block.batch, q_start, self.config.block_q, COLUMN)
        return hide(p, span, q_start, row_ids, column_ids)

    def _add(self, block: KeyTile, w: int, head: Any, q_start: Any, dq: Any) -> None:
        """Add a warpgroup's share of a block of dQ to device memory."""
        rows, columns = (w, 0) if self.by_rows else (0, w)
        add_fragments(self.dq.at[block.batch, head, lax.div(q_start, TILE) + rows, columns], dq)
