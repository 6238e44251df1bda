"""The bound of section 33.1: the maximum of two times, and what stands apart from it."""

import math
from fractions import Fraction as F

import pytest

from flashspec import costs
from flashspec.devices import device_facts

RATES = costs.Rates(flops=100, bandwidth=10, launch_s=F(1, 2), source="an example")


def assert_bound(rule):
    """300 operations and 20 bytes at 100 and 10 a second: 3 s and 2 s, which overlap."""
    assert rule(300, 20) == 3
    assert rule(100, 20) == 2


def added_up(flops, moved):
    """WRONG: nothing overlaps."""
    result = costs.roofline(flops, moved, RATES)
    return result.compute_s + result.memory_s


def operations_alone(flops, moved):
    """WRONG: operations are all that counts."""
    return costs.roofline(flops, moved, RATES).compute_s


def test_the_bound_is_the_maximum():
    assert_bound(lambda flops, moved: costs.roofline(flops, moved, RATES).lower_bound_s)
    for wrong in (added_up, operations_alone):
        with pytest.raises(AssertionError):
            assert_bound(wrong)


def test_exact_numbers_stay_exact():
    assert costs.roofline(1, 1, RATES).lower_bound_s == F(1, 10)
    assert costs.roofline(1, 0, costs.Rates(3, 7, 0, "x")).compute_s == F(1, 3)


@pytest.mark.parametrize(
    ("flops", "moved", "launches", "expected"),
    [
        (300, 20, 1, "compute"),
        (100, 20, 1, "memory"),
        (1, 1, 1, "launch"),
        (300, 20, 7, "launch"),
        (300, 20, 0, "compute"),
    ],
)
def test_each_result_is_classed(flops, moved, launches, expected):
    result = costs.roofline(flops, moved, RATES, launches=launches)
    assert result.bound_by == expected
    assert result.lower_bound_s == max(F(flops, 100), F(moved, 10)), "launches are no part of the lower bound"


def test_rates_come_from_the_data_sheet_of_the_dtype():
    facts = device_facts("NVIDIA H200")
    half, single = (costs.sourced_rates(facts, itemsize) for itemsize in (2, 4))
    assert (half.flops, single.flops, half.bandwidth) == (989.5e12, 67e12, 4.8e12)
    assert "H200" in half.source
    # A product of 8192 rows with 4096 x 14336 in bfloat16 is bound by operations, one of 16 rows by memory.
    large, small = (
        costs.roofline(2 * n * 4096 * 14336, 2 * (n * 4096 + 4096 * 14336 + n * 14336), half) for n in (8192, 16)
    )
    assert (large.bound_by, small.bound_by) == ("compute", "memory")


def test_a_sheet_bounds_by_the_rates_that_it_gives():
    h200, v5e, nothing = map(device_facts, ("NVIDIA H200", "TPU v5e", "cpu"))
    assert costs.sheet_bound_s(989.5e12, 1, h200, 2) == 1
    assert costs.sheet_bound_s(1, 4.8e12, h200, 2) == 1
    assert costs.sheet_bound_s(989.5e12, 4.8e12, h200, 8) == 1, "no rate for eight bytes: transfers alone"
    assert v5e.f32_flops is None
    assert costs.sheet_bound_s(1e30, v5e.memory_bandwidth, v5e, 4) == 1
    assert costs.sheet_bound_s(1, 1, nothing, 4) is None


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: costs.roofline(-1, 1, RATES), "flops"),
        (lambda: costs.roofline(1, math.nan, RATES), "bytes_moved"),
        (lambda: costs.roofline(1, 1, RATES, launches=-1), "launches"),
        (lambda: costs.Rates(0, 1, 0, "x"), "flops"),
        (lambda: costs.Rates(1, math.inf, 0, "x"), "bandwidth"),
        (lambda: costs.Rates(1, 1, -1, "x"), "launch_s"),
        (lambda: costs.Rates(1, 1, 0, ""), "source"),
        (lambda: costs.sourced_rates(device_facts("cpu"), 4), "facts"),
        (lambda: costs.sourced_rates(device_facts("NVIDIA H200"), 8), "itemsize"),
        (lambda: costs.sourced_rates(device_facts("TPU v5e"), 4), "facts"),
    ],
)
def test_impossible_numbers_are_refused(call, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        call()
