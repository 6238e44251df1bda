"""One tile of scores inside a kernel: its scores in units of log 2, which pairs count in it, and its dropout mask.

A kernel lays a tile out as [queries, keys] or as [keys, queries]; `Tile.key_axis` says which. Vectors along the
sublanes (axis 0) come as columns [n, 1], along the lanes (axis 1) as rows [1, n].
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import dropout
from pallas_kernels.tpu.attention_config import LANES, LOG2_E, AttentionCall

# Contractions of a product: rows with rows, rows with columns, columns with columns.
BY_ROWS, PLAIN, BY_COLUMNS = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))

type Refs = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Where a tile lies.

    Args:
      q_block, k_block: array indices at which its block begins; traced.
      q, k: where it begins in the block.
      q_size, k_size: its sizes.
      key_axis: 1 for [queries, keys], 0 for [keys, queries].
      keys: S without padding.
    """

    q_block: Array
    k_block: Array
    q: int
    k: int
    q_size: int
    k_size: int
    key_axis: int
    keys: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.q_size, self.k_size) if self.key_axis else (self.k_size, self.q_size)

    @property
    def q_slice(self) -> Any:
        return pl.ds(self.q, self.q_size)

    @property
    def k_slice(self) -> Any:
        return pl.ds(self.k, self.k_size)

    def may_hold_a_pair(self, call: AttentionCall) -> Array | bool:
        """Whether `limits` let any query of the tile see any of its keys."""
        left, right = call.limits
        q, k = self.q_block + self.q, self.k_block + self.k
        holds = k < self.keys
        if right is not None:
            holds &= k <= q + (self.q_size - 1 + right)
        if left is not None:
            holds &= k + (self.k_size - 1) >= q - left
        return holds


def product(a: Array, b: Array, dimensions: Any) -> Array:
    """A matrix product accumulated in float32; float32 operands use the highest precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def bias_of(refs: Refs, tile: Tile) -> Array | None:
    """The bias of a tile in float32, None where there is none."""
    return _pairs(refs["bias"], tile).astype(jnp.float32) if "bias" in refs else None


def log2_scores(call: AttentionCall, products: Array, bias: Array | None = None) -> tuple[Array, Array | None]:
    """Scores times log2(e), so that exp is exp2; with a soft cap also c tanh(score / c) / c, for its slope."""
    if bias is None and call.soft_cap is None:
        return products * (call.scale * LOG2_E), None
    scores = products * call.scale
    if bias is not None:
        scores = scores + bias
    if call.soft_cap is None:
        return scores * LOG2_E, None
    squashed = jnp.tanh(scores / call.soft_cap)
    return squashed * (call.soft_cap * LOG2_E), squashed


def visible_pairs(call: AttentionCall, refs: Refs, tile: Tile) -> Array:
    """Which pairs of a tile count: bool in the tile's shape."""
    q, k = tile.q_block + tile.q, tile.k_block + tile.k
    along_keys = lax.broadcasted_iota(jnp.int32, tile.shape, tile.key_axis)
    visible = along_keys < tile.keys - k
    left, right = call.limits
    if left is not None or right is not None:
        ahead = along_keys - lax.broadcasted_iota(
            jnp.int32, tile.shape, 1 - tile.key_axis
        )  # key - query, but for k - q
    if right is not None:
        visible &= ahead <= q - k + right
    if left is not None:
        visible &= ahead >= q - k - left
    if "queries" in refs:
        first, last, q_segment = (_vector(refs["queries"], i, tile.q_slice, 1 - tile.key_axis) for i in range(3))
        position, k_segment = (_vector(refs["keys"], i, tile.k_slice, tile.key_axis) for i in range(2))
        visible &= (position >= first) & (position <= last) & (k_segment == q_segment)
    if "mask" in refs:
        visible &= _pairs(refs["mask"], tile).astype(jnp.int32) != 0
    if "bias" in refs:
        visible &= bias_of(refs, tile) != -jnp.inf
    return visible


def kept_pairs(call: AttentionCall, refs: Refs, tile: Tile, batch: Array, head: Array) -> Array:
    """Which probabilities dropout keeps, bool, broadcastable to the tile's shape."""
    words, offsets = refs["dropout_words"], refs["dropout_offsets"]
    rows, heads = (lax.rem(i, jnp.int32(words.shape[axis])) for axis, i in enumerate((batch, head)))
    of_head = words[rows, heads, 0].astype(jnp.uint32), words[rows, heads, 1].astype(jnp.uint32)
    indices = []
    for i, (begin, axis) in enumerate(
        ((tile.q_block + tile.q, 1 - tile.key_axis), (tile.k_block + tile.k, tile.key_axis))
    ):
        index = lax.broadcasted_iota(jnp.int32, tile.shape, axis) + (begin + offsets[i])
        indices.append(jnp.zeros_like(index) if call.shared_dropout[i] else index)
    return dropout.keep_mask(of_head, indices[0], indices[1], call.dropout_rate)


def cleaned(x: Array, visible: Array, axis: int) -> Array:
    """Rows of `x` without any visible pair replaced by 0: a weight of 0 would not hide their NaN.

    Args:
      x: [n, size], queries or keys of a tile.
      visible: the tile's visible pairs, with those queries or keys along `axis`.
    """
    used = jnp.max(visible.astype(jnp.float32), axis=1 - axis, keepdims=True)
    n = visible.shape[axis]
    used = jnp.broadcast_to(used, (n, LANES)) if axis == 0 else jnp.broadcast_to(used, (LANES, n)).T
    return jnp.where(lanes(used, x.shape[1]) > 0, x.astype(jnp.float32), 0.0).astype(x.dtype)


def lanes(x: Array, width: int) -> Array:
    """`x` [n, 128] with equal lanes, at another width."""
    copies = -(-width // LANES)
    return (x if copies == 1 else jnp.tile(x, (1, copies)))[:, :width]


def _vector(ref: Any, index: int, where: Any, axis: int) -> Array:
    """Entry `index` of each element of a vector: a column from [1, n, entries] or a row from [1, entries, n]."""
    return ref[0, where, index : index + 1] if axis == 0 else ref[0, index : index + 1, where]


def _pairs(ref: Any, tile: Tile) -> Array:
    """A tile of an array that lies as [1, 1, queries|1, keys|1], in the tile's own order."""
    where = [
        part if size > 1 else slice(None)
        for part, size in zip((tile.q_slice, tile.k_slice), ref.shape[2:], strict=True)
    ]
    part = ref[0, 0, *where]
    if tile.key_axis == 1:
        return part
    return part.astype(jnp.int32 if part.dtype == jnp.int8 else jnp.float32).T
