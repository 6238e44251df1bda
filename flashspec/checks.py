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


def floating(name: str, array: Any) -> jnp.dtype:
    """Check that `array` has a floating dtype, and return it."""
    dtype = jnp.result_type(array)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise fail(name, "a floating dtype", dtype)
    return dtype


def integer(name: str, array: Any) -> jnp.dtype:
    """Check that `array` has an integer dtype (bool is none), and return it."""
    dtype = jnp.result_type(array)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise fail(name, "an integer dtype", dtype)
    return dtype


def boolean(name: str, array: Any) -> None:
    """Check that `array` has dtype bool."""
    dtype = jnp.result_type(array)
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
