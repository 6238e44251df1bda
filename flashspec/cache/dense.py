"""A dense cache: slot s of a row holds logical position s."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flashspec import checks
from flashspec.attention.views import DenseView
from flashspec.cache.base import Cache, no_positions, row_index, storage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache(Cache):
    """Storage is [B, capacity, K, H] a layer. Writes past the capacity are dropped; `length` still counts them."""

    @property
    def overflow(self) -> Array:
        return self.length > self.key[0].shape[1]

    def reserve(self, num_valid: Array) -> "DenseCache":
        return dataclasses.replace(self, length=self.length + num_valid)

    def locate(self, positions: Array) -> tuple[Array, Array]:
        return row_index(*positions.shape), positions

    def truncate(self, length: Array) -> "DenseCache":
        return dataclasses.replace(self, length=length)

    def view(self, layer: int) -> DenseView:
        return DenseView(self.key[layer], self.value[layer], self.length)


def dense_cache(
    layers: int, batch: int, capacity: int, K: int, H: int, Hv: int | None = None, dtype: Any = jnp.float32
) -> DenseCache:
    """An empty dense cache of `capacity` positions a row.

    Args:
      layers: decoder layers, each with its own arrays.
      batch: B rows.
      capacity: positions that a row can hold.
      K: key/value heads.
      H: key head size.
      Hv: value head size; H when None.
      dtype: of keys and values.

    Returns:
      A `DenseCache` whose arrays are [B, capacity, K, H] and [B, capacity, K, Hv] in every layer.

    Raises:
      ValueError: a size below 1, or a dtype that is not floating.
    """
    checks.at_least("capacity", capacity, 1)
    return DenseCache(length=no_positions(batch), **storage(layers, (batch, capacity), K, H, Hv, dtype))
