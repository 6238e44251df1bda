"""Which keys a query sees, as arithmetic on tiles: what the Hopper attention kernels skip, and what they have to mask.

Query i of a batch row sees key j iff

    first + i <= j <= last + i,    i < q_length,    j < kv_length,    and both have one segment id, where there are any.

Causal masks and windows by logical positions q_start + i and kv_start + j are of this form, with
first = q_start - kv_start - left and last = q_start - kv_start + right: a traced start costs no more than a known one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

type Scalar = Any  # a Python int, or a traced int32 scalar


class Bounds(NamedTuple):
    """The four numbers of one batch row."""

    first: Scalar
    last: Scalar
    q_length: Scalar
    kv_length: Scalar


class SegmentIds(NamedTuple):
    """Segment ids of queries, int32 [B, T], and of keys, int32 [B, S]."""

    q: Array
    kv: Array


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Static structure of a mask.

    Args:
      left: whether `first` limits; without it a query sees every key on its left.
      right: whether `last` limits.
      segments: whether segment ids are compared.
      bounds: the bounds of every batch row, where they are known before tracing; None where they are an operand,
        int32 [B, 4] in the order of `Bounds`.
    """

    left: bool = False
    right: bool = False
    segments: bool = False
    bounds: Bounds | None = None

    def row(self, bounds: Any, batch: Scalar) -> Bounds:
        """The bounds of one batch row; `bounds` is the operand, or None where they are static."""
        return self.bounds or Bounds(*(bounds[batch, column] for column in range(4)))

    def shows_every_query_a_key(self) -> bool:
        """Whether static facts alone say so, of all queries before `q_length`."""
        bounds = self.bounds
        if bounds is None or self.segments or bounds.kv_length < 1:
            return False
        first = not self.right or bounds.last >= 0  # The first query, whose last key is the leftmost,
        last = not self.left or bounds.first + bounds.q_length <= bounds.kv_length  # and the last, whose first is not.
        return first and last and not (self.left and self.right and bounds.first > bounds.last)

    def visible_keys(self, row: Bounds, q_start: Scalar, block_q: int) -> tuple[Scalar, Scalar]:
        """[begin, end) outside of which no query of a tile sees a key; empty where begin >= end."""
        last_query = jnp.minimum(q_start + block_q, row.q_length) - 1
        begin = jnp.maximum(q_start + row.first, 0) if self.left else jnp.int32(0)
        end = jnp.minimum(last_query + row.last + 1, row.kv_length) if self.right else jnp.int32(row.kv_length)
        return begin, jnp.where(q_start < row.q_length, end, 0)

    def full_keys(self, row: Bounds, q_start: Scalar, block_q: int) -> tuple[Scalar, Scalar]:
        """[begin, end) within which every query of a tile sees every key, but for segments and `q_length`."""
        begin = jnp.maximum(q_start + block_q - 1 + row.first, 0) if self.left else jnp.int32(0)
        end = jnp.minimum(q_start + row.last + 1, row.kv_length) if self.right else jnp.int32(row.kv_length)
        return begin, end

    def visible_queries(self, row: Bounds, k_start: Scalar, block_kv: int) -> tuple[Scalar, Scalar]:
        """[begin, end) outside of which no query sees a key of the tile; empty where begin >= end."""
        last_key = jnp.minimum(k_start + block_kv, row.kv_length) - 1
        begin = jnp.maximum(k_start - row.last, 0) if self.right else jnp.int32(0)
        end = jnp.minimum(last_key - row.first + 1, row.q_length) if self.left else jnp.int32(row.q_length)
        return begin, jnp.where(k_start < row.kv_length, end, 0)

    def full_queries(self, row: Bounds, k_start: Scalar, block_kv: int) -> tuple[Scalar, Scalar]:
        """[begin, end) within which every query sees every key of the tile, but for segments; empty past kv_length."""
        begin = jnp.maximum(k_start + block_kv - 1 - row.last, 0) if self.right else jnp.int32(0)
        end = jnp.minimum(k_start - row.first + 1, row.q_length) if self.left else jnp.int32(row.q_length)
        return begin, jnp.where(k_start + block_kv <= row.kv_length, end, 0)

    def keys_of(self, row: Bounds, q_index: Any) -> tuple[Any, Any]:
        """[begin, end) of the keys that each query sees, but for segments and q_length; None where there is no limit.

        Comparing keys with these takes less than `tile` for each pair.
        """
        begin = q_index + row.first if self.left else None
        return begin, jnp.minimum(q_index + (row.last + 1), row.kv_length) if self.right else None

    def tile(self, row: Bounds, q_index: Any, k_index: Any) -> Any:
        """bool, for int32 arrays of query and key indices of one shape: which pairs are visible, but for segments."""
        visible = (k_index < row.kv_length) & (q_index < row.q_length)
        if self.left:
            visible &= k_index - q_index >= row.first
        if self.right:
            visible &= k_index - q_index <= row.last
        return visible


def segment_ranges(own: Array, other: Array, size: int) -> Array:
    """For each block of `size` of our ids, where the other side has ids within its range, and where only its one id.

    Args:
      own: int32 [B, X].
      other: int32 [B, Y].
      size: ids in a block.

    Returns:
      int32 [B, blocks, 4]: [begin, end) outside of which no id is one of the block's, and [begin, end) within which all
      ids are the one that the whole block has, empty where there is no such run. Ids in ascending order, as in packed
      sequences, give exact ranges.
    """
    blocks = jnp.pad(own, ((0, 0), (0, -own.shape[1] % size)), mode="edge").reshape(own.shape[0], -1, size)
    low, high = blocks.min(axis=2)[:, :, None], blocks.max(axis=2)[:, :, None]
    ids = other[:, None, :]
    within = _extent((ids >= low) & (ids <= high))
    same = (ids == low) & (low == high)
    begin, end = _extent(same)
    run = same.sum(axis=2, dtype=jnp.int32) == end - begin
    return jnp.stack([*within, jnp.where(run, begin, 0), jnp.where(run, end, 0)], axis=2)


def _extent(inside: Array) -> tuple[Array, Array]:
    """[begin, end) from the first True to the last along the last axis; [0, 0) where there is none."""
    size = inside.shape[2]
    index = jnp.arange(size, dtype=jnp.int32)[None, None]
    some = inside.any(axis=2)
    begin = jnp.where(inside, index, size).min(axis=2)
    end = jnp.where(inside, index, -1).max(axis=2) + 1
    return jnp.where(some, begin, 0), jnp.where(some, end, 0)
