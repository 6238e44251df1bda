"""A window cache: a ring buffer for attention that looks at most `left` positions back.

Position i goes to slot i % slots, over position i - slots. A forward over T new positions from length L writes up to
L + T - 1, and its first query still looks back to L - left; a rollback afterwards returns to L at the lowest. Both are
served when slots >= left + T, hence the least number of slots, left + D + 1, for rounds that verify D + 1 positions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flashspec import checks
from flashspec.attention.views import WindowView
from flashspec.cache.base import Cache, no_positions, row_index, storage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowCache(Cache):
    """Storage is [B, slots, K, H] a layer.

    Args:
      positions: [B, slots] int32, the logical position in each slot; -1 where none is (never written, or rolled back).
      forgotten: [B] bool, the row was rolled back past what the ring had already overwritten. It stays set until the
        row is rolled back to 0, since what was computed in between saw too few keys.
      left: positions before its own that a query sees.
    """

    positions: Array
    forgotten: Array
    left: int = dataclasses.field(metadata={"static": True})

    @property
    def overflow(self) -> Array:
        return self.forgotten

    def reserve(self, num_valid: Array) -> "WindowCache":
        length = self.length + num_valid
        slots = self.positions.shape[1]
        last = length[:, None] - 1
        # The latest position that belongs in each slot; it is a new one where it lies past the old length.
        latest = last - (last - jnp.arange(slots, dtype=jnp.int32)[None, :]) % slots
        positions = jnp.where(latest >= self.length[:, None], latest, self.positions)
        return dataclasses.replace(self, length=length, positions=positions)

    def locate(self, positions: Array) -> tuple[Array, Array]:
        slots = self.positions.shape[1]
        if positions.shape[1] > slots - self.left:
            most = (
                f"at most slots - left = {slots - self.left} new positions in one append (longer prompts go in chunks)"
            )
            raise checks.fail("k", most, positions.shape[1])
        return row_index(*positions.shape), positions % slots

    def truncate(self, length: Array) -> "WindowCache":
        positions = jnp.where(self.positions < length[:, None], self.positions, -1)
        needed = jnp.minimum(length, self.left)
        held = jnp.sum(positions >= (length - needed)[:, None], axis=1, dtype=jnp.int32)
        forgotten = (self.forgotten | (held < needed)) & (length > 0)
        return dataclasses.replace(self, length=length, positions=positions, forgotten=forgotten)

    def view(self, layer: int) -> WindowView:
        return WindowView(self.key[layer], self.value[layer], self.positions, self.length)


def window_cache(
    left: int,
    draft_length: int,
    layers: int,
    batch: int,
    K: int,
    H: int,
    Hv: int | None = None,
    dtype: Any = jnp.float32,
    slots: int | None = None,
) -> WindowCache:
    """An empty ring buffer for attention with window=(left, 0) and rounds of `draft_length` draft tokens.

    A rollback is exact while it undoes at most slots - left of the positions ever appended; a deeper one sets
    `overflow` for its row.

    Args:
      left: positions before its own that a query sees.
      draft_length: D, draft tokens in one round; 0 for plain decoding.
      layers: decoder layers, each with its own arrays.
      batch: B rows.
      K: key/value heads.
      H: key head size.
      Hv: value head size; H when None.
      dtype: of keys and values.
      slots: positions kept for a row; left + D + 1 when None. More slots allow longer appends (larger prefill chunks).

    Returns:
      A `WindowCache` whose arrays are [B, slots, K, H] and [B, slots, K, Hv] in every layer.

    Raises:
      ValueError: fewer than left + D + 1 slots, a size below its least value, or a dtype that is not floating.
    """
    least = checks.at_least("left", left, 0) + checks.at_least("draft_length", draft_length, 0) + 1
    slots = least if slots is None else slots
    if slots < least:
        raise checks.fail("slots", f"at least left + draft_length + 1 = {least}", slots)
    length = no_positions(batch)
    return WindowCache(
        length=length,
        positions=jnp.full((batch, slots), -1, jnp.int32),
        forgotten=jnp.zeros((batch,), jnp.bool_),
        left=left,
        **storage(layers, (batch, slots), K, H, Hv, dtype),
    )
