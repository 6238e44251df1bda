"""One tile of the score matrix: its part of the operands, its statistics, and its share of the gradients.

A tile is some consecutive queries against some consecutive keys. Its arrays have the head axis split as [K, G], so that
grouped heads share their keys without a copy; scores are [B, K, G, q, k].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flashspec.attention.dropout import Dropout
from flashspec.masks import Mask
from flashspec.online_softmax import SoftmaxStats, shifted_weights, stats_dtype

# Which axes of an array run along the queries and along the keys.
QUERY_ROWS, KEY_ROWS, SCORES = (1, None), (None, 1), (2, 3)


class Call(NamedTuple):
    """What is static about a call: hashable, so that it can stand beside differentiated arguments."""

    scale: float
    soft_cap: float | None
    sizes: tuple[int, int]  # queries and keys of a tile
    starts: tuple[tuple[int, int], ...]  # first query and first key of every tile that may hold a visible pair
    check_visible: bool  # whether the data can hide a whole tile


class Tensors(NamedTuple):
    """What is differentiated; also the form of its gradients."""

    query: Array  # [B, T, N, H]
    key: Array  # [B, S, K, H]
    value: Array  # [B, S, K, Hv]
    bias: Array | None  # [B|1, N|1, T|1, S|1]

    @property
    def spans(self) -> Any:
        """The same pytree with, for each array, the axes along which a tile reads it."""
        bias: Any = None if self.bias is None else SCORES
        spans: tuple[Any, Any, Any] = QUERY_ROWS, KEY_ROWS, KEY_ROWS
        return Tensors(*spans, bias)


class Structure(NamedTuple):
    """What decides which probabilities count."""

    mask: Mask
    dropout: Dropout | None

    @property
    def kept_scale(self) -> float:
        """What a kept probability is multiplied by."""
        return 1.0 if self.dropout is None else self.dropout.scale


class Tile(NamedTuple):
    """Where a tile lies, its part of the operands, and what counts in it."""

    start: tuple[Array, Array]
    tensors: Tensors
    visible: Array  # [B|1, N|1, q, k]
    keep: Array | None  # [B|1, N|1, q|1, k|1]; None without dropout


def read(x: Array, start: tuple[Array, Array], span: tuple[int | None, int | None], sizes: tuple[int, int]) -> Array:
    """The tile's part of `x`. An axis that the tile covers, or along which `x` is broadcast, is left whole."""
    for axis, first, size in zip(span, start, sizes, strict=True):
        if axis is not None and x.shape[axis] not in (1, size):
            x = lax.dynamic_slice_in_dim(x, first, size, axis)
    return x


def write(x: Array, part: Array, start: tuple[Array, Array], span: tuple[int | None, int | None]) -> Array:
    """`x` with the tile's part replaced."""
    starts = [jnp.zeros((), jnp.int32)] * x.ndim
    for axis, first in zip(span, start, strict=True):
        if axis is not None and x.shape[axis] != part.shape[axis]:
            starts[axis] = first
    return part if x.shape == part.shape else lax.dynamic_update_slice(x, part, starts)


def read_tile(call: Call, tensors: Tensors, structure: Structure, first: Array) -> Tile:
    """The tile whose own pairs begin at `first` = (query, key).

    Every tile has the same size: the last one along an axis is moved back inside the array, and the pairs that this
    makes it share with its neighbour are hidden in it.
    """
    B, T, N, _ = tensors.query.shape
    start, owned = [], []
    for begin, size, total in zip(first, call.sizes, (T, tensors.key.shape[1]), strict=True):
        start.append(jnp.minimum(begin, total - size))
        owned.append(start[-1] + jnp.arange(size, dtype=jnp.int32) >= begin)
    spans = start[0], call.sizes[0], start[1], call.sizes[1]
    visible = structure.mask.tile(*spans) & owned[0][None, None, :, None] & owned[1][None, None, None, :]
    keep = None if structure.dropout is None else structure.dropout.tile(B, N, *spans)
    at = (start[0], start[1])
    parts = jax.tree.map(lambda x, span: read(x, at, span, call.sizes), tensors, tensors.spans)
    return Tile(at, parts, visible, keep)


def tile_stats(call: Call, tile: Tile, kept_scale: float) -> SoftmaxStats:
    """Statistics of the tile's queries over its keys (eq. 33.3), rows [B, q, N]. Dropout acts on u alone."""
    own = _Heads(call, tile)
    m, weights, nonempty = shifted_weights(own.scores, own.visible)
    kept = weights if own.keep is None else jnp.where(own.keep, weights, 0)
    u = own.einsum("bkgts,bskv->btkgv", kept.astype(own.value.dtype), own.value)
    u = u if own.keep is None else u * kept_scale
    return SoftmaxStats(
        _rows(m), _rows(jnp.sum(weights, axis=-1)), u.reshape(*u.shape[:2], -1, u.shape[-1]), _rows(nonempty)
    )


def tile_gradients(
    call: Call, tile: Tile, kept_scale: float, m: Array, l: Array, row_term: Array, output_gradient: Array
) -> Tensors:
    """The tile's share of the gradients (eq. 33.6 to 33.8), in the dtype of the statistics.

    Args:
      call, tile, kept_scale: as in the forward.
      m, l: [B, q, N] statistics over all keys, finite and non-zero on empty rows too.
      row_term: [B, q, N], what is added to G_P in eq. 33.7.
      output_gradient: [B, q, N, Hv], G_O in the dtype of the values.

    Returns:
      Gradients shaped as the tile's tensors, that of the bias [B, N, q, k].
    """
    own = _Heads(call, tile)
    G_O = own.split(output_gradient, axis=2)
    P = jnp.exp(jnp.where(own.visible, own.scores, -jnp.inf) - _columns(own.split(m, axis=2)))
    P = P / _columns(own.split(l, axis=2))
    kept = P if own.keep is None else jnp.where(own.keep, P, 0) * kept_scale
    G_V = own.einsum("bkgts,btkgv->bskv", kept.astype(own.value.dtype), G_O)
    G_P = own.einsum("btkgv,bskv->bkgts", G_O, own.value)
    G_P = G_P if own.keep is None else jnp.where(own.keep, G_P, 0) * kept_scale
    slope = 1 if call.soft_cap is None else 1 - jnp.square(own.scores / call.soft_cap)
    G_S = jnp.where(own.visible, P * (G_P + _columns(own.split(row_term, axis=2))) * slope, 0)
    unit = _unit(G_S, own.key.dtype)
    narrow = (G_S / unit).astype(own.key.dtype)
    G_Q = own.einsum("bkgts,bskh->btkgh", narrow, own.key) * (unit * call.scale)
    G_K = own.einsum("bkgts,btkgh->bskh", narrow, own.query) * (unit * call.scale)
    bias = None if own.bias is None else G_S.reshape(G_S.shape[0], -1, *G_S.shape[3:])
    return Tensors(G_Q.reshape(tile.tensors.query.shape), G_K, G_V, bias)


class _Heads:
    """A tile with heads split, operands that nothing sees replaced by 0, and its scores.

    A weight of 0 does not hide a NaN (0 * NaN is NaN), so hidden keys, hidden values and the queries of empty rows are
    replaced before they enter a product.
    """

    def __init__(self, call: Call, tile: Tile):
        query, key, value, bias = tile.tensors
        self.groups = query.shape[2] // key.shape[2]
        self.dtype = stats_dtype(query.dtype)
        self.bias = None if bias is None else self.split(bias, axis=1)
        self.keep = None if tile.keep is None else self.split(tile.keep, axis=1)
        self.visible = self.split(tile.visible, axis=1)
        if self.bias is not None:
            self.visible = self.visible & (self.bias != -jnp.inf)
        keys_seen = jnp.any(self.visible, axis=(2, 3)).swapaxes(1, 2)[..., None]
        queries_seen = jnp.moveaxis(jnp.any(self.visible, axis=4), 3, 1)[..., None]
        self.query = jnp.where(queries_seen, self.split(query, axis=2), 0)
        self.key = jnp.where(keys_seen, key, 0)
        self.value = jnp.where(keys_seen, value, 0)
        self.scores = self._scores(call)

    def split(self, x: Array, axis: int) -> Array:
        """Heads of `x` as [K, G] (N = K G), or as [1, 1] where one entry serves all heads."""
        heads = (1, 1) if x.shape[axis] == 1 else (x.shape[axis] // self.groups, self.groups)
        return x.reshape(*x.shape[:axis], *heads, *x.shape[axis + 1 :])

    def einsum(self, spec: str, a: Array, b: Array) -> Array:
        """A product accumulated in the dtype of the statistics; float32 operands use the highest precision."""
        precision = None if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=self.dtype)

    def _scores(self, call: Call) -> Array:
        scores = self.einsum("btkgh,bskh->bkgts", self.query, self.key) * call.scale
        if self.bias is not None:
            scores = scores + self.bias.astype(self.dtype)
        return scores if call.soft_cap is None else call.soft_cap * jnp.tanh(scores / call.soft_cap)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` summed over the axes along which an array of `shape` was broadcast to it."""
    axes = tuple(axis for axis, (got, want) in enumerate(zip(x.shape, shape, strict=True)) if got != want)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


def _unit(x: Array, dtype: np.dtype) -> Array | float:
    """What to divide `x` by before it is rounded to `dtype`: its largest magnitude in float16, whose range is narrow.

    G_S can leave that range, at either end, where the gradients made of it do not.
    """
    if dtype != np.float16:
        return 1.0
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)))
    return jnp.where(largest > 0, largest, 1)


def _rows(x: Array) -> Array:
    """[B, K, G, q] as [B, q, N]."""
    return jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1)


def _columns(x: Array) -> Array:
    """[B, q, K, G] as [B, K, G, q, 1], beside scores."""
    return jnp.moveaxis(x, 1, 3)[..., None]
