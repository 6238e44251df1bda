"""Eq. 33.16 with the mass that it needs, against attention computed row by row in exact fractions."""

from fractions import Fraction as F

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from flashspec import costs


def average(weights, values):
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def assert_mass(rule):
    """Weights 1, 3, 4 of which the last two are kept: 1/8 is dropped, of the keys a third."""
    assert rule([F(1), F(3), F(4)], [False, True, True]) == F(1, 8)


def share_of_keys(weights, kept):
    """WRONG: every key counts alike."""
    return F(kept.count(False), len(kept))


def over_what_is_kept(weights, kept):
    """WRONG: relative to the kept mass."""
    return sum(w for w, k in zip(weights, kept, strict=True) if not k) / sum(
        w for w, k in zip(weights, kept, strict=True) if k
    )


def test_the_mass_is_the_attention_on_the_dropped_keys():
    assert_mass(costs.dropped_mass)
    for wrong in (share_of_keys, over_what_is_kept):
        with pytest.raises(AssertionError):
            assert_mass(wrong)


def test_far_away_does_not_mean_little_mass():
    """The farthest of 100 keys may hold nearly all of it."""
    weights = np.r_[99.0, np.full(99, 1 / 99)]
    kept = np.arange(100) > 0
    assert costs.dropped_mass(weights, kept) == pytest.approx(0.99)


def test_rows_are_taken_one_by_one():
    weights = np.array([[[1.0, 1.0], [1.0, 3.0]]])
    np.testing.assert_allclose(costs.dropped_mass(weights, np.array([False, True])), [[0.5, 0.25]])
    bound = costs.window_error_bound(costs.dropped_mass(weights, np.array([False, True])), np.array([[1.0, 2.0]]))
    np.testing.assert_allclose(bound, [[1.0, 1.0]])


rows = st.lists(st.tuples(st.integers(1, 9), st.integers(-5, 5), st.booleans()), min_size=1, max_size=6)


@hypothesis.given(row=rows)
def test_the_bound_holds_for_every_row(row):
    weights, values, kept = ([part[i] for part in row] for i in range(3))
    hypothesis.assume(any(kept))
    mass = costs.dropped_mass([F(w) for w in weights], kept)
    rest = [(F(w), F(v)) for w, v, k in row if k]
    error = abs(average([F(w) for w in weights], values) - average(*zip(*rest, strict=True)))
    assert error <= costs.window_error_bound(mass, max(map(abs, values)))


def test_nothing_is_dropped_where_everything_is_kept():
    assert costs.dropped_mass([F(1), F(2)], [True, True]) == 0


def test_no_claim_is_made_at_mass_one():
    mass = costs.dropped_mass([F(1), F(2)], [False, False])
    assert mass == 1
    with pytest.raises(ValueError, match="no bound"):
        costs.window_error_bound(mass, 1)
    with pytest.raises(ValueError, match="no bound"):
        costs.window_error_bound(np.array([0.5, 1.0]), 1)


@pytest.mark.parametrize(
    ("weights", "kept", "name"),
    [
        ([1.0, -1.0], [True, True], "weights"),
        ([1.0, np.nan], [True, True], "weights"),
        ([1.0, np.inf], [True, True], "weights"),
        ([0.0, 0.0], [True, False], "weights"),
        ([1.0, 1.0], [1, 0], "kept"),
        ([1.0, 1.0], [[True, False]], "kept"),
        (1.0, True, "kept"),
    ],
)
def test_what_is_no_attention_is_refused(weights, kept, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        costs.dropped_mass(weights, kept)
