"""Checks of arguments: one message form, "`name`: expected X, got Y", and no assert on a user's input.

Shapes and dtypes are static under `jax.jit`, so these run at trace time and cost nothing afterwards. Checks of *values*
apply only to concrete arrays; `is_concrete` says whether one can be looked at.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def fail(name: str, expected: str, got: object) -> ValueError:
    """The ValueError for argument `name`, to be raised by the caller."""
    return ValueError(f"`{name}`: expected {expected}, got {got}")


def is_concrete(value: Any) -> bool:
    """Whether the value of `value` can be read now (it is not a tracer and not a shape)."""
    return not isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct)


def shape(name: str, array: Any, dims: str, sizes: dict[str, int] | None = None) -> dict[str, int]:
    """Check the shape of `array` against space-separated dimension names, and bind the names that are new.

    Args:
      name: the argument's name, for the message.
      array: anything with a `.shape`.
      dims: names such as "B T N H"; an integer literal stands for itself, "_" matches any size.
      sizes: sizes bound so far; not changed.

    Returns:
      `sizes` with the names of `dims` added.

    Raises:
      ValueError: the rank or a bound size differs.
    """
    bound = dict(sizes or {})
    names = dims.split()
    got = tuple(np.shape(array))
    if len(got) != len(names):
        raise fail(name, f"rank {len(names)} with shape [{', '.join(names)}]", f"shape {list(got)}")
    for axis, (dim, size) in enumerate(zip(names, got, strict=True)):
        if dim == "_":
            continue
        want = int(dim) if dim.isdigit() else bound.setdefault(dim, size)
        if want != size:
            raise fail(name, f"shape [{', '.join(names)}] with {dim} = {want} on axis {axis}", f"shape {list(got)}")
    return bound


def array(name: str, value: Any) -> jax.Array:
    """`value` as a jax array.

    Raises:
      ValueError: it cannot be one, or it holds a number outside of the range of the 32 bits which jax would give it.
    """
    narrow = jax.dtypes.canonicalize_dtype(value.dtype) if isinstance(value, np.ndarray | np.generic) else None
    if narrow is not None and narrow != value.dtype and np.issubdtype(narrow, np.number):
        limits = np.iinfo(narrow) if np.issubdtype(narrow, np.integer) else np.finfo(narrow)
        finite = value[np.isfinite(value)]
        if np.any(finite < limits.min) or np.any(finite > limits.max):
            raise fail(name, f"values that fit {narrow} unless jax_enable_x64 is set", f"{value.dtype} values")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise fail(name, "an array", f"{type(value).__name__} ({error})") from error


def flag(name: str, value: Any) -> bool:
    """Check a static yes or no, and return it."""
    if not isinstance(value, bool | np.bool_):
        raise fail(name, "True or False, static under jit", type(value).__name__)
    return bool(value)


def broadcastable(name: str, array: Any, dims: str, sizes: Sequence[int]) -> None:
    """Check that `array` has one axis for each of `dims`, of its size or of size 1."""
    names, got = dims.split(), tuple(np.shape(array))
    if len(got) != len(names) or any(size not in (1, want) for size, want in zip(got, sizes, strict=True)):
        expected = f"rank {len(names)}, broadcastable to [{', '.join(names)}] = {list(sizes)}"
        raise fail(name, expected, f"shape {list(got)}")


def _dtype(name: str, array: Any) -> jnp.dtype:
    try:
        return jnp.result_type(array)
    except TypeError as neither:
        raise fail(name, "an array, a number or a dtype", type(array).__name__) from neither


def floating(name: str, array: Any) -> jnp.dtype:
    """Check that `array` has a floating dtype, and return it."""
    dtype = _dtype(name, array)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise fail(name, "a floating dtype", dtype)
    return dtype


def integer(name: str, array: Any) -> jnp.dtype:
    """Check that `array` has an integer dtype (bool is none), and return it."""
    dtype = _dtype(name, array)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise fail(name, "an integer dtype", dtype)
    return dtype


def boolean(name: str, array: Any) -> None:
    """Check that `array` has dtype bool."""
    dtype = _dtype(name, array)
    if dtype != jnp.bool_:
        raise fail(name, "dtype bool", dtype)


def at_least(name: str, value: Any, low: int) -> int:
    """Check a Python integer against a lower bound, and return it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise fail(name, f"an integer of at least {low}", repr(value))
    return int(value)


def one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that `value` is one of `choices`."""
    if value not in choices:
        raise fail(name, "one of " + ", ".join(map(repr, choices)), repr(value))
