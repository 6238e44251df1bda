"""A paged cache: rows take fixed-size pages from one pool as they grow, and return them when they are rolled back.

The page table is the only record of ownership: a page is free iff no row's table names it. There is no free list that
could disagree with it, and a page cannot have two owners.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flashspec import checks
from flashspec.attention.views import PagedView
from flashspec.cache.base import Cache, no_positions, storage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache(Cache):
    """Storage is [pages, page_size, K, H] a layer, and one page table serves all layers.

    Args:
      page_table: [B, max_pages] int32, the pages of each row in the order of its positions; -1 past the last one.
    """

    page_table: Array

    @property
    def page_size(self) -> int:
        """Positions in a page."""
        return self.key[0].shape[1]

    @property
    def held(self) -> Array:
        """[B] int32: the pages that each row holds."""
        return jnp.sum(self.page_table >= 0, axis=1, dtype=jnp.int32)

    @property
    def overflow(self) -> Array:
        return self.length > self.held * self.page_size

    def reserve(self, num_valid: Array) -> "PagedCache":
        length = self.length + num_valid
        held, max_pages = self.held, self.page_table.shape[1]
        # A row that has lost a position gets nothing more: a page after a hole would pass for a page of the hole.
        wanted = jnp.where(self.overflow, held, jnp.minimum(self._pages(length), max_pages))
        more = jnp.maximum(wanted - held, 0)
        index = jnp.arange(max_pages, dtype=jnp.int32)[None, :]
        turn = (jnp.cumsum(more, dtype=jnp.int32) - more)[:, None] + index - held[:, None]
        granted = jnp.take(self._free(), turn, mode="fill", fill_value=-1)
        fresh = (index >= held[:, None]) & (index < wanted[:, None])
        return dataclasses.replace(self, length=length, page_table=jnp.where(fresh, granted, self.page_table))

    def locate(self, positions: Array) -> tuple[Array, Array]:
        index = positions // self.page_size
        page = jnp.take_along_axis(self.page_table, index, axis=1, mode="fill", fill_value=-1)
        return jnp.where(page < 0, self.key[0].shape[0], page), positions % self.page_size

    def truncate(self, length: Array) -> "PagedCache":
        index = jnp.arange(self.page_table.shape[1], dtype=jnp.int32)[None, :]
        page_table = jnp.where(index < self._pages(length)[:, None], self.page_table, -1)
        return dataclasses.replace(self, length=length, page_table=page_table)

    def view(self, layer: int) -> PagedView:
        return PagedView(self.key[layer], self.value[layer], self.page_table, self.length)

    def _pages(self, length: Array) -> Array:
        """How many pages hold `length` positions."""
        return (length + self.page_size - 1) // self.page_size

    def _free(self) -> Array:
        """[pages] int32: the free pages in increasing order, then -1."""
        pages = self.key[0].shape[0]
        taken = jnp.where(self.page_table < 0, pages, self.page_table)
        free = jnp.ones((pages,), jnp.bool_).at[taken].set(False, mode="drop")
        return jnp.nonzero(free, size=pages, fill_value=-1)[0].astype(jnp.int32)


def paged_cache(
    page_size: int,
    num_pages: int,
    layers: int,
    batch: int,
    K: int,
    H: int,
    Hv: int | None = None,
    dtype: Any = jnp.float32,
    capacity: int | None = None,
) -> PagedCache:
    """An empty paged cache: `batch` rows that share `num_pages` pages of `page_size` positions.

    When the pool runs out, the rows that lack a page lose the positions that they could not write, and `overflow` says
    which rows these are; the others are not touched. A rollback to what a row still holds clears it.

    Args:
      page_size: positions in a page.
      num_pages: pages in the pool, shared by the rows and the same for every layer.
      layers: decoder layers, each with its own arrays.
      batch: B rows.
      K: key/value heads.
      H: key head size.
      Hv: value head size; H when None.
      dtype: of keys and values.
      capacity: positions that one row may hold, rounded up to whole pages; the whole pool when None.

    Returns:
      A `PagedCache` whose arrays are [num_pages, page_size, K, H] and [num_pages, page_size, K, Hv] in every layer,
      with a page table [B, ceil(capacity / page_size)].

    Raises:
      ValueError: a size below 1, or a dtype that is not floating.
    """
    checks.at_least("page_size", page_size, 1)
    checks.at_least("num_pages", num_pages, 1)
    capacity = num_pages * page_size if capacity is None else checks.at_least("capacity", capacity, 1)
    return PagedCache(
        length=no_positions(batch),
        page_table=jnp.full((batch, -(-capacity // page_size)), -1, jnp.int32),
        **storage(layers, (num_pages, page_size), K, H, Hv, dtype),
    )
