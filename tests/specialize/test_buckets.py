"""Shape buckets against brute force over every choice of bounds, in exact fractions, and against hand examples."""

from collections import Counter
from fractions import Fraction as F
from itertools import combinations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from flashspec.specialize import (
    ShapeBuckets,
    bucket_tradeoff,
    expected_extra_area,
    expected_padding,
    optimal_buckets,
)

COSTS = {
    "linear": lambda bound, length: bound - length,
    "quadratic": lambda bound, length: bound**2 - length**2,
}


def expected_cost(lengths, bounds, cost):
    """E[cost(b(T), T)] by the definition, length by length."""
    cost = COSTS.get(cost, cost)
    return sum(F(cost(min(b for b in bounds if b >= t), t)) for t in lengths) / len(lengths)


def every_choice(lengths, most, multiple_of):
    """All sets of at most `most` bounds, multiples of `multiple_of`, whose last covers every length."""
    last = -(-max(lengths) // multiple_of) * multiple_of
    below = range(multiple_of, last, multiple_of)
    return [(*chosen, last) for size in range(most) for chosen in combinations(below, size)]


def best_choice(lengths, most, cost, multiple_of=1):
    """The cheapest choice; on ties the fewest buckets, then the smaller bounds, the largest compared first."""
    choices = every_choice(lengths, most, multiple_of)
    return min(choices, key=lambda c: (expected_cost(lengths, c, cost), len(c), c[::-1]))


def assert_optimal(bounds, lengths, most, cost, multiple_of=1):
    """The one claim that the right rule meets and the wrong ones below do not."""
    best = best_choice(lengths, most, cost, multiple_of)
    assert expected_cost(lengths, bounds, cost) == expected_cost(lengths, best, cost)
    assert len(bounds) == len(best) <= most
    assert all(bound % multiple_of == 0 for bound in bounds)


def steps(bound, length):
    """A callable of its own: tiles of four, and half a unit for every padded position."""
    return F(-(-bound // 4)) + F(bound - length, 2)


small = st.lists(st.integers(1, 11), min_size=1, max_size=8)


@pytest.mark.parametrize("cost", ["linear", "quadratic", steps])
@hypothesis.given(lengths=small, most=st.integers(1, 4), multiple_of=st.integers(1, 4))
@hypothesis.settings(max_examples=60, deadline=None)
def test_optimal_buckets_are_the_best_of_all_choices(cost, lengths, most, multiple_of):
    bounds = optimal_buckets(lengths, most, cost, multiple_of=multiple_of).bounds
    assert_optimal(bounds, lengths, most, cost, multiple_of)
    assert bounds == best_choice(lengths, most, cost, multiple_of)


@pytest.mark.parametrize("cost", ["linear", "quadratic", steps])
@hypothesis.given(lengths=small, most=st.integers(1, 4), multiple_of=st.integers(1, 4))
@hypothesis.settings(max_examples=30, deadline=None)
def test_tradeoff_is_the_least_cost_for_each_number(cost, lengths, most, multiple_of):
    curve = bucket_tradeoff(lengths, most, cost, multiple_of=multiple_of)
    distinct = len({-(-t // multiple_of) for t in lengths})
    assert [number for number, _ in curve] == list(range(1, min(most, distinct) + 1))
    for number, least in curve:
        best = best_choice(lengths, number, cost, multiple_of)
        assert isinstance(least, F)
        assert least == expected_cost(lengths, best, cost)


def equal_width(lengths, most, cost):
    """WRONG: buckets of one width."""
    last = max(lengths)
    return tuple(-(-last * k // most) for k in range(1, most + 1))


def powers_of_two(lengths, most, cost):
    """WRONG: the largest powers of two that are needed."""
    last = (max(lengths) - 1).bit_length()
    return tuple(2**k for k in range(max(0, last - most + 1), last + 1))


def always_linear(lengths, most, cost):
    """WRONG: the padding is minimised whatever was asked."""
    return optimal_buckets(lengths, most, "linear").bounds


def greedy(lengths, most, cost):
    """WRONG: each bound is the best one to add to those before, and none is taken back."""
    chosen = [max(lengths)]
    while len(chosen) < most:
        chosen.append(min(sorted(set(lengths)), key=lambda b: expected_cost(lengths, [*chosen, b], cost)))
    return tuple(sorted(chosen))


def all_of_them(lengths, most, cost):
    """WRONG: the best choice, with a bucket that saves nothing added to it."""
    best = optimal_buckets(lengths, most, cost).bounds
    return tuple(sorted({*best, min(set(range(1, best[-1])) - set(best))}))


SKEWED = [3] * 7 + [5] * 6 + [9] * 4 + [20] * 2 + [64]
FAR_APART = [1, 6, 10]  # padding: (1, 10) costs 4 and (6, 10) costs 5; area: 64 and 35
NESTED = [1, 2, 3, 4, 7]  # the best two bounds are (4, 7) or (3, 7), the best three (2, 4, 7)
ALL_EQUAL = [4] * 4


@pytest.mark.parametrize(
    ("wrong", "lengths", "most", "cost"),
    [
        (equal_width, SKEWED, 3, "linear"),
        (equal_width, SKEWED, 3, "quadratic"),
        (powers_of_two, SKEWED, 3, "linear"),
        (powers_of_two, SKEWED, 3, "quadratic"),
        (always_linear, FAR_APART, 2, "quadratic"),
        (greedy, NESTED, 3, "linear"),
        (all_of_them, ALL_EQUAL, 3, "linear"),
    ],
)
def test_wrong_rules_are_rejected(wrong, lengths, most, cost):
    assert_optimal(optimal_buckets(lengths, most, cost).bounds, lengths, most, cost)
    with pytest.raises(AssertionError):
        assert_optimal(wrong(lengths, most, cost), lengths, most, cost)


def test_fewest_buckets_on_ties():
    assert optimal_buckets([4, 4, 8], 5).bounds == (4, 8)
    assert optimal_buckets([5, 6, 7, 8], 4, multiple_of=8).bounds == (8,)
    assert optimal_buckets([1, 2, 3], 3, lambda bound, length: 1).bounds == (3,)
    assert bucket_tradeoff([1, 2, 3], 3, lambda bound, length: 1) == [(1, 1), (2, 1), (3, 1)]


def test_float_costs_tie_exactly():
    """Three prices served in one bucket or in two: added as floats, the second seems to gain the last bit."""
    prices = {(2, 1): 0.1, (2, 2): 0.2, (1, 1): 0.1, (3, 1): 0.1, (3, 2): 0.2, (3, 3): 0.3}
    assert (0.1 + 0.2) + 0.3 > 0.1 + (0.2 + 0.3)
    assert bucket_tradeoff([1, 2, 3], 3, lambda *pair: prices[pair]) == [(n, F(1, 5)) for n in (1, 2, 3)]
    assert optimal_buckets([1, 2, 3], 3, lambda *pair: prices[pair]).bounds == (3,)


def test_hand_example():
    """Lengths 1, 6, 10: the padding asks for (1, 10), the area for (6, 10)."""
    lengths = {1: 1, 6: 1, 10: 1}
    linear, quadratic = optimal_buckets(lengths, 2), optimal_buckets(lengths, 2, "quadratic")
    assert (linear.bounds, quadratic.bounds) == ((1, 10), (6, 10))
    assert [expected_padding(lengths, b) for b in (linear, quadratic)] == [F(4, 3), F(5, 3)]
    assert [expected_extra_area(lengths, b) for b in (linear, quadratic)] == [F(64, 3), F(35, 3)]
    assert bucket_tradeoff(lengths, 9) == [(1, F(13, 3)), (2, F(4, 3)), (3, 0)]
    assert bucket_tradeoff(lengths, 9, "quadratic") == [(1, F(163, 3)), (2, F(35, 3)), (3, 0)]


def test_the_extra_area_is_not_told_by_the_padding():
    """Equal padding, unequal area; and the square of the mean padding is neither."""
    short, long, buckets = [1, 3], [9, 11], ShapeBuckets((3, 11))
    assert expected_padding(short, buckets) == expected_padding(long, buckets) == 1
    assert expected_extra_area(short, buckets) == 4
    assert expected_extra_area(long, buckets) == 20
    assert expected_padding(long, buckets) ** 2 != expected_extra_area(long, buckets)


@hypothesis.given(lengths=small)
def test_lengths_are_counted_alike_from_lists_arrays_and_mappings(lengths):
    buckets, counts = optimal_buckets(lengths, 2), Counter(lengths)
    assert buckets == optimal_buckets(np.array(lengths), 2) == optimal_buckets(counts, 2)
    assert buckets == optimal_buckets({length: 3 * count for length, count in counts.items()}, 2)
    assert expected_padding(lengths, buckets) == expected_padding(counts, buckets)
    assert all(isinstance(f(np.array(lengths), buckets), F) for f in (expected_padding, expected_extra_area))


def test_counts_weigh_and_a_count_of_zero_only_covers():
    assert optimal_buckets({1: 1, 2: 100, 3: 1, 4: 1}, 2).bounds == (2, 4)
    assert optimal_buckets({1: 100, 2: 1, 3: 1, 4: 1}, 2).bounds == (1, 4)
    assert optimal_buckets({5: 2, 4096: 0}, 1).bounds == (4096,)
    assert bucket_tradeoff({5: 2, 4096: 0}, 2) == [(1, 4091), (2, 0)]


def test_large_sums_do_not_overflow():
    far = 10**12
    assert bucket_tradeoff({1: far, far: 1}, 1, "quadratic") == [(1, F(far * (far**2 - 1), far + 1))]


def test_bucket_of_is_the_smallest_that_holds_the_length():
    buckets = ShapeBuckets((2, 5, 9))
    assert [buckets.bucket_of(length) for length in range(1, 10)] == [2, 2, 5, 5, 5, 9, 9, 9, 9]
    assert buckets.bucket_of(np.int32(5)) == 5


def test_buckets_are_frozen_values():
    buckets = ShapeBuckets((2, 5))
    assert buckets == ShapeBuckets([2, np.int64(5)]) == ShapeBuckets(np.array([2, 5]))
    assert {buckets: 1}[ShapeBuckets((2, 5))] == 1
    assert buckets != ShapeBuckets((2, 6))
    with pytest.raises(AttributeError):
        buckets.bounds = (1,)


@pytest.mark.parametrize("bounds", [(), (2, 2), (5, 2), (0, 2), (-1,), (1.5,), (True, 2), ((1, 2),), 4, "24"])
def test_illegal_bounds(bounds):
    with pytest.raises(ValueError, match="`bounds`"):
        ShapeBuckets(bounds)


@pytest.mark.parametrize("length", [0, -1, 10])
def test_a_length_outside_of_the_buckets(length):
    buckets = ShapeBuckets((2, 9))
    with pytest.raises(ValueError, match="`length`"):
        buckets.bucket_of(length)


@pytest.mark.parametrize("mean", [expected_padding, expected_extra_area])
def test_a_mean_over_lengths_that_no_bucket_serves(mean):
    with pytest.raises(ValueError, match=r"`length`: expected at most 9, .* got 10"):
        mean([3, 10], ShapeBuckets((2, 9)))
    with pytest.raises(ValueError, match="`lengths`"):
        mean([], ShapeBuckets((2, 9)))


@pytest.mark.parametrize("function", [optimal_buckets, bucket_tradeoff])
@pytest.mark.parametrize(
    ("arguments", "options", "name"),
    [
        (([], 1), {}, "lengths"),
        (({}, 1), {}, "lengths"),
        (({3: 0}, 1), {}, "lengths"),
        (({3: -1, 4: 2}, 1), {}, "lengths"),
        (([0, 3], 1), {}, "lengths"),
        ((np.array([1.5]), 1), {}, "lengths"),
        ((np.array([[1, 2]]), 1), {}, "lengths"),
        (([3], 0), {}, "max_buckets"),
        (([3], 1, "cubic"), {}, "cost"),
        (([3], 1, lambda bound, length: -1), {}, "cost"),
        (([3], 1, lambda bound, length: float("nan")), {}, "cost"),
        (([3], 1, lambda bound, length: float("inf")), {}, "cost"),
        (([3], 1), {"multiple_of": 0}, "multiple_of"),
    ],
)
def test_illegal_arguments(function, arguments, options, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        function(*arguments, **options)
