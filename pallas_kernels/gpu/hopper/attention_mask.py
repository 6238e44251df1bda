"""Which keys a query sees, as arithmetic on tiles: what the Hopper attention kernels skip, and what they have to mask.

Query i of a batch row sees key j iff

    first + i <= j <= last + i,    i < q_length,    j < kv_length,    and both have one segment id, where there are any.

Causal masks and windows by logical positions q_start + i and kv_start + j are of this form, with
first = q_start - kv_start - left and last = q_start - kv_start + right: a traced start costs no more than a known one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

type Scalar = Any  # a Python int, or a traced int32 scalar


class Bounds(NamedTuple):
    """The four numbers of one batch row."""

    first: Scalar
    last: Scalar
    q_length: Scalar
    kv_length: Scalar


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
        """[begin, end) within which every query sees every key of the tile, but for segments; empty past `kv_length`."""
        begin = jnp.maximum(k_start + block_kv - 1 - row.last, 0) if self.right else jnp.int32(0)
        end = jnp.minimum(k_start - row.first + 1, row.q_length) if self.left else jnp.int32(row.q_length)
        return begin, jnp.where(k_start + block_kv <= row.kv_length, end, 0)

    def tile(self, row: Bounds, q_index: Any, k_index: Any) -> Any:
        """bool, for int32 arrays of query and key indices of one shape: which pairs are visible, but for segments."""
        visible = (k_index < row.kv_length) & (q_index < row.q_length)
        if self.left:
            visible &= k_index - q_index >= row.first
        if self.right:
            visible &= k_index - q_index <= row.last
        return visible
