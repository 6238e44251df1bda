"""The mask language: which query may attend to which key, as structure (section 33.3). True means "may attend".

A `Mask` is the conjunction of rules, each kept in the form it was given in, so that no [T, S] array exists until
somebody asks for a tile of it. Causality and windows compare *logical positions*, never array indices: in cached
decoding the one query is index 0 of its array and the latest position of its sequence.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.checks import fail

type Window = int | tuple[int | None, ...] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contiguous:
    """Positions start[b], start[b] + 1, ...: the form that lets a kernel skip blocks without reading positions."""

    start: ArrayLike  # [B] any integer dtype


type Positions = Contiguous | ArrayLike | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which of [T, S] pairs may attend, composed of structure; build it with `make_mask`.

    Axes of size B, N, T, S may also have size 1 where the rule does not depend on them. A rule that is None is absent.
    """

    shape: tuple[int, int, int, int] = dataclasses.field(metadata={"static": True})  # B, N, T, S
    is_causal: bool = dataclasses.field(metadata={"static": True})
    window: tuple[int | None, int | None] = dataclasses.field(metadata={"static": True})
    q_positions: Contiguous | jax.Array | None  # [B, T]; None for 0, 1, ..., which is then known at trace time
    kv_positions: Contiguous | jax.Array | None  # [B, S]
    q_lengths: jax.Array | None  # [B]
    kv_lengths: jax.Array | None  # [B]
    q_segment_ids: jax.Array | None  # [B, T]
    kv_segment_ids: jax.Array | None  # [B, S]
    tree_mask: jax.Array | None  # [B, T, T] bool
    explicit: jax.Array | None  # [B, N, T, S] bool

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """How far a query sees to its left and to its right, in positions; None for no limit."""
        left, right = self.window
        return left, (0 if self.is_causal else right)

    @property
    def is_positional(self) -> bool:
        """Whether a rule compares positions."""
        return self.limits != (None, None) or self.tree_mask is not None

    def tile(self, q_start: ArrayLike, q_size: int, k_start: ArrayLike, k_size: int) -> jax.Array:
        """The mask of queries q_start .. q_start + q_size and keys k_start .. k_start + k_size.

        Args:
          q_start, k_start: array indices, not positions; may be traced.
          q_size, k_size: static sizes. A tile may reach past T or S: nothing is visible there.

        Returns:
          bool [B or 1, N or 1, q_size, k_size], True = may attend.
        """
        q_index, k_index = _indices(q_start, q_size), _indices(k_start, k_size)
        _, _, T, S = self.shape
        visible = (q_index < T)[None, None, :, None] & (k_index < S)[None, None, None, :]
        for rule in (self._positional, self._within_lengths, self._same_segment, self._explicit):
            part = rule(q_index, k_index)
            visible = visible if part is None else visible & part
        return visible

    def full(self) -> jax.Array:
        """The whole mask: bool [B or 1, N or 1, T, S]."""
        _, _, T, S = self.shape
        return self.tile(0, T, 0, S)

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """Logical positions of the queries [B or 1, T] and of the keys [B or 1, S], of one signed dtype."""
        _, _, T, S = self.shape
        return self._positions_of(_indices(0, T), _indices(0, S))

    def _positions_of(self, q_index: jax.Array, k_index: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k = _positions_at(self.q_positions, q_index), _positions_at(self.kv_positions, k_index)
        dtype = max(q.dtype, k.dtype, key=lambda dtype: dtype.itemsize)
        return q.astype(dtype), k.astype(dtype)

    def _positional(self, q_index: jax.Array, k_index: jax.Array) -> jax.Array | None:
        if not self.is_positional:
            return None
        q, k = self._positions_of(q_index, k_index)
        visible = jnp.ones((1, 1, 1, 1), bool)
        if self.tree_mask is not None:
            first = _positions_at(self.q_positions, jnp.zeros(1, jnp.int32)).astype(q.dtype)
            ancestors = _take(self.tree_mask, q_index, axis=1)[:, None]
            visible = _descends(ancestors, k[:, None, None, :], first[:, None, None, :])
            q, k = (_by_depth(self.tree_mask, positions, first) for positions in (q, k))
        q, k = q[:, None, :, None], k[:, None, None, :]
        left, right = self.limits
        if left is not None:
            visible = visible & (k >= shift(q, -left))
        if right is not None:
            visible = visible & (k <= shift(q, right))
        return visible

    def _within_lengths(self, q_index: jax.Array, k_index: jax.Array) -> jax.Array | None:
        visible = None
        if self.q_lengths is not None:
            visible = q_index[None, None, :, None] < self.q_lengths[:, None, None, None]
        if self.kv_lengths is not None:
            keys = k_index[None, None, None, :] < self.kv_lengths[:, None, None, None]
            visible = keys if visible is None else visible & keys
        return visible

    def _same_segment(self, q_index: jax.Array, k_index: jax.Array) -> jax.Array | None:
        if self.q_segment_ids is None or self.kv_segment_ids is None:
            return None
        q = _take(self.q_segment_ids, q_index, axis=1)[:, None, :, None]
        k = _take(self.kv_segment_ids, k_index, axis=1)[:, None, None, :]
        return q == k

    def _explicit(self, q_index: jax.Array, k_index: jax.Array) -> jax.Array | None:
        if self.explicit is None:
            return None
        visible = self.explicit
        if visible.shape[2] > 1:
            visible = _take(visible, q_index, axis=2)
        return _take(visible, k_index, axis=3) if visible.shape[3] > 1 else visible


def make_mask(
    shape: tuple[int, int, int, int],
    mask: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    window: Window = None,
    q_positions: Positions = None,
    kv_positions: Positions = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
) -> Mask:
    """Check the rules of a mask and compose them; a pair may attend when every rule given allows it.

    Args:
      shape: (B, N, T, S), the shape of the scores.
      mask: bool, rank 4, broadcastable to [B, N, T, S]. True = may attend.
      is_causal: a query sees keys whose position is at most its own.
      window: (left, right): how many positions besides its own a query sees on each side; an int for both, None on a
        side for no limit. (Hugging Face's `sliding_window=W` is left = W - 1.)
      q_positions: logical positions of the queries, [T], [B, T] or `Contiguous(start[B])`; any integer dtype.
        0..T-1 by default when T == S; with T != S a causal or windowed mask needs them.
      kv_positions: logical positions of the keys, [S], [B, S] or `Contiguous`; 0..S-1 by default.
      q_lengths: [B] integers; queries from this index on see nothing.
      kv_lengths: [B] integers; keys from this index on are hidden.
      q_segment_ids, kv_segment_ids: [B, T] and [B, S] integers, both or neither; pairs attend within a segment.
      tree_mask: bool [T, T] or [B, T, T]: the new tokens that each new token descends from, itself included. Needs
        `q_positions=Contiguous(start)`: new token j is the key at position start + j, earlier keys are visible to all.
        A window counts a new token by its depth in the tree, where siblings share a position.

    Returns:
      The mask as structure.

    Raises:
      ValueError: a malformed rule, or a causal or windowed mask with T != S and no positions.
    """
    B, N, T, S = shape
    is_causal, limits = checks.flag("is_causal", is_causal), _window(window)
    positional = is_causal or limits != (None, None) or tree_mask is not None
    q, k = _check_positions("q_positions", q_positions, B, T), _check_positions("kv_positions", kv_positions, B, S)
    if positional and q is None:
        _require_square(T, S, "tree_mask" if tree_mask is not None else "is_causal" if is_causal else "window")
    if tree_mask is not None and not (q is None or isinstance(q, Contiguous)):
        raise fail("q_positions", "`Contiguous` positions beside a tree_mask", "an array")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise fail("kv_segment_ids", "segment ids for queries and keys, both or neither", "one of them")
    return Mask(
        shape=(B, N, T, S),
        is_causal=is_causal,
        window=limits,
        q_positions=q if positional else None,
        kv_positions=k if positional else None,
        q_lengths=_lengths("q_lengths", q_lengths, B, T),
        kv_lengths=_lengths("kv_lengths", kv_lengths, B, S),
        q_segment_ids=_segments("q_segment_ids", q_segment_ids, B, T),
        kv_segment_ids=_segments("kv_segment_ids", kv_segment_ids, B, S),
        tree_mask=_tree("tree_mask", tree_mask, B, T),
        explicit=_explicit("mask", mask, shape),
    )


def _require_square(T: int, S: int, rule: str) -> None:
    if T == S:
        return
    raise fail(
        "q_positions",
        f"the queries' logical positions, because {rule} with T = {T} and S = {S} is ambiguous: "
        "`q_positions=jnp.arange(T)` puts query 0 at key 0 (top-left), "
        "`q_positions=jnp.arange(S - T, S)` puts the last query at the last key (bottom-right, as in cached decoding)",
        None,
    )


def _window(window: Window) -> tuple[int | None, int | None]:
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or not all(side is None or _is_count(side) for side in sides):
        raise fail("window", "(left, right), each None or a non-negative integer, or one integer for both", window)
    left, right = sides
    return (None if left is None else int(left)), (None if right is None else int(right))


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


def _check_positions(name: str, positions: Positions, B: int, size: int) -> Contiguous | jax.Array | None:
    if isinstance(positions, Contiguous):
        start = jnp.atleast_1d(checks.array(f"{name}.start", positions.start))
        checks.shape(f"{name}.start", start, "1" if B == 1 or start.shape == (1,) else "B", {"B": B})
        return Contiguous(_signed(f"{name}.start", start))
    if positions is None:
        return None
    return _signed(name, _integers(name, positions, (B, size)))


def _integers(name: str, values: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Check an integer array of `shape`; a leading batch axis may be left out where there is another one."""
    values = checks.array(name, values)
    checks.integer(name, values)
    if len(shape) > 1 and values.shape == shape[1:]:
        return values[None]
    if values.shape not in {shape, (1, *shape[1:])}:
        raise fail(name, f"shape {list(shape)}" + (f" or {list(shape[1:])}" if len(shape) > 1 else ""), values.shape)
    return values


def _lengths(name: str, lengths: ArrayLike | None, B: int, size: int) -> jax.Array | None:
    """Lengths as int32; one past the end of the axis says the same as the end."""
    if lengths is None:
        return None
    return jnp.clip(_signed(name, _integers(name, lengths, (B,))), 0, size).astype(jnp.int32)


def _segments(name: str, ids: ArrayLike | None, B: int, size: int) -> jax.Array | None:
    """Ids in one dtype for queries and keys; they are only compared for equality, which wrapping keeps."""
    return None if ids is None else _integers(name, ids, (B, size)).astype(jax.dtypes.canonicalize_dtype(np.int64))


def _tree(name: str, tree_mask: ArrayLike | None, B: int, T: int) -> jax.Array | None:
    if tree_mask is None:
        return None
    tree_mask = checks.array(name, tree_mask)
    checks.boolean(name, tree_mask)
    if tree_mask.shape not in {(T, T), (B, T, T), (1, T, T)}:
        raise fail(name, f"shape {[T, T]} or {[B, T, T]}", tree_mask.shape)
    return tree_mask[None] if tree_mask.ndim == 2 else tree_mask


def _explicit(name: str, mask: ArrayLike | None, shape: tuple[int, ...]) -> jax.Array | None:
    if mask is None:
        return None
    mask = checks.array(name, mask)
    checks.boolean(name, mask)
    checks.broadcastable(name, mask, "B N T S", shape)
    return mask


def _signed(name: str, positions: jax.Array) -> jax.Array:
    """Positions in a signed dtype of at least 32 bits, so that `position - left` below zero is what it says."""
    checks.integer(name, positions)
    wide = positions.dtype.itemsize == 8 or positions.dtype == np.uint32
    dtype = jax.dtypes.canonicalize_dtype(np.int64) if wide else np.dtype(np.int32)
    if jnp.issubdtype(positions.dtype, jnp.unsignedinteger) and positions.dtype.itemsize >= dtype.itemsize:
        positions = jnp.minimum(positions, np.asarray(np.iinfo(dtype).max, positions.dtype))
    return positions.astype(dtype)


def _indices(start: ArrayLike, size: int) -> jax.Array:
    return jnp.asarray(start, jnp.int32) + jnp.arange(size, dtype=jnp.int32)


def _positions_at(positions: Contiguous | jax.Array | None, index: jax.Array) -> jax.Array:
    """Positions [B or 1, size] of the array indices [size]."""
    if positions is None:
        return index[None, :]
    if isinstance(positions, Contiguous):
        start = jnp.asarray(positions.start)[:, None]
        return saturating_add(start, index.astype(start.dtype)[None, :])
    return _take(positions, index, axis=1)


def _take(array: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Entries at `index`; what lies past the end is hidden elsewhere and may be anything."""
    if array.shape[axis] == 0:
        return jnp.zeros(array.shape[:axis] + index.shape + array.shape[axis + 1 :], array.dtype)
    return jnp.take(array, index, axis=axis, mode="clip")


def _descends(ancestors: jax.Array, k: jax.Array, first: jax.Array) -> jax.Array:
    """Which keys the tree lets a query see: all before the new tokens, among those its ancestors, none after them.

    Args:
      ancestors: [B|1, 1, q_size, T] bool, rows of the tree mask.
      k: [B|1, 1, 1, k_size] positions of the keys.
      first: [B|1, 1, 1, 1] position of the first new token.

    Returns:
      bool [B|1, 1, q_size, k_size].
    """
    T = ancestors.shape[-1]
    offset = jnp.where(k >= first, k - first, -1)  # negative as well where the difference overflows: far past the tree
    token = jnp.broadcast_to(
        offset, (max(k.shape[0], first.shape[0], ancestors.shape[0]), *ancestors.shape[1:3], k.shape[-1])
    )
    ancestors = jnp.broadcast_to(ancestors, (token.shape[0], *ancestors.shape[1:]))
    if T == 0:
        return jnp.broadcast_to(k < first, token.shape)
    descends = jnp.take_along_axis(ancestors, jnp.clip(token, 0, T - 1), axis=-1)
    return (k < first) | (descends & (offset >= 0) & (offset < T))


def _by_depth(tree_mask: jax.Array, positions: jax.Array, first: jax.Array) -> jax.Array:
    """Positions [B|1, size] with those of new tokens counted by depth in the tree: alternatives share a position."""
    T = tree_mask.shape[-1]
    if T == 0:
        return positions
    offset = jnp.where(positions >= first, positions - first, -1)
    depth = jnp.sum(tree_mask, axis=-1, dtype=positions.dtype) - 1
    rows = max(offset.shape[0], depth.shape[0])
    offset, depth = (jnp.broadcast_to(x, (rows, x.shape[1])) for x in (offset, depth))
    of_token = first + jnp.take_along_axis(depth, jnp.clip(offset, 0, T - 1), axis=1)
    return jnp.where((offset >= 0) & (offset < T), of_token, positions)


def shift(x: jax.Array, step: int) -> jax.Array:
    """x + step, saturating, for a step of any size: in parts that the dtype can hold."""
    most = int(np.iinfo(x.dtype).max)
    step = min(max(step, -2 * most - 2), 2 * most + 2)
    while step:
        part = min(max(step, -most), most)
        x, step = saturating_add(x, jnp.asarray(part, x.dtype)), step - part
    return x


def saturating_add(x: jax.Array, step: jax.Array) -> jax.Array:
    """x + step of one dtype, held at the ends of its range instead of wrapping around."""
    total = x + step
    over, under = (step > 0) & (total < x), (step < 0) & (total > x)
    limits = np.iinfo(x.dtype)
    return jnp.where(over, limits.max, jnp.where(under, limits.min, total))
