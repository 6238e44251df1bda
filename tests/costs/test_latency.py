"""Eqs. 33.1, 33.9 and 33.16 and the ratio of sums, against the chapter's numbers as exact fractions."""

import math
from fractions import Fraction as F

import pytest

from flashspec import costs


@pytest.mark.parametrize(
    ("fraction", "speedup", "expected"),
    [(F(2, 5), 4, F(10, 7)), (F(1, 5), 10, F(50, 41)), (F(1, 5), math.inf, F(5, 4)), (F(0), 3, 1), (F(1), 3, 3)],
)
def test_amdahl_speedup(fraction, speedup, expected):
    assert costs.amdahl_speedup(fraction, speedup) == expected
    assert math.isclose(costs.amdahl_speedup(float(fraction), speedup), expected)
    dividing_the_rest = 1 / (fraction + (1 - fraction) / F(speedup)) if speedup != math.inf else None
    assert dividing_the_rest != expected or fraction in (0, 1)


def test_amdahl_speedup_keeps_integers_exact_and_charges_overhead():
    assert costs.amdahl_speedup(1, 3) == 3
    assert costs.amdahl_speedup(F(2, 5), 4, overhead=F(3, 10)) == 1
    assert costs.amdahl_speedup(F(2, 5), 4, overhead=F(1, 2)) < 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((-0.1, 2), "fraction"), ((1.1, 2), "fraction"), ((math.nan, 2), "fraction"), ((0.5, 0), "speedup"),
     ((0.5, math.nan), "speedup"), ((0.5, 2, -1), "overhead"), ((1, math.inf), "speedup")],
)  # fmt: skip
def test_amdahl_speedup_refuses(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        costs.amdahl_speedup(*arguments)


@pytest.mark.parametrize("unit", [F, float], ids=["fractions", "floats"])
def test_break_even_is_strict(unit):
    seconds = (unit(3), unit(F(2, 1000)), unit(F(15, 10000)))
    assert costs.break_even_calls(*seconds) == 6001
    assert costs.pays_off(seconds[0], 6001, *seconds[1:])
    assert not costs.pays_off(seconds[0], 6000, *seconds[1:])
    assert costs.net_benefit(F(3), 6000, F(2, 1000), F(15, 10000)) == 0


def test_break_even_without_a_gain_never_comes():
    assert costs.break_even_calls(3, 1, 1) == costs.break_even_calls(3, 1, 2) == math.inf
    assert not costs.pays_off(0, 10, 1, 1)
    assert costs.break_even_calls(0, 2, 1) == 1


def test_net_benefit_of_three_shapes():
    shapes = [(F(2), 1000, F(3, 1000)), (F(10), 100, F(50, 1000)), (F(1), 20, F(10, 1000))]
    benefit = [costs.net_benefit(compile_time, calls, gain, 0) for compile_time, calls, gain in shapes]
    assert benefit == [1, -5, F(-4, 5)]
    assert [costs.pays_off(compile_time, calls, gain, 0) for compile_time, calls, gain in shapes] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((-1, 1, 2, 1), "compile_time"), ((1, -1, 2, 1), "calls"), ((1, 1, -2, 1), "time_before"),
     ((1, 1, 2, math.nan), "time_after"), ((math.inf, 1, 2, 1), "compile_time")],
)  # fmt: skip
def test_net_benefit_refuses(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        costs.net_benefit(*arguments)


def test_time_per_token_is_a_ratio_of_sums():
    assert costs.time_per_token([12, 12], [1, 5]) == 4
    mean_of_ratios = (F(12, 1) + F(12, 5)) / 2
    assert mean_of_ratios == F(36, 5) != costs.time_per_token([12, 12], [1, 5])


def test_time_per_token_chooses_the_first_of_two_schemes():
    assert costs.time_per_token([12], [3]) == 4
    assert costs.time_per_token([20], [4]) == 5


@pytest.mark.parametrize(
    ("times", "tokens", "name"),
    [([1], [1, 2], "tokens"), ([-1], [1], "times"), ([1], [-1], "tokens"), ([1, 1], [0, 0], "sum of tokens")],
)
def test_time_per_token_refuses(times, tokens, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        costs.time_per_token(times, tokens)


def window_error(kept: F, dropped: F, mass: F) -> F:
    return abs((1 - mass) * kept + mass * dropped - kept)


def test_window_error_bound_is_tight_and_no_smaller_bound_holds():
    error = window_error(F(1), F(-1), F(1, 4))
    assert costs.window_error_bound(F(1, 4), 1) == error == F(1, 2)
    one_sided = F(1, 4) * 1
    assert not error <= one_sided


def test_window_error_bound_makes_no_claim_at_mass_one():
    with pytest.raises(ValueError, match="no bound"):
        costs.window_error_bound(1, 1)
    with pytest.raises(ValueError, match="dropped_mass"):
        costs.window_error_bound(-F(1, 2), 1)
    with pytest.raises(ValueError, match="value_norm"):
        costs.window_error_bound(F(1, 2), -1)
    assert costs.window_error_bound(0, 7) == 0
