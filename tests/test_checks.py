"""Checks of arguments that are wrong in kind, which annotations would refuse first in these tests."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec import checks


@pytest.mark.parametrize("value", ["x", None, object(), {1: 2}])
def test_what_is_no_array(value: Any) -> None:
    with pytest.raises(ValueError, match="`a`: expected an array, got"):
        checks.array("a", value)


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (np.array([2**31 - 1, -(2**31)]), True),
        (np.array([2**31]), False),
        (np.array([2**32 - 1], np.uint64), True),
        (np.array([2**32], np.uint64), False),
        (np.array([1e38, np.inf, -np.inf, np.nan]), True),
        (np.array([1e39]), False),
        (np.array([], np.int64), True),
    ],
)
def test_values_that_32_bits_hold(value: np.ndarray, fits: bool) -> None:
    if fits:
        np.testing.assert_array_equal(checks.array("a", value), value.astype(jnp.asarray(value).dtype))
    else:
        with pytest.raises(ValueError, match=r"`a`: expected values that fit .*32 unless jax_enable_x64 is set"):
            checks.array("a", value)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(checks.array("a", value), value)


def test_flags() -> None:
    assert checks.flag("f", np.bool_(True)) is True
    for wrong in (1, None, "no", jnp.array(True)):
        with pytest.raises(ValueError, match="`f`: expected True or False, static under jit"):
            checks.flag("f", wrong)


def test_broadcastable() -> None:
    checks.broadcastable("a", np.zeros((1, 3)), "B T", (2, 3))
    for wrong in ((3,), (2, 2), (2, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"`a`: expected rank 2, broadcastable to \[B, T\] = \[2, 3\]"):
            checks.broadcastable("a", np.zeros(wrong), "B T", (2, 3))
