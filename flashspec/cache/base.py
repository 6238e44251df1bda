"""What every cache is: per-layer keys and values, one length per row, and four small methods that differ by layout.

The free functions in `operations.py` are the public way in; they own what the layouts share.
"""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from flashspec import checks
from flashspec.attention.views import View


@dataclasses.dataclass(frozen=True)
class Cache(abc.ABC):
    """The state that the cache operations carry; an immutable pytree.

    Args:
      key: one array a layer, [rows or pages, slots, K, H]. Layers are never stacked: a slice of a stack is a copy.
      value: one array a layer, [rows or pages, slots, K, Hv].
      length: [B] int32, the logical positions of each row, written or dropped.
    """

    key: tuple[Array, ...]
    value: tuple[Array, ...]
    length: Array

    @property
    @abc.abstractmethod
    def overflow(self) -> Array:
        """[B] bool: the row has lost a position that a later query may see, so nothing computed from it is exact."""

    @abc.abstractmethod
    def reserve(self, num_valid: Array) -> "Cache":
        """Advance `length` by `num_valid` [B], and make room for the new positions."""

    @abc.abstractmethod
    def locate(self, positions: Array) -> tuple[Array, Array]:
        """Indices into the first two axes of the storage for positions [B, T]; past the end for what is not held."""

    @abc.abstractmethod
    def truncate(self, length: Array) -> "Cache":
        """Forget every position from `length` [B] on; the caller has made sure that no row grows."""

    @abc.abstractmethod
    def view(self, layer: int) -> View:
        """What attention reads of one layer."""


def storage(layers: int, shape: tuple[int, int], K: int, H: int, Hv: int | None, dtype: Any) -> dict[str, Any]:
    """Zeroed `key` and `value` of `layers` layers, [*shape, K, H] and [*shape, K, Hv].

    Raises:
      ValueError: a size below 1, or a dtype that is not floating.
    """
    checks.at_least("layers", layers, 1)
    checks.at_least("K", K, 1)
    checks.at_least("H", H, 1)
    value_size = H if Hv is None else checks.at_least("Hv", Hv, 1)
    dtype = checks.floating("dtype", dtype)
    return {
        "key": tuple(jnp.zeros((*shape, K, H), dtype) for _ in range(layers)),
        "value": tuple(jnp.zeros((*shape, K, value_size), dtype) for _ in range(layers)),
    }


def no_positions(batch: int) -> Array:
    """The lengths of `batch` empty rows."""
    return jnp.zeros((checks.at_least("batch", batch, 1),), jnp.int32)


def row_index(batch: int, width: int) -> Array:
    """[B, T] int32: the row of each entry."""
    return jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], (batch, width))
