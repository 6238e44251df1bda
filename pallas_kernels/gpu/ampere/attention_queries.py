"""A thread block that owns a tile of queries and reads the keys and values that they see, block after block.

The forward and the sum of dQ are such programs. Blocks that the mask shows in full come first and pay no masking.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.ampere.attention_tile import COLUMN, ROW, Copies, sync, tiled
from pallas_kernels.gpu.hopper.attention_backward_tile import met, ranges_of
from pallas_kernels.gpu.hopper.attention_forward_config import AttentionShape
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask
from pallas_kernels.gpu.hopper.attention_tile import index_of, place


class Tile(NamedTuple):
    """A tile of queries, and the blocks [begin, end) of keys that it visits; those that are not full are masked."""

    batch: Any
    head: Any
    q_start: Any
    row: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any

    def block(self, t: Any) -> Any:
        """The t-th block to visit."""
        return ordered(t, self.begin, self.full_begin, self.full_end)


def ordered(t: Any, begin: Any, full_begin: Any, full_end: Any) -> Any:
    """The t-th of blocks from `begin` on when those of [full_begin, full_end) come first."""
    masked, before = t - (full_end - full_begin), full_begin - begin
    return jnp.where(masked < 0, full_begin + t, jnp.where(masked < before, begin + masked, full_begin + t - before))


class Ring(NamedTuple):
    """Blocks of keys and values in shared memory, with barriers where the copy engine fills them."""

    k: Any
    v: Any
    k_full: Any = None
    v_full: Any = None


class QueryTiles:
    """The program, from static facts.

    Args:
      shape: of the launch.
      mask: its structure.
      config: has tile_q, block_kv, section and bulk.
      stages: 1 or 2 blocks of keys, and of values, in shared memory; with 1, a block's keys are gone once its values
        are there.
    """

    gmem: Any  # references to the operands, with k, v, bounds, q_ids, kv_ids and ranges
    ring: Ring

    def __init__(self, shape: AttentionShape, mask: AttentionMask, config: Any, stages: int) -> None:
        self.shape, self.mask, self.config, self.stages = shape, mask, config, stages
        self.copies = Copies(config.bulk)
        self.q_tiles, self.kv_blocks = shape.T // config.tile_q, shape.S // config.block_kv
        self.programs = shape.B * shape.N * self.q_tiles
        whole = mask.bounds is not None and mask.bounds.kv_length >= shape.S
        self.unmasked = whole and not (mask.left or mask.right or mask.segments)

    def ring_scratch(self, dtype: Any) -> Ring:
        """Shared memory and barriers of the blocks."""
        c, s = self.config, self.shape
        barriers = [plgpu.Barrier(num_barriers=self.stages)] * 2 if c.bulk else []
        return Ring(
            tiled((self.stages, c.block_kv, s.H), dtype), tiled((self.stages, c.block_kv, s.Hv), dtype), *barriers
        )

    def tile(self, index: Any) -> Tile:
        """The tile of a thread block: the last queries first, since under a causal mask they see the most keys."""
        s, c, mask = self.shape, self.config, self.mask
        head, step = place(index, s.B * s.N, self.q_tiles, c.section * s.G)
        number = self.q_tiles - 1 - step
        batch, q_start = lax.div(head, s.N), number * c.tile_q
        row = mask.row(self.gmem.bounds, batch)
        seen, full = mask.visible_keys(row, q_start, c.tile_q), mask.full_keys(row, q_start, c.tile_q)
        blocks = met(seen, full, ranges_of(self.gmem.ranges, batch, number), c.block_kv, self.kv_blocks)
        return Tile(batch, lax.rem(head, s.N), q_start, row, *blocks)

    def queries(self, tile: Tile, size: int) -> Any:
        """Where a tile's rows of queries or of output gradients are, in [B, T, N * size]."""
        return tile.batch, pl.ds(tile.q_start, self.config.tile_q), pl.ds(tile.head * size, size)

    def start(self, tile: Tile) -> None:
        """Start the copies of the first block."""
        self._copy(tile, jnp.int32(0), "k")
        if self.stages == 2:
            self._copy(tile, jnp.int32(0), "v")

    def fold(self, tile: Tile, visit: Callable[..., Any], carry: Any) -> Any:
        """Call visit(carry, k, values, k_start, masked) for all blocks, with `values()` to wait for the block's values.

        With one stage, `values()` also gives up the keys, whose successors are on the way from then on.
        """
        c, count = self.config, tile.end - tile.begin

        def step(t: Any, carry: Any, masked: bool) -> Any:
            slot, following = lax.rem(t, self.stages), t + 1
            self._wait(slot, "k")
            if self.stages == 2 and not c.bulk:
                self._wait(slot, "v")
            sync()  # all warps see this block, and are done with the one before it
            if self.stages == 1:
                self._copy(tile, t, "v")
            else:
                pl.when(following < count)(functools.partial(self._copy, tile, following, "k", "v"))

            def values() -> Any:
                if self.stages == 1 or c.bulk:
                    self._wait(slot, "v")
                if self.stages == 1:
                    sync()
                    pl.when(following < count)(functools.partial(self._copy, tile, following, "k"))
                return self.ring.v.at[slot]

            return visit(carry, self.ring.k.at[slot], values, tile.block(t) * c.block_kv, masked)

        full = count if self.unmasked else tile.full_end - tile.full_begin
        carry = lax.fori_loop(0, full, lambda t, carry: step(t, carry, False), carry)
        if self.unmasked:
            return carry
        return lax.fori_loop(full, count, lambda t, carry: step(t, carry, True), carry)

    def _copy(self, tile: Tile, t: Any, *names: str) -> None:
        """Start the copies of the t-th block of keys, of values, or of both."""
        s, c = self.shape, self.config
        slot, rows = lax.rem(t, self.stages), pl.ds(tile.block(t) * c.block_kv, c.block_kv)
        for name in names:
            size = s.H if name == "k" else s.Hv
            source = getattr(self.gmem, name).at[tile.batch, rows, pl.ds(lax.div(tile.head, s.G) * size, size)]
            self.copies.start(source, getattr(self.ring, name).at[slot], self._barrier(slot, name))

    def _wait(self, slot: Any, name: str) -> None:
        self.copies.wait(self._barrier(slot, name))

    def _barrier(self, slot: Any, name: str) -> Any:
        return getattr(self.ring, f"{name}_full").at[slot] if self.config.bulk else None

    def query_ids(self, tile: Tile) -> Any:
        """Segment ids of the tile's queries, in registers; None without segments."""
        if not self.mask.segments:
            return None
        return plgpu.load(
            self.gmem.q_ids.at[tile.batch, pl.ds(tile.q_start, self.config.tile_q)], layout=ROW, optimized=False
        )

    def visible(self, tile: Tile, q_ids: Any, k_start: Any) -> Any:
        """Which pairs of the tile's queries and a block's keys attend, but for q_length."""
        shape = (self.config.tile_q, self.config.block_kv)
        column = lax.broadcast_in_dim(index_of(k_start, shape[1], COLUMN), shape, [1])
        begin, end = self.mask.keys_of(tile.row, index_of(tile.q_start, shape[0], ROW))
        visible = column < (tile.row.kv_length if end is None else lax.broadcast_in_dim(end, shape, [0]))
        if begin is not None:
            visible &= column >= lax.broadcast_in_dim(begin, shape, [0])
        if self.mask.segments:
            keys = pl.ds(k_start, shape[1])
            kv_ids = plgpu.load(self.gmem.kv_ids.at[tile.batch, keys], layout=COLUMN, optimized=False)
            visible &= lax.broadcast_in_dim(q_ids, shape, [0]) == lax.broadcast_in_dim(kv_ids, shape, [1])
        return visible
