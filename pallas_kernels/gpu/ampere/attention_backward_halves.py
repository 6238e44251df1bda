"""dK and dV on mma where each of two warpgroups scores all keys of a block, with half of the queries that meet them.

One warpgroup then sums dV for all of those keys and the other dK: a warp owns 32 rows of every product but that of dQ,
so that what it reads of the other factor serves two mma and not one. P and dS pass through shared memory. The form with
a warpgroup for each half of the keys (`KeyBlocks`) exchanges dS alone, and reads a quarter more.
"""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.ampere.attention_backward_keys import KeyBlocks
from pallas_kernels.gpu.ampere.attention_tile import COLUMN, DEPTH, MATRIX, full, left, right, scores, tiled
from pallas_kernels.gpu.hopper.attention_backward_tile import KeyTile
from pallas_kernels.gpu.memory import store

EXCHANGED_BYTES = 32  # of a row of a tile of P or dS, which is read 16 columns at a time


class HalfQueryBlocks(KeyBlocks):
    """The program of a thread block; arguments as in `KeyBlocks`."""

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers of a thread block."""
        c = self.config
        buffers = super().scratch(dtype)
        for name in ("p_smem", "ds_smem"):
            buffers[name] = tiled((c.keys, c.block_q), dtype, EXCHANGED_BYTES)
        return buffers

    def _sums(self, w: int) -> tuple[Any, ...]:
        c, s = self.config, self.shape
        return (full((c.keys, s.Hv if w == 0 else s.H), 0, MATRIX),)

    def _store(self, block: KeyTile, w: int, sums: tuple[Any, ...]) -> None:
        (total,) = sums
        output, size = (self.dv, self.shape.Hv) if w == 0 else (self.dk, self.shape.H)
        total = total if w == 0 else total * self.facts.scale
        rows = pl.ds(block.k_start, self.config.keys)
        store(output.at[block.batch, rows, pl.ds(block.kv_head * size, size)], total.astype(output.dtype))

    def _step(self, block: KeyTile, w: int, count: Any, masked: bool, t: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        """One block of queries."""
        c, (total,) = self.config, sums
        slot, half = lax.rem(t, c.stages), c.block_q // 2
        head, q_start = self._place(block, t)
        mine = pl.ds(w * half, half)
        lse, delta = (
            plgpu.load(x.at[block.batch, head, pl.ds(q_start + w * half, half)], layout=COLUMN, optimized=False)
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
        p, slope = self.facts.weights(scores(self.chip.k_smem, q.at[mine]), lse, 1)
        if masked:
            p = self._hide(p, block, block.k_start, q_start + w * half)
        self.chip.p_smem.at[:, mine][...] = p.astype(q.dtype)
        if c.bulk:
            self.copies.wait(self._barrier("do", slot))
        p = p if slope is None else p * slope
        ds = p * (scores(self.chip.v_smem, do.at[mine]) - lax.broadcast_in_dim(delta, p.shape, [1]))
        self.chip.ds_smem.at[:, mine][...] = ds.astype(q.dtype)
        self._meet()
        if self.fused:
            self._add(block, w, head, q_start)
        x, y = (self.chip.p_smem, do) if w == 0 else (self.chip.ds_smem, q)
        for i in range(0, c.block_q, DEPTH):
            total = plgpu.mma(total, left(x.at[:, pl.ds(i, DEPTH)]), right(y.at[pl.ds(i, DEPTH)]))
        if c.stages == 1:
            self._meet()
            self._copy_next(block, w, t, count)
        return (total,)
