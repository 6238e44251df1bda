"""Rows that come and go in a batch: what one cache holds of a row put in the place of a row of another."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.cache.paged import PagedCache


def replace_rows[C](cache: C, slots: ArrayLike, rows: C) -> C:
    """Put rows of another cache in the place of rows of this one; the other rows keep every bit.

    Args:
      cache: a dense, window or paged cache of B rows, or any pytree of arrays that all lead with the batch.
      slots: [A] integers, where each row of `rows` goes, each slot named once; a row whose slot is not in 0..B-1 is
        left out, so that one program serves fewer than A rows.
      rows: a cache of A rows of the same kind and sizes; a paged one may have a smaller pool, and shorter rows.

    Returns:
      The cache. Pages of the rows replaced are free again; where the pool has too few for a new row, that row is
      flagged by `overflow`. Under `jax.jit` with the cache donated, it is updated in place.

    Raises:
      ValueError: `rows` is of another kind or size, or `cache` has an array that does not lead with its batch.
    """
    slots = checks.array("slots", slots)
    checks.integer("slots", slots)
    size = checks.shape("slots", slots, "A")["A"]
    flat: Any = [jax.tree.flatten(tree, is_leaf=_has_pages) for tree in (cache, rows)]
    (old, structure), (new, other) = flat
    if structure != other:
        raise checks.fail("rows", f"a cache of the structure {structure}", other)
    by_row = [i for i, part in enumerate(old) if not _has_pages(part)]
    written = dict(zip(by_row, _replace([old[i] for i in by_row], slots, [new[i] for i in by_row], size), strict=True))
    parts = [written[i] if i in written else _replace_pages(old[i], slots, new[i]) for i in range(len(old))]
    return cast(C, jax.tree.unflatten(structure, parts))


def _has_pages(part: Any) -> bool:
    return isinstance(part, PagedCache)


def set_rows(array: Array, slots: Array, rows: Array) -> Array:
    """`array` [B, ...] with rows [A, ...] at `slots` [A]; those outside of 0..B-1 are left out."""
    return array.at[slots].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _replace(old: list[Any], slots: Array, new: list[Any], size: int) -> list[Array]:
    """Arrays that lead with the batch, with the new rows in them."""
    batch = jnp.shape(old[0])[:1] if old else ()
    for held, given in zip(old, new, strict=True):
        want = (size, *jnp.shape(held)[1:])
        if not batch or jnp.shape(held)[:1] != batch:
            raise checks.fail("cache", "arrays that all lead with the batch", f"shape {list(jnp.shape(held))}")
        if jnp.shape(given) != want or given.dtype != held.dtype:
            raise checks.fail("rows", f"{held.dtype} {list(want)}", f"{given.dtype} {list(jnp.shape(given))}")
    return [set_rows(x, slots, y) for x, y in zip(old, new, strict=True)]


def _replace_pages(cache: PagedCache, slots: Array, rows: PagedCache) -> PagedCache:
    """Free the pages of the rows replaced, take as many as the new rows need, and copy those whole."""
    most, pages = rows.page_table.shape[1], cache.key[0].shape[0]
    if most > cache.page_table.shape[1]:
        raise checks.fail("rows", f"at most {cache.page_table.shape[1]} pages a row", most)
    for held, given in zip((*cache.key, *cache.value), (*rows.key, *rows.value), strict=True):
        if held.shape[1:] != given.shape[1:] or held.dtype != given.dtype:
            raise checks.fail("rows", f"pages {held.dtype} {list(held.shape[1:])}", f"{given.dtype} {given.shape[1:]}")
    emptied = cache.truncate(set_rows(cache.length, slots, jnp.zeros_like(rows.length)))
    grown = emptied.reserve(set_rows(jnp.zeros_like(cache.length), slots, rows.length))
    table = grown.page_table.at[slots].get(mode="fill", fill_value=-1, wrap_negative_indices=False)[:, :most]
    source, target = rows.page_table.reshape(-1), table.reshape(-1)
    # A page that is not to be written gets an index of its own past the end: all of them stay unique.
    beyond = pages + jnp.arange(target.shape[0], dtype=jnp.int32)
    target = jnp.where((source >= 0) & (target >= 0), target, beyond)

    def copied(old: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(set_rows(x, target, y.at[source].get(mode="clip")) for x, y in zip(old, new, strict=True))

    return dataclasses.replace(grown, key=copied(cache.key, rows.key), value=copied(cache.value, rows.value))
