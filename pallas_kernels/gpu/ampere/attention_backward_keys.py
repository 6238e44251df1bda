"""dK and dV on mma, one block of keys to a thread block, and with them that block's part of dQ.

The block stays in shared memory while the queries that see it stream by. Each warpgroup owns 64 keys and works on
transposed scores S^T = K Q^T, so that P^T and dS^T are in registers what the sums dV += P^T dO and dK += dS^T Q
(eq. 33.7 and 33.8) take as their left factor. For dQ = dS K the warps exchange dS through shared memory and add each
part to a float32 array in device memory: five products for each pair of blocks where a kernel of its own for dQ makes
it seven, at the price of sums whose order, hence last bits, differ from run to run.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.ampere.attention_backward_config import BackwardConfig
from pallas_kernels.gpu.ampere.attention_queries import ordered
from pallas_kernels.gpu.ampere.attention_tile import (
    COLUMN,
    DEPTH,
    MATRIX,
    ROW,
    TILE,
    Copies,
    add_product,
    full,
    left,
    right,
    scores,
    sync,
    tiled,
)
from pallas_kernels.gpu.hopper.attention_backward_tile import KeyTile, Scores, hide, load_ids, met, ranges_of
from pallas_kernels.gpu.hopper.attention_tile import place
from pallas_kernels.gpu.memory import store


class KeyBlocks:
    """The program of a thread block, from static facts.

    Args:
      facts: what is static about the scores.
      config: the launch settings.
      dq: a reference to float32 [B, T, N * H], to which dQ / scale is added; None to leave dQ out.
    """

    def __init__(self, facts: Scores, config: BackwardConfig, dq: Any = None) -> None:
        self.facts, self.config, self.shape = facts, config, facts.shape
        self.dq, self.fused, self.threads = dq, dq is not None, config.warpgroups
        self.copies = Copies(config.bulk)
        self.q_blocks, self.kv_blocks = self.shape.T // config.block_q, self.shape.S // config.keys
        self.programs = self.shape.B * self.shape.K * self.kv_blocks

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers of a thread block."""
        c, s = self.config, self.shape
        buffers = {
            "k_smem": tiled((c.keys, s.H), dtype),
            "v_smem": tiled((c.keys, s.Hv), dtype),
            "q_smem": tiled((c.stages, c.block_q, s.H), dtype),
            "do_smem": tiled((c.stages, c.block_q, s.Hv), dtype),
        }
        if c.bulk:
            for name, count in (("k", 1), ("v", 1), ("q", c.stages), ("do", c.stages)):
                buffers[f"{name}_full"] = plgpu.Barrier(num_barriers=count)
        if c.warpgroups == 2:
            buffers["met"] = plgpu.Barrier(num_arrivals=2)
        if self.fused:
            buffers["ds_smem"] = tiled((c.keys, c.block_q), dtype)
            if c.bulk:
                buffers["dq_smem"] = tiled((c.warpgroups, *c.dq_share(s.H)), jnp.float32)
        return buffers

    def body(self, operands: Any, outputs: tuple[Any, ...], scratch: dict[str, Any]) -> None:
        """The kernel; dK and dV are its outputs."""
        self.gmem, (self.dk, self.dv) = operands, outputs
        self.chip: Any = SimpleNamespace(**scratch)
        block = self._block(lax.axis_index("program"))
        if self.config.warpgroups == 1:
            self._compute(block, 0)
            return
        warpgroup = lax.axis_index("warpgroup")
        # A branch for each warpgroup: addresses in shared memory are then constants, and do not take registers.
        for w in range(2):
            pl.when(warpgroup == w)(functools.partial(self._compute, block, w))

    def _block(self, index: Any) -> KeyTile:
        s, mask, c = self.shape, self.facts.mask, self.config
        head, block = place(index, s.B * s.K, self.kv_blocks, max(1, c.section // s.G))
        batch, k_start = lax.div(head, s.K), block * c.keys
        row = mask.row(self.gmem.bounds, batch)
        blocks = met(
            mask.visible_queries(row, k_start, c.keys),
            mask.full_queries(row, k_start, c.keys),
            ranges_of(self.gmem.kv_ranges, batch, block),
            c.block_q,
            self.q_blocks,
            # Without a limit at that end, the last queries are hidden by their lse at most.
            open_ended=not (mask.left or mask.segments),
        )
        return KeyTile(batch, lax.rem(head, s.K), k_start, row, *blocks)

    def _place(self, block: KeyTile, t: Any) -> tuple[Any, Any]:
        """(query head, first query) of the t-th block of queries: full ones of every head of the group come first."""
        G, full_count = self.shape.G, block.full_end - block.full_begin
        number = t
        member: Any = 0
        if G > 1:
            masked_count = block.end - block.begin - full_count
            rest = t - G * full_count
            count = jnp.maximum(jnp.where(rest < 0, full_count, masked_count), 1)
            of_group = jnp.where(rest < 0, t, rest)
            member = lax.div(of_group, count)
            number = of_group - member * count + jnp.where(rest < 0, 0, full_count)
        j = ordered(number, block.begin, block.full_begin, block.full_end)
        return block.kv_head * G + member, j * self.config.block_q

    def _copy(self, block: KeyTile, w: int, t: Any) -> None:
        """Start the copies of the t-th block of queries and output gradients, half by each of two warpgroups."""
        head, q_start = self._place(block, t)
        s, c, slot = self.shape, self.config, lax.rem(t, self.config.stages)
        rows = pl.ds(q_start, c.block_q)
        for name, size, by in (("q", s.H, 0), ("do", s.Hv, c.warpgroups - 1)):
            if w == by:
                source = getattr(self.gmem, name).at[block.batch, rows, pl.ds(head * size, size)]
                self.copies.start(source, getattr(self.chip, f"{name}_smem").at[slot], self._barrier(name, slot))

    def _barrier(self, name: str, slot: Any = 0) -> Any:
        return getattr(self.chip, f"{name}_full").at[slot] if self.config.bulk else None

    def _meet(self) -> None:
        """Wait for all threads of the thread block."""
        if self.config.warpgroups == 1:
            sync()
        else:
            plgpu.barrier_arrive(self.chip.met)
            plgpu.barrier_wait(self.chip.met)

    def _compute(self, block: KeyTile, w: int) -> None:
        """A warpgroup: the sums of its 64 keys."""
        s, c = self.shape, self.config
        keys = pl.ds(block.k_start, c.keys)
        for name, size, by in (("k", s.H, 0), ("v", s.Hv, c.warpgroups - 1)):
            if w == by:
                source = getattr(self.gmem, name).at[block.batch, keys, pl.ds(block.kv_head * size, size)]
                self.copies.start(source, getattr(self.chip, f"{name}_smem"), self._barrier(name))
        self._copy(block, w, jnp.int32(0))
        if c.bulk:
            self.copies.wait(self._barrier("k"))
            self.copies.wait(self._barrier("v"))
        full_count, count = block.full_end - block.full_begin, block.end - block.begin
        step = functools.partial(self._step, block, w, s.G * count)
        sums = self._sums(w)
        if self.facts.unmasked(c.keys):
            full_count = count
        sums = lax.fori_loop(0, s.G * full_count, functools.partial(step, False), sums)
        if not self.facts.unmasked(c.keys):
            sums = lax.fori_loop(s.G * full_count, s.G * count, functools.partial(step, True), sums)
        self._store(block, w, sums)
        if self.fused and c.bulk:
            plgpu.wait_smem_to_gmem(0)

    def _sums(self, w: int) -> tuple[Any, ...]:
        """What a warpgroup sums, before the first block."""
        return full((TILE, self.shape.H), 0, MATRIX), full((TILE, self.shape.Hv), 0, MATRIX)

    def _store(self, block: KeyTile, w: int, sums: tuple[Any, ...]) -> None:
        """Write what a warpgroup has summed."""
        s, (dk, dv) = self.shape, sums
        rows = pl.ds(block.k_start + w * TILE, TILE)
        for output, total, size in ((self.dk, dk * self.facts.scale, s.H), (self.dv, dv, s.Hv)):
            target = output.at[block.batch, rows, pl.ds(block.kv_head * size, size)]
            store(target, total.astype(output.dtype))

    def _copy_next(self, block: KeyTile, w: int, t: Any, count: Any) -> None:
        """Start the copies of the block after the t-th, if there is one."""
        pl.when(t + 1 < count)(functools.partial(self._copy, block, w, t + 1))

    def _step(self, block: KeyTile, w: int, count: Any, masked: bool, t: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        """One block of queries."""
        c, mine, (dk, dv) = self.config, pl.ds(w * TILE, TILE), sums
        slot = lax.rem(t, c.stages)
        head, q_start = self._place(block, t)
        lse, delta = (
            plgpu.load(x.at[block.batch, head, pl.ds(q_start, c.block_q)], layout=COLUMN, optimized=False)
            for x in (self.gmem.lse, self.gmem.delta)
        )
        if not c.bulk:
            self.copies.wait(None)
        self._meet()  # all warps see this block, and are done with the one before it
        if c.stages == 2:
            self._copy_next(block, w, t, count)
        q, do = self.chip.q_smem.at[slot], self.chip.do_smem.at[slot]
        if c.bulk:
            self.copies.wait(self._barrier("q", slot))
        p, slope = self.facts.weights(scores(self.chip.k_smem.at[mine], q), lse, 1)
        if masked:
            p = self._hide(p, block, block.k_start + w * TILE, q_start)
        if c.bulk:
            self.copies.wait(self._barrier("do", slot))
        dv = add_product(dv, p, do)
        p = p if slope is None else p * slope
        ds = p * (scores(self.chip.v_smem.at[mine], do) - lax.broadcast_in_dim(delta, p.shape, [1]))
        ds = ds.astype(q.dtype)
        if self.fused:
            self.chip.ds_smem.at[mine][...] = ds
            self._meet()
            self._add(block, w, head, q_start)
        dk = add_product(dk, ds, q)
        if c.stages == 1:
            self._meet()
            self._copy_next(block, w, t, count)
        return dk, dv

    def _hide(self, p: Any, block: KeyTile, k_start: Any, q_start: Any) -> Any:
        """P^T with 0 for hidden pairs."""
        keys, queries = p.shape
        span = self.facts.queries_of_keys(block.row, k_start, keys)
        row_ids = load_ids(self.gmem.kv_ids, block.batch, k_start, keys, ROW)
        column_ids = load_ids(self.gmem.q_ids, block.batch, q_start, queries, COLUMN)
        return hide(p, span, q_start, row_ids, column_ids)

    def _add(self, block: KeyTile, w: int, head: Any, q_start: Any) -> None:
        """Add a warpgroup's share of a block of dQ to device memory."""
        c, H = self.config, self.shape.H
        rows, columns = c.dq_share(H)
        row, column = (w * rows, 0) if rows < c.block_q else (0, w * columns)
        dq = full((rows, columns), 0, MATRIX)
        for i in range(0, c.keys, DEPTH):
            ds = self.chip.ds_smem.at[pl.ds(i, DEPTH), pl.ds(row, rows)].transpose((1, 0))
            dq = plgpu.mma(dq, left(ds), right(self.chip.k_smem.at[pl.ds(i, DEPTH), pl.ds(column, columns)]))
        target = self.dq.at[block.batch, pl.ds(q_start + row, rows), pl.ds(head * H + column, columns)]
        if not c.bulk:
            plgpu.atomic_add(target, dq)
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.chip.dq_smem.at[w][...] = dq
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.chip.dq_smem.at[w], target, reduction_op="add")
