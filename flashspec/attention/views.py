"""What a cache shows to attention: keys and values where they lie, and which logical position each slot holds.

Three layouts, one pytree each, and `gather`, which brings any of them into the dense form that XLA computes on.
A slot that no query may see (past the length, rolled back, never written) may hold anything, NaN included.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from flashspec import checks
from flashspec.checks import fail


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseView:
    """Slot s of a row holds logical position s, and is valid iff s < length.

    Args:
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      length: [B] int32, logical positions of each row; it may exceed S when a cache overflowed.
    """

    key: Array
    value: Array
    length: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowView:
    """A ring buffer: slot s of row b holds logical position positions[b, s]; -1 marks a slot that holds none.

    Args:
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      positions: [B, S] int32.
      length: [B] int32, logical positions of each row; the ring keeps only the latest of them.
    """

    key: Array
    value: Array
    positions: Array
    length: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedView:
    """Logical position i of row b lies at page page_table[b, i // page], offset i % page.

    Args:
      key_pages: [pages, page, K, H], shared by all rows.
      value_pages: [pages, page, K, Hv].
      page_table: [B, max_pages] int32; entries past the length may hold anything.
      length: [B] int32, logical positions of each row.
    """

    key_pages: Array
    value_pages: Array
    page_table: Array
    length: Array


type View = DenseView | WindowView | PagedView


def slots(view: View) -> int:
    """How many key positions `gather` yields for each row."""
    if isinstance(view, PagedView):
        return view.page_table.shape[1] * view.key_pages.shape[1]
    return view.key.shape[1]


def check_view(view: View, batch: int) -> None:
    """ValueError for what is not a view, or has arrays that do not fit each other or a batch of that size."""
    if isinstance(view, PagedView):
        sizes = checks.shape("view.key_pages", view.key_pages, "pages page K H")
        checks.shape("view.value_pages", view.value_pages, "pages page K Hv", sizes)
        checks.shape("view.page_table", view.page_table, "B _", {"B": batch})
        integers = {"page_table": view.page_table, "length": view.length}
    elif isinstance(view, DenseView | WindowView):
        sizes = checks.shape("view.key", view.key, "B S K H", {"B": batch})
        checks.shape("view.value", view.value, "B S K Hv", sizes)
        integers = {"length": view.length}
        if isinstance(view, WindowView):
            checks.shape("view.positions", view.positions, "B S", sizes)
            integers["positions"] = view.positions
    else:
        raise fail("view", "a DenseView, WindowView or PagedView", type(view).__name__)
    checks.shape("view.length", view.length, "B", {"B": batch})
    for name, array in integers.items():
        checks.integer(f"view.{name}", array)


def gather(view: View) -> tuple[Array, Array, Array | None, Array]:
    """The view in dense form, slots along axis 1.

    Args:
      view: a dense, window or paged view of B rows.

    Returns:
      key [B, S, K, H]; value [B, S, K, Hv]; kv_positions [B, S] int32, or None where slot s holds position s;
      kv_valid [B, S] bool, False on every slot that holds no live position. Dense and window arrays are not copied.
    """
    length = jnp.asarray(view.length, jnp.int32)[:, None]
    if isinstance(view, WindowView):
        positions = jnp.asarray(view.positions, jnp.int32)
        return view.key, view.value, positions, (positions >= 0) & (positions < length)
    positions = jnp.arange(slots(view), dtype=jnp.int32)[None, :]
    valid = positions < length
    if isinstance(view, DenseView):
        return view.key, view.value, None, valid
    key, value = (_read_pages(pages, view.page_table) for pages in (view.key_pages, view.value_pages))
    return key, value, None, valid


def _read_pages(pages: Array, page_table: Array) -> Array:
    """Rows' pages end to end, [B, max_pages * page, ...]; stray table entries are clamped: the length hides them."""
    pages, page_table = jnp.asarray(pages), jnp.asarray(page_table, jnp.int32)
    # In explicit mode a gather has to be told: rows are split as the table is, heads as the pages are.
    held, split = jax.typeof(pages).sharding, None
    if held.mesh.explicit_axes:
        batch, heads = jax.typeof(page_table).sharding.spec[0], held.spec[2]
        split = NamedSharding(held.mesh, PartitionSpec(batch, None, None, heads, None))
    rows = pages.at[page_table].get(mode="clip", out_sharding=split)
    return rows.reshape(rows.shape[0], rows.shape[1] * rows.shape[2], *rows.shape[3:])
