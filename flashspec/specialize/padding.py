"""Padding of the operands of one call up to a bucket's bound, and the way back.

Both go through the host. On the device every length would be a program of its own, if only a copy, and a length that
was never seen would compile; the price is that padded operands and results cross to the host and back.
"""

from typing import Any

import jax
import numpy as np

from flashspec.checks import fail

type Axes = Any  # a pytree prefix of int or None, as `jax.vmap` takes it
type Tree = Any


def axis_of_each_leaf(name: str, axes: Axes, tree: Tree) -> list[int | None]:
    """The axis of each leaf of `tree`, from a prefix of int and None.

    Raises:
      ValueError: the prefix does not fit the tree, or holds something else.
    """
    flat: list[int | None] = []

    def extend(axis: Any, subtree: Tree) -> None:
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise fail(name, "integers and None", repr(axis))
        flat.extend(axis for _ in jax.tree.leaves(subtree))

    try:
        jax.tree.map(extend, axes, tree, is_leaf=lambda axis: axis is None)
    except (ValueError, TypeError, KeyError) as error:
        raise fail(name, "a pytree prefix of integers and None that fits", f"{axes} ({error})") from error
    return flat


def from_left(name: str, axis: int, shape: tuple[int, ...]) -> int:
    """A non-negative axis; ValueError where the array has none of that number."""
    if not -len(shape) <= axis < len(shape):
        raise fail(name, f"an array with an axis {axis}", f"shape {list(shape)}")
    return axis % len(shape)


def common_length(sizes: dict[str, int]) -> int:
    """The one length of all padded axes, by the names of the leaves.

    Raises:
      ValueError: there is no padded axis, or they differ.
    """
    if not sizes:
        raise fail("in_axes", "at least one argument with a padded axis", "None for every argument")
    if len(set(sizes.values())) > 1:
        raise fail("in_axes", "padded axes of one length", ", ".join(f"{name}: {size}" for name, size in sizes.items()))
    return next(iter(sizes.values()))


def pad(name: str, leaf: Any, axis: int, bound: int, fill: Any = 0) -> Any:
    """The leaf with `fill` after its end along the axis, up to the bound, placed as the leaf was."""
    missing = bound - leaf.shape[axis]
    if not missing:
        return leaf
    widths = [(0, missing if position == axis else 0) for position in range(np.ndim(leaf))]
    padded = np.pad(on_host(name, leaf), widths, constant_values=fill)
    return jax.device_put(padded, leaf.sharding) if is_placed(leaf) else padded


def cut(name: str, leaf: jax.Array, axis: int, length: int) -> jax.Array:
    """The first `length` of the leaf along the axis."""
    if leaf.shape[axis] == length:
        return leaf
    kept = on_host(name, leaf)[(slice(None),) * axis + (slice(length),)]
    return jax.device_put(kept, leaf.sharding if is_placed(leaf) else None)


def is_placed(leaf: Any) -> bool:
    """Whether someone said on which devices the array lies."""
    return isinstance(leaf, jax.Array) and leaf.committed


def on_host(name: str, leaf: Any) -> np.ndarray:
    """The values as numpy has them; ValueError for what has none, such as typed keys."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise fail(name, "an array of numbers along a padded axis", leaf.dtype)
    return np.asarray(leaf)


def poisons(dtype: Any) -> tuple[Any, ...]:
    """What padding may hold that would show: values that spread through sums, maxima and look-ups."""
    if dtype == np.bool_:
        return (True,)
    if jax.dtypes.issubdtype(dtype, np.integer):
        limits = jax.numpy.iinfo(dtype)
        return int(limits.max), int(limits.min), 1
    largest = float(jax.numpy.finfo(dtype).max)
    return np.nan, np.inf, -largest


def bits(leaf: Any) -> bytes:
    """All bits of an array, NaN's included."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()
