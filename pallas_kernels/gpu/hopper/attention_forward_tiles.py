"""Which tile of queries a thread block of the Hopper attention forward works on, and which blocks of keys it visits.

A thread block stays for several tiles, so that the copies of one begin while the one before it is computed. Tiles are
dealt out before the launch, by how many blocks they visit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gpu.hopper.attention_forward_config import AttentionShape, ForwardConfig
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, Bounds
from pallas_kernels.gpu.hopper.attention_tile import place
from pallas_kernels.launch import cdiv

MOST_DEALT = 32768  # tiles that are dealt out before the launch; more of them balance without it


class Tile(NamedTuple):
    """One tile of queries, and the blocks of keys that it visits: [begin, end), from the last to the first.

    Blocks in [full_begin, full_end) need no masking.
    """

    batch: Any
    head: Any
    q_start: Any
    row: Bounds
    begin: Any
    end: Any
    full_begin: Any
    full_end: Any


class Tiles:
    """The tiles of one launch, from static facts."""

    def __init__(self, shape: AttentionShape, mask: AttentionMask, config: ForwardConfig) -> None:
        self.shape, self.mask, self.config = shape, mask, config
        self.q_tiles, self.kv_blocks = cdiv(shape.T, config.tile_q), cdiv(shape.S, config.block_kv)
        self.count = shape.B * shape.N * self.q_tiles
        self.section = min(shape.B * shape.N, config.heads_per_section * shape.G)
        dealt = config.programs > 0 and self.count <= MOST_DEALT
        self.programs = min(self.count, config.programs) if dealt else self.count
        self.order = deal(self._costs(), self.programs) if dealt else None

    @property
    def unmasked(self) -> bool:
        """Whether no block of any tile needs masking."""
        mask, S = self.mask, self.shape.S
        whole = mask.bounds is not None and mask.bounds.kv_length >= S and S % self.config.block_kv == 0
        return whole and not (mask.left or mask.right or mask.segments)

    def each(self, order: Any, program: Any, step: Callable[[Any, Any, Any], Any]) -> None:
        """Run `step(i, index, count)` for every tile of a program, carrying `count` from 0."""
        if self.order is None:
            step(jnp.int32(0), program, jnp.int32(0))
            return

        def dealt(i: Any, carry: Any) -> Any:
            index, count = carry
            following = order[i + 2, program]  # read early: it is there when the next tile begins
            return following, step(i, index, count)

        lax.fori_loop(0, order[0, program], dealt, (order[1, program], jnp.int32(0)))

    def at(self, index: Any, bounds: Any, ranges: Any) -> Tile:
        """The tile of an index: heads of a section after one another, and of each the last queries first."""
        s, c = self.shape, self.config
        head, step = place(index, s.B * s.N, self.q_tiles, self.section)
        batch, head = lax.div(head, s.N), lax.rem(head, s.N)
        number = self.q_tiles - 1 - step
        q_start = number * c.tile_q
        row = self.mask.row(bounds, batch)
        begin, end = self.mask.visible_keys(row, q_start, c.tile_q)
        full_begin, full_end = self.mask.full_keys(row, q_start, c.tile_q)
        if self.mask.segments:
            near = [ranges[batch, number, column] for column in range(4)]
            begin, end = jnp.maximum(begin, near[0]), jnp.minimum(end, near[1])
            full_begin, full_end = jnp.maximum(full_begin, near[2]), jnp.minimum(full_end, near[3])
        # A tile that sees nothing visits one block, all of it hidden: then no tile is a special case.
        begin = jnp.minimum(lax.div(begin, c.block_kv), self.kv_blocks - 1)
        end = jnp.maximum(self._blocks(end), begin + 1)
        full_begin = jnp.clip(self._blocks(full_begin), begin, end)
        full_end = jnp.clip(lax.div(jnp.maximum(full_end, 0), c.block_kv), full_begin, end)
        return Tile(batch, head, q_start, row, begin, end, full_begin, full_end)

    def _blocks(self, keys: Any) -> Any:
        """How many blocks hold the first `keys` keys."""
        return lax.div(jnp.maximum(keys, 0) + self.config.block_kv - 1, self.config.block_kv)

    def _costs(self) -> np.ndarray:
        """About how many blocks each tile visits, by its index; its own overhead counts as one more."""
        s, mask, block = self.shape, self.mask, self.config.block_kv
        if mask.bounds is None:
            return np.ones(self.count)
        section, rest = np.divmod(np.arange(self.count), self.section * self.q_tiles)
        heads = np.minimum(self.section, s.B * s.N - section * self.section)
        q_start = (self.q_tiles - 1 - rest // heads) * self.config.tile_q
        begin = np.maximum(q_start + mask.bounds.first, 0) if mask.left else np.zeros_like(q_start)
        end = np.full_like(q_start, mask.bounds.kv_length)
        if mask.right:
            end = np.minimum(q_start + self.config.tile_q + mask.bounds.last, end)
        return np.maximum(-(-end // block) - begin // block, 1) + 1.0


def deal(costs: np.ndarray, programs: int) -> np.ndarray:
    """Which tiles each program works on: each tile, in order, goes to the program that is done first.

    Args:
      costs: of each tile.
      programs: how many there are, at most one for each tile.

    Returns:
      int32 [2 + most tiles of a program, programs]: how many tiles a program has, their indices, and padding.
    """
    done = np.zeros(programs)
    tiles: list[list[int]] = [[] for _ in range(programs)]
    for index, cost in enumerate(costs.tolist()):
        program = int(np.argmin(done))
        tiles[program].append(index)
        done[program] += cost
    order = np.zeros((2 + max(map(len, tiles)), programs), np.int32)
    for program, mine in enumerate(tiles):
        order[0, program] = len(mine)
        order[1 : 1 + len(mine), program] = mine
    return order
