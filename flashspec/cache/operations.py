"""append, rollback, view and cache_bytes: one implementation over every layout."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.attention.views import View
from flashspec.cache.base import Cache, row_index


def append[C: Cache](cache: C, layer: int, k: Array, v: Array, num_valid: ArrayLike | None = None) -> C:
    """Write the keys and values of T new positions of one layer; layer 0 advances the length, once a forward.

    A forward appends its layers in order, each once and with the same `num_valid`. The first num_valid[b] of the T
    positions of row b are written after what it holds; a row with num_valid[b] = 0 keeps every bit. Writes past the
    capacity are dropped, never clamped onto live positions, while `length` counts them: see `overflow` of the cache.

    Args:
      cache: a dense, window or paged cache.
      layer: index of the layer, from 0.
      k: [B, T, K, H], of the cache's dtype.
      v: [B, T, K, Hv], of the cache's dtype.
      num_valid: [B] integers in 0..T; T for every row when None.

    Returns:
      The cache with the positions added. Under `jax.jit` with the cache donated, or in a loop, it is updated in place.

    Raises:
      ValueError: a shape, dtype, layer or count that does not fit, or more positions than a window cache takes at once.
    """
    num_valid = _check_append(cache, layer, k, v, num_valid)
    cache = cast(C, cache.reserve(num_valid)) if layer == 0 else cache
    index = _newest(cache, k.shape[1], num_valid)
    return dataclasses.replace(
        cache, key=_write(cache.key, layer, index, k), value=_write(cache.value, layer, index, v)
    )


def advance[C: Cache](cache: C, width: int, num_valid: ArrayLike | None = None) -> tuple[C, tuple[Array, Array]]:
    """`append` to all layers but for the writes, for a kernel that does them itself.

    Args:
      cache: a dense, window or paged cache.
      width: T new positions.
      num_valid: [B] integers in 0..T; T for every row when None.

    Returns:
      The cache with `length` advanced, and where its new positions go: [B, T] int32 indices into the first two axes of
      every layer's arrays. Those of a write that must not happen lie past the ends of both.

    Raises:
      ValueError: counts that do not fit, or more positions than a window cache takes at once.
    """
    num_valid = _valid(cache, checks.at_least("width", width, 1), num_valid)
    cache = cast(C, cache.reserve(num_valid))
    return cache, _newest(cache, width, num_valid)


def rollback[C](cache: C, length: ArrayLike) -> C:
    """Forget the positions from `length` on: row b keeps min(cache.length[b], length[b]) of them.

    A paged cache returns pages to its pool. A window cache is exact while the rollback undoes at most slots - left of
    the positions ever appended; see its `overflow`. Any other dataclass, NamedTuple or dict with a `length` has only
    that lowered, which suffices where positions past the length are never read.

    Args:
      cache: a cache, or a user's own state with `length` [B].
      length: [B] integers, at least 0.

    Returns:
      The cache with lower lengths; a row that is already shorter is not changed.

    Raises:
      ValueError: a length of the wrong shape or below 0, or a state without `length`.
    """
    current = cache.get("length") if isinstance(cache, dict) else getattr(cache, "length", None)
    if current is None:
        raise checks.fail("cache", "a dataclass, NamedTuple or dict with `length`", type(cache).__name__)
    wanted = _counts("length", length, current.shape[0], None).astype(current.dtype)
    lowered = jnp.minimum(current, jnp.maximum(wanted, 0))
    return cast(C, cache.truncate(lowered) if isinstance(cache, Cache) else _with_length(cache, lowered))


def view(cache: Cache, layer: int) -> View:
    """What `decode_attention` reads of one layer: the arrays themselves, not copied, and which positions they hold.

    Args:
      cache: a dense, window or paged cache with `length` [B].
      layer: index of the layer, from 0.

    Returns:
      A `DenseView`, `WindowView` or `PagedView`.

    Raises:
      ValueError: no such layer.
    """
    _check_layer(cache, layer)
    return cache.view(layer)


def cache_bytes(cache: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes of a cache, tables and lengths included, before anything is allocated.

    Args:
      cache: a function that builds one, called abstractly with the other arguments, as in
        `cache_bytes(dense_cache, layers, batch, capacity, K, H)`; or a cache, of arrays or of `jax.ShapeDtypeStruct`s.
      *args: positional arguments of the function.
      **kwargs: keyword arguments of the function.

    Returns:
      The sum over all arrays of size times bytes an element.

    Raises:
      ValueError: arguments that the function refuses.
    """
    built = _abstract(cache, *args, **kwargs) if callable(cache) else cache
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(built))


def _with_length(state: Any, length: Array) -> Any:
    if isinstance(state, dict):
        return {**state, "length": length}
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return dataclasses.replace(state, length=length)
    if hasattr(state, "_replace"):
        return state._replace(length=length)
    raise checks.fail("cache", "a dataclass, NamedTuple or dict with `length`", type(state).__name__)


def _abstract(init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return jax.eval_shape(lambda: init(*args, **kwargs))


def _check_append(cache: Cache, layer: int, k: Array, v: Array, num_valid: ArrayLike | None) -> Array:
    """Check the arguments of `append`, and return `num_valid` as int32 [B]."""
    _check_layer(cache, layer)
    batch = cache.length.shape[0]
    heads, key_size = cache.key[layer].shape[2:]
    sizes = checks.shape("k", k, "B T K H", {"B": batch, "K": heads, "H": key_size})
    checks.shape("v", v, "B T K Hv", {**sizes, "Hv": cache.value[layer].shape[3]})
    for name, array, held in (("k", k, cache.key[layer]), ("v", v, cache.value[layer])):
        if array.dtype != held.dtype:
            raise checks.fail(name, f"the cache's dtype {held.dtype}", array.dtype)
    return _valid(cache, sizes["T"], num_valid)


def _valid(cache: Cache, width: int, num_valid: ArrayLike | None) -> Array:
    """How many of T new positions are real, int32 [B]."""
    batch = cache.length.shape[0]
    if num_valid is None:
        return jnp.full((batch,), width, jnp.int32)
    return jnp.clip(_counts("num_valid", num_valid, batch, width).astype(jnp.int32), 0, width)


def _newest(cache: Cache, width: int, num_valid: Array) -> tuple[Array, Array]:
    """Storage indices of the newest positions of a cache whose length counts them already."""
    step = jnp.arange(width, dtype=jnp.int32)[None, :]
    positions = (cache.length - num_valid)[:, None] + step
    return _writable(cache, positions, (step < num_valid[:, None]) & (positions >= 0))


def _check_layer(cache: Cache, layer: int) -> None:
    if not isinstance(cache, Cache):
        raise checks.fail("cache", "a dense, window or paged cache", type(cache).__name__)
    if checks.at_least("layer", layer, 0) >= len(cache.key):
        raise checks.fail("layer", f"a layer below {len(cache.key)}", layer)


def _counts(name: str, counts: ArrayLike, batch: int, most: int | None) -> Array:
    """Check that `counts` is [B] integers in 0..most, by value where the values are known."""
    checks.shape(name, counts, "B", {"B": batch})
    checks.integer(name, counts)
    if checks.is_concrete(counts):
        values = np.asarray(counts)
        if values.min() < 0 or (most is not None and values.max() > most):
            raise checks.fail(name, "counts of at least 0" if most is None else f"counts in 0..{most}", values.tolist())
    return jnp.asarray(counts)


def _writable(cache: Cache, positions: Array, wanted: Array) -> tuple[Array, Array]:
    """Storage indices of `positions` [B, T]; a write that must not happen gets an index of its own past the end.

    Giving each dropped write another index keeps all of them unique, which lets the scatter be plain stores.
    """
    leads, slots = cache.key[0].shape[:2]
    lead, slot = cache.locate(positions)
    written = wanted & (lead < leads) & (slot < slots)
    beyond = slots + jnp.arange(positions.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(written, lead, leads + row_index(*positions.shape)), jnp.where(written, slot, beyond)


def _write(layers: tuple[Array, ...], layer: int, index: tuple[Array, Array], new: Array) -> tuple[Array, ...]:
    written = layers[layer].at[index].set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)
    return (*layers[:layer], written, *layers[layer + 1 :])
