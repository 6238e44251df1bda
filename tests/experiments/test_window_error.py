"""The parts of the experiment on windows: the rows that it measures, and a bound that could fail."""

import numpy as np
import pytest

from experiments.window_error import Heads, Rows, holds, loss, rows_of, tight_case


def uniform(values):
    """One head with equal scores over these values."""
    zeros = np.zeros((1, len(values), 1, 1))
    return Heads(zeros, zeros, np.asarray(values, np.float64).reshape(1, -1, 1, 1))


def assert_rows(left):
    """Values 4, 0, 2: the last row's mean is 2; the nearest two keep 2/3 of its mass, and their mean is 1."""
    rows = rows_of(uniform([4.0, 0.0, 2.0]), left)
    np.testing.assert_allclose(rows.mass[0, 0], [0, 0, 1 / 3])
    np.testing.assert_allclose(rows.bound[0, 0], [0, 0, 2 / 3])
    np.testing.assert_allclose(rows.error[0, 0], [0, 0, 1 / 4], atol=1e-12)


def test_a_window_keeps_the_position_and_those_before_it():
    assert_rows(left=1)
    for wrong in (0, 2):
        with pytest.raises(AssertionError):
            assert_rows(left=wrong)


def test_the_bound_can_fail():
    assert holds(tight_case())
    assert not holds(tight_case(), factor=1.9)
    assert not holds(Rows(np.array([0.1]), np.array([0.2]), np.array([0.3])))


def test_no_claim_is_made_where_all_the_mass_is_dropped():
    far = Heads(np.full((1, 2, 1, 1), 50.0), np.array([50.0, 0.0]).reshape(1, 2, 1, 1), np.ones((1, 2, 1, 1)))
    rows = rows_of(far, left=0)
    assert rows.mass[0, 0, 1] == 1
    assert rows.bound[0, 0, 1] == np.inf


def test_the_loss_is_of_the_next_token():
    logits = np.log(np.array([[[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]]))
    assert loss(logits, np.array([[1, 0, 1]])) == pytest.approx(-(np.log(0.5) + np.log(0.1)) / 2)
