"""What both kernels of the Hopper attention backward do with a tile of scores, and the operands that they read."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_backward_config import BackwardShape
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, Bounds
from pallas_kernels.gpu.hopper.attention_tile import COLUMN, LOG2E, ROW, index_of, tanh

LAST_INDEX = 2**31 - 1
WARPGROUPS = 2  # that compute, in a thread block
MEETING = 8  # the named barrier of `meet`; Mosaic itself takes 0 to 3


class Operands(NamedTuple):
    """Arrays, or references to them in a kernel; None where a call has none.

    Args:
      query, key, value, output_gradient: [B, T, N, H], [B, S, K, H], [B, S, K, Hv], [B, T, N, Hv].
      lse, delta: float32 [B, N, T padded to blocks of 128]: log2 of the normaliser, +inf where a query sees no key,
        and the sum of output times its gradient, less the gradient of the natural log-normaliser.
      bounds: int32 [B, 4], unless the mask has them.
      q_ids, kv_ids: int32 [B, T padded], [B, S padded]: segment ids.
      q_ranges: int32 [B, blocks of queries, 4]; kv_ranges: int32 [B, blocks of keys, 4]. For each block [begin, end)
        outside of which it shares no segment, and [begin, end) within which all of it is in one and the same.
    """

    query: Any
    key: Any
    value: Any
    output_gradient: Any
    lse: Any
    delta: Any
    bounds: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    q_ranges: Any = None
    kv_ranges: Any = None


class Span(NamedTuple):
    """The rows of a tile, and for each the first and the last column that it sees; `high` is None for no limit."""

    low: Any
    high: Any


@dataclasses.dataclass(frozen=True)
class Scores:
    """Static facts of the scores of a call."""

    shape: BackwardShape
    mask: AttentionMask
    scale: float
    soft_cap: float | None

    def unmasked(self, block_kv: int) -> bool:
        """Whether no block needs a mask: queries past T or `q_length` are hidden by their lse."""
        mask, bounds = self.mask, self.mask.bounds
        whole = bounds is not None and bounds.kv_length >= self.shape.S and self.shape.S % block_kv == 0
        return whole and not (mask.left or mask.right or mask.segments)

    def weights(self, s: Any, lse: Any, axis: int) -> tuple[Any, Any]:
        """P = e^(scores - lse) (eq. 33.6) of products s, with lse along `axis`; and the soft cap's slope or None."""
        lse = lax.broadcast_in_dim(lse, s.shape, [axis])
        if self.soft_cap is None:
            return jnp.exp2(s * (self.scale * LOG2E) - lse), None
        capped = tanh(s * (self.scale / self.soft_cap))
        return jnp.exp2(capped * (self.soft_cap * LOG2E) - lse), 1 - capped * capped

    def queries_of_keys(self, row: Bounds, k_start: Any, size: int) -> Span:
        """Which queries see each of `size` keys; keys past `kv_length` are seen by none."""
        key = index_of(k_start, size, ROW)
        low = key - row.last if self.mask.right else jnp.zeros_like(key)
        return Span(jnp.where(key < row.kv_length, low, LAST_INDEX), key - row.first if self.mask.left else None)

    def keys_of_queries(self, row: Bounds, q_start: Any, size: int) -> Span:
        """Which keys each of `size` queries sees."""
        query = index_of(q_start, size, ROW)
        last = jnp.full_like(query, row.kv_length - 1)
        high = jnp.minimum(query + row.last, last) if self.mask.right else last
        return Span(query + row.first if self.mask.left else jnp.zeros_like(query), high)


@plgpu.inline_mgpu()
def meet(_: Any) -> None:
    """Wait for the other warpgroup that computes; what either stored in shared memory, both may then multiply by.

    One instruction of the chip for all of their threads. To commit, arrive at a barrier in memory and wait for it takes
    each warpgroup two barriers and a loop, and 3% more of the kernel's time.
    """
    mgpu.inline_ptx(f"fence.proxy.async.shared::cta; bar.sync {MEETING}, {WARPGROUPS * 128};", has_side_effects=True)


def hide(p: Any, span: Span, column_start: Any, row_ids: Any, column_ids: Any) -> Any:
    """P with 0 where a row does not see a column, whatever is there; ids are None without segments."""
    column = lax.broadcast_in_dim(index_of(column_start, p.shape[1], COLUMN), p.shape, [1])
    visible = column >= lax.broadcast_in_dim(span.low, p.shape, [0])
    if span.high is not None:
        visible &= column <= lax.broadcast_in_dim(span.high, p.shape, [0])
    if row_ids is not None:
        visible &= lax.broadcast_in_dim(row_ids, p.shape, [0]) == lax.broadcast_in_dim(column_ids, p.shape, [1])
    return jnp.where(visible, p, 0.0)


def load_ids(ids: Any, batch: Any, start: Any, size: int, layout: Any) -> Any:
    """Segment ids of a tile's rows or columns, from device memory; None without segments."""
    return None if ids is None else plgpu.load(ids.at[batch, pl.ds(start, size)], layout=layout, optimized=False)


class KeyTile(NamedTuple):
    """A thread block's keys, and the blocks [begin, end) of queries, of each head, that meet them.

    Those outside of [full_begin, full_end) have to be masked.
    """

    batch: Any
    kv_head: Any
    k_start: Any
    row: Bounds
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


def met(seen: Any, full: Any, ranges: Any, size: int, blocks: int, *, open_ended: bool = False) -> tuple[Any, ...]:
    """The blocks that a tile meets: begin, full_begin, full_end, end, as in `KeyTile`.

    Args:
      seen: [begin, end) outside of which the tile sees, or is seen by, nothing.
      full: [begin, end) within which nothing is hidden.
      ranges: four numbers that narrow both, by `ranges_of`; None without segments.
      size: of a block.
      blocks: how many there are.
      open_ended: whether whatever follows `full` lies in it, too.
    """
    if ranges is not None:
        seen, full = intersection(seen, ranges[:2]), intersection(full, ranges[2:])
    begin, end = visited(seen, size, blocks)
    full_begin, full_end = within(full, begin, end, size, open_ended=open_ended)
    return begin, full_begin, full_end, end


def ranges_of(ref: Any, batch: Any, block: Any) -> Any:
    """The ranges of a block, from int32 [B, blocks, 4] by `segment_ranges`; None without segments."""
    return None if ref is None else [ref[batch, block, i] for i in range(4)]


def intersection(one: Any, other: Any) -> tuple[Any, Any]:
    """Of two ranges [begin, end)."""
    return jnp.maximum(one[0], other[0]), jnp.minimum(one[1], other[1])


def visited(indices: Any, size: int, blocks: int) -> tuple[Any, Any]:
    """Blocks [begin, end) that cover a range of indices; at least one, all of it hidden, where it is empty."""
    begin = jnp.clip(lax.div(indices[0], size), 0, blocks - 1)
    return begin, jnp.maximum(lax.div(indices[1] + (size - 1), size), begin + 1)


def within(indices: Any, begin: Any, end: Any, size: int, *, open_ended: bool) -> tuple[Any, Any]:
    """Those of the blocks [begin, end) that lie in a range of indices; with `open_ended`, whatever follows does, too.

    [end, end) where there are none.
    """
    first, last = lax.div(indices[0] + (size - 1), size), lax.div(indices[1], size)
    last = jnp.where(indices[0] < indices[1], end, begin) if open_ended else jnp.minimum(last, end)
    some = jnp.maximum(first, begin) < last
    return jnp.where(some, jnp.maximum(first, begin), end), jnp.where(some, last, end)


def visit(block: Any, step: Any, i: Any, *, unmasked: bool) -> Any:
    """Call step(j, masked, i) for every block j in [block.begin, block.end), where i counts on from `i`; return i.

    Full blocks come first: the other way round, the compiler spills registers in the loop that matters.
    """

    def full(j: Any, i: Any) -> Any:
        step(j, False, i)
        return i + 1

    if unmasked:
        return lax.fori_loop(block.begin, block.end, full, i)
    before = block.full_begin - block.begin

    def masked(t: Any, i: Any) -> Any:
        step(block.begin + t + jnp.where(t < before, 0, block.full_end - block.full_begin), True, i)
        return i + 1

    i = lax.fori_loop(block.full_begin, block.full_end, full, i)
    return lax.fori_loop(0, before + block.end - block.full_end, masked, i)
