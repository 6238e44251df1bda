"""What the warpgroups of the Hopper attention forward do.

One copies: Q of each tile, then its K and V into a ring of stages. The others compute, 64 queries each. A computing
warpgroup issues S = Q K^T of a block together with u += P V of the block before it, so that the softmax of one block
runs while the matrix units multiply, and the warpgroups take turns at the matrix units. Exponentials are base 2, which
folds the scale in; what leaves the kernel is in natural logarithms.
"""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_forward_tiles import Tile, Tiles
from pallas_kernels.gpu.hopper.attention_tile import COLUMN, LOG2E, MATRIX, ROW, TILE, tanh, tiled

LN2 = math.log(2)
FRAGMENT = 8  # columns that four threads share out among them, so that each has 2 of every 8


class Operands(NamedTuple):
    """Arrays in device memory; those that a call does not have are None.

    Args:
      q, k, v: [B, T, N, H], [B, S, K, H], [B, S, K, Hv].
      bounds: int32 [B, 4].
      sinks: float32 [B, N].
      q_ids, kv_ids: int32 [B, T] and [B, S] in whole tiles and blocks.
      ranges: int32 [B, tiles, 4], as by `segment_ranges`.
      order: int32, as by `deal`.
    """

    q: Any
    k: Any
    v: Any
    bounds: Any = None
    sinks: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    ranges: Any = None
    order: Any = None


class Memory(NamedTuple):
    """Shared memory, and its barriers: full when a copy has arrived, free when its reader is done."""

    q: Any
    k: Any
    v: Any
    output: Any  # None where the output leaves through the memory of Q
    rows: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    turn: Any  # whose turn it is at the matrix units


class Folded(NamedTuple):
    """Statistics of 64 queries, m in base 2, and the weights of the last block, whose values are not in u yet.

    Where l is summed lazily, it is [64, FRAGMENT], and its row sums are due.
    """

    m: Any
    l: Any
    u: Any
    weights: Any


class Softmax(NamedTuple):
    """scale and soft cap of the scores, and whether l is summed lazily."""

    scale: float
    soft_cap: float | None
    lazy_sum: bool = False

    def step(self, raw: Any, visible: Any, m: Any, l: Any) -> tuple[Any, Any, Any, Any]:
        """New m and l, the factor for what was summed before, and the weights (eq. 33.3 and 33.4, in base 2).

        Args:
          raw: products q.k of one block.
          visible: bool like them, or None where all are.
          m, l: so far.
        """
        scale = self.scale * LOG2E
        if self.soft_cap is not None:
            raw, scale = tanh(raw * (self.scale / self.soft_cap)), self.soft_cap * LOG2E
        if scale < 0:  # the maximum of the products is not that of the scores
            raw, scale = raw * scale, 1.0
        if visible is not None:
            raw = jnp.where(visible, raw, -jnp.inf)
        highest = jnp.maximum(m, raw.max(axis=1) * scale)
        shift = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights = jnp.exp2(raw * scale - lax.broadcast_in_dim(shift, raw.shape, [0]))
        alpha = jnp.exp2(m - shift)
        return highest, l * lax.broadcast_in_dim(alpha, l.shape, [0]) + self.part(weights), alpha, weights

    def part(self, weights: Any) -> Any:
        """What one block adds to l: row sums, or lazily sums over the columns that a thread has."""
        if not self.lazy_sum:
            return weights.sum(axis=1)
        fragments = (weights[:, start : start + FRAGMENT] for start in range(0, weights.shape[1], FRAGMENT))
        return functools.reduce(operator.add, fragments)

    def total(self, l: Any) -> Any:
        """Row sums of l."""
        return l.sum(axis=1) if self.lazy_sum else l


class Warpgroups:
    """The program of a thread block."""

    def __init__(self, tiles: Tiles, softmax: Softmax, statistics: bool) -> None:
        self.tiles, self.softmax, self.statistics = tiles, softmax, statistics
        self.shape, self.mask, self.config = tiles.shape, tiles.mask, tiles.config

    def scratch(self, dtype: Any) -> list[Any]:
        """Shared memory and barriers of a thread block, in the order of `Memory`."""
        c, s = self.config, self.shape
        output = tiled((c.warpgroups, TILE, s.Hv), jnp.float32 if self.statistics else dtype)
        rings = [plgpu.Barrier(num_barriers=c.stages), plgpu.Barrier(num_barriers=c.stages, num_arrivals=c.warpgroups)]
        buffers = c.query_buffers * c.warpgroups
        queries, turn = plgpu.Barrier(num_barriers=buffers), plgpu.Barrier(num_barriers=c.warpgroups)
        return [
            tiled((buffers, TILE, s.H), dtype),
            tiled((c.stages, c.block_kv, s.H), dtype),
            tiled((c.stages, c.block_kv, s.Hv), dtype),
            None if c.shares_output(s, self.statistics) else output,
            plgpu.SMEM((1 + self.statistics, c.warpgroups, TILE), jnp.float32),
            *(queries, queries),
            *(*rings, *rings),
            turn,
        ]

    def body(self, names: tuple[str, ...], *refs: Any) -> None:
        """The kernel: operands of these names, outputs, then scratch."""
        inputs = Operands(**dict(zip(names, refs, strict=False)))
        outputs, memory = refs[len(names) : -len(Memory._fields)], Memory(*refs[-len(Memory._fields) :])
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        computing, copying = self.config.registers

        @pl.when(warpgroup < self.config.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(computing, action="increase")
            self._compute(inputs, outputs, memory, program, warpgroup)

        @pl.when(warpgroup == self.config.warpgroups)
        def _copy() -> None:
            plgpu.set_max_registers(copying, action="decrease")
            self._copy(inputs, memory, program)

    def _copy(self, inputs: Operands, memory: Memory, program: Any) -> None:
        c = self.config
        rings = ((inputs.k, memory.k, memory.k_full, memory.k_free), (inputs.v, memory.v, memory.v_full, memory.v_free))

        def tile_step(i: Any, index: Any, count: Any) -> Any:
            tile = self.tiles.at(index, inputs.bounds, inputs.ranges)
            kv_head = lax.div(tile.head, self.shape.G)
            for w in range(c.warpgroups):
                buffer = self._buffer(i, w)
                _wait_when(i >= c.query_buffers, memory.q_free.at[buffer])
                rows = pl.ds(tile.q_start + w * TILE, TILE)
                source = inputs.q.at[tile.batch, rows, tile.head]
                plgpu.copy_gmem_to_smem(source, memory.q.at[buffer], memory.q_full.at[buffer])

            def block_step(step: Any, count: Any) -> Any:
                slot = lax.rem(count, c.stages)
                keys = pl.ds((tile.end - 1 - step) * c.block_kv, c.block_kv)
                for source, ring, full, free in rings:
                    _wait_when(count >= c.stages, free.at[slot])
                    plgpu.copy_gmem_to_smem(source.at[tile.batch, keys, kv_head], ring.at[slot], full.at[slot])
                return count + 1

            return lax.fori_loop(0, tile.end - tile.begin, block_step, count)

        self.tiles.each(inputs.order, program, tile_step)

    def _compute(self, inputs: Operands, outputs: Any, memory: Memory, program: Any, w: Any) -> None:
        shared = memory.output is None
        pl.when(w == 0)(lambda: plgpu.barrier_arrive(memory.turn.at[0]))

        def tile_step(i: Any, index: Any, count: Any) -> Any:
            tile, buffer = self.tiles.at(index, inputs.bounds, inputs.ranges), self._buffer(i, w)
            plgpu.barrier_wait(memory.q_full.at[buffer])
            folded, count = self._fold(inputs, memory, memory.q.at[buffer], tile, w, count)
            if not shared:
                plgpu.barrier_arrive(memory.q_free.at[buffer])
            self._store(inputs, outputs, memory, tile, w, folded)
            if shared:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(memory.q_free.at[buffer])
            return count

        self.tiles.each(inputs.order, program, tile_step)
        plgpu.wait_smem_to_gmem(0)
        # The turn that is still out is that of warpgroup 0: barriers end as they began.
        _wait_when(w == 0, memory.turn.at[0])

    def _fold(self, inputs: Operands, memory: Memory, q: Any, tile: Tile, w: Any, count: Any) -> tuple[Folded, Any]:
        """(m, l, u) of a warpgroup's queries over all blocks of the tile; `count` blocks were used before them."""
        c, s = self.config, self.shape
        ahead_of_scores, ahead_of_values = c.early_turn >= 1, c.early_turn == 2
        q_ids = None
        if self.mask.segments:
            rows = pl.ds(tile.q_start + w * TILE, TILE)
            q_ids = plgpu.load(inputs.q_ids.at[tile.batch, rows], layout=ROW, optimized=False)
        visible = functools.partial(self._visible, inputs, tile, tile.q_start + w * TILE, q_ids)
        scores_type = plgpu.ACC((TILE, c.block_kv), jnp.float32)
        values_type = plgpu.ACC((TILE, s.Hv), jnp.float32)
        m, u = _full((TILE,), -jnp.inf, ROW), _full((TILE, s.Hv), 0, MATRIX)
        l = _full((TILE, FRAGMENT), 0, MATRIX) if c.lazy_sum else _full((TILE,), 0, ROW)

        def first(scores: Any) -> Any:
            self._issue_scores(memory, scores, q, w, count)
            self._pass_turn(memory, w)
            return scores[...]

        if ahead_of_scores:
            self._await_keys(memory, w, count)
        raw = pl.run_scoped(first, scores_type)
        plgpu.barrier_arrive(memory.k_free.at[lax.rem(count, c.stages)])
        m, l, _, weights = self.softmax.step(raw, None if self.tiles.unmasked else visible(tile.end - 1), m, l)
        if ahead_of_values:
            plgpu.barrier_wait(memory.turn.at[w])

        def step(block: Any, carry: tuple[Folded, Any], masked: bool) -> tuple[Folded, Any]:
            so_far, count = carry
            slot, previous = lax.rem(count, c.stages), lax.rem(count - 1, c.stages)

            def products(scores: Any, values: Any) -> Any:
                values[...] = so_far.u
                self._issue_scores(memory, scores, q, w, count)
                plgpu.barrier_wait(memory.v_full.at[previous])
                plgpu.wgmma(values, so_far.weights, memory.v.at[previous])
                self._pass_turn(memory, w)
                raw = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                plgpu.barrier_arrive(memory.k_free.at[slot])
                folded = self.softmax.step(raw, visible(block) if masked else None, so_far.m, so_far.l)
                if ahead_of_values:  # the compiler moves no exponential past a barrier
                    plgpu.barrier_wait(memory.turn.at[w])
                return *folded, values[...]

            if ahead_of_scores:
                self._await_keys(memory, w, count, has_turn=ahead_of_values)
            m, l, alpha, weights, u = pl.run_scoped(products, scores_type, values_type)
            plgpu.barrier_arrive(memory.v_free.at[previous])
            u = u * lax.broadcast_in_dim(alpha, u.shape, [0])
            return Folded(m, l, u, weights.astype(memory.q.dtype)), count + 1

        start = (Folded(m, l, u, weights.astype(memory.q.dtype)), count + 1)
        folded, count = self._blocks(tile, step, start)
        last = lax.rem(count - 1, c.stages)

        def final(values: Any) -> Any:
            values[...] = folded.u
            plgpu.barrier_wait(memory.v_full.at[last])
            if not ahead_of_values:
                plgpu.barrier_wait(memory.turn.at[w])
            plgpu.wgmma(values, folded.weights, memory.v.at[last])
            self._pass_turn(memory, w)
            return values[...]

        u = pl.run_scoped(final, values_type)
        plgpu.barrier_arrive(memory.v_free.at[last])
        return folded._replace(l=self.softmax.total(folded.l), u=u), count

    def _blocks(self, tile: Tile, step: Any, carry: Any) -> Any:
        """All blocks but the last one, which came first, from right to left: masked ones, full ones, masked ones."""

        def run(begin: Any, end: Any, carry: Any, masked: bool) -> Any:
            return lax.fori_loop(0, end - begin, lambda i, carry: step(end - 1 - i, carry, masked), carry)

        last = tile.end - 1
        if self.tiles.unmasked:
            return run(tile.begin, last, carry, False)
        full_begin, full_end = jnp.minimum(tile.full_begin, last), jnp.minimum(tile.full_end, last)
        carry = run(full_end, last, carry, True)
        carry = run(full_begin, full_end, carry, False)
        if self.mask.left or self.mask.segments:
            carry = run(tile.begin, full_begin, carry, True)
        return carry

    def _visible(self, inputs: Operands, tile: Tile, q_start: Any, q_ids: Any, block: Any) -> Any:
        """Which pairs of a warpgroup's queries and a block's keys attend; rows past q_length are emptied later."""
        shape = (TILE, self.config.block_kv)
        k_start = block * self.config.block_kv
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX) + k_start
        visible = column < tile.row.kv_length
        if self.mask.left or self.mask.right:
            q_index = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW) + q_start
            begin, end = self.mask.keys_of(tile.row, q_index)
            if end is not None:  # at most kv_length
                visible = column < lax.broadcast_in_dim(end, shape, [0])
            if begin is not None:
                visible &= column >= lax.broadcast_in_dim(begin, shape, [0])
        if self.mask.segments:
            keys = pl.ds(k_start, self.config.block_kv)
            kv_ids = plgpu.load(inputs.kv_ids.at[tile.batch, keys], layout=COLUMN, optimized=False)
            visible &= lax.broadcast_in_dim(q_ids, shape, [0]) == lax.broadcast_in_dim(kv_ids, shape, [1])
        return visible

    def _store(self, inputs: Operands, outputs: Any, memory: Memory, tile: Tile, w: Any, folded: Folded) -> None:
        """Finalise a warpgroup's rows and write them; what lies past T is cut off by the copy."""
        start = tile.q_start + w * TILE
        m, l, u = folded.m, folded.l, folded.u
        if self.mask.bounds is None or self.mask.bounds.q_length < self.shape.T:
            real = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW) + start < tile.row.q_length
            m, l = jnp.where(real, m, -jnp.inf), jnp.where(real, l, 0.0)
            u = jnp.where(lax.broadcast_in_dim(real, u.shape, [0]), u, 0.0)
        if inputs.sinks is not None:
            sink = inputs.sinks[tile.batch, tile.head] * LOG2E
            total = jnp.maximum(m, sink)
            alpha = jnp.exp2(m - total)
            m, l, u = total, l * alpha + jnp.exp2(sink - total), u * lax.broadcast_in_dim(alpha, u.shape, [0])
        rows = [m * LN2, l]
        if not self.statistics:
            rows = [m * LN2 + jnp.log2(l) * LN2]
            u = u * lax.broadcast_in_dim(1 / jnp.where(l == 0, 1.0, l), u.shape, [0])
        tile_memory = (memory.q if memory.output is None else memory.output).at[w]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile_memory[...] = u.astype(tile_memory.dtype)
        for i, row in enumerate(rows):
            memory.rows.at[i, w][...] = row
        plgpu.commit_smem()
        output, *row_outputs = outputs
        span = pl.ds(start, TILE)
        for i, ref in enumerate(row_outputs):
            plgpu.copy_smem_to_gmem(memory.rows.at[i, w], ref.at[tile.batch, tile.head, span], commit_group=False)
        plgpu.copy_smem_to_gmem(tile_memory, output.at[tile.batch, span, tile.head])

    def _buffer(self, i: Any, w: Any) -> Any:
        """Where a warpgroup's queries of the i-th tile are."""
        return lax.rem(i, self.config.query_buffers) * self.config.warpgroups + w

    def _await_keys(self, memory: Memory, w: Any, count: Any, has_turn: bool = False) -> None:
        """Wait for a block of keys, and for the turn of a warpgroup that does not have it yet."""
        plgpu.barrier_wait(memory.k_full.at[lax.rem(count, self.config.stages)])
        if not has_turn:
            plgpu.barrier_wait(memory.turn.at[w])

    def _issue_scores(self, memory: Memory, scores: Any, q: Any, w: Any, count: Any) -> None:
        if not self.config.early_turn:
            self._await_keys(memory, w, count)
        slot = lax.rem(count, self.config.stages)
        plgpu.wgmma(scores, q, memory.k.at[slot].transpose((1, 0)))

    def _pass_turn(self, memory: Memory, w: Any) -> None:
        plgpu.barrier_arrive(memory.turn.at[lax.rem(w + 1, self.config.warpgroups)])


def _wait_when(condition: Any, barrier: Any) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def _full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
