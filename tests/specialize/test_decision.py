"""Which buckets to compile for: exercise 33.6 and what it leaves to be taken into account."""

import math
from fractions import Fraction as F

import pytest

from flashspec.specialize import should_precompile

# Exercise 33.6: (C, n, gain) of three buckets, in seconds.
BUCKETS = [(F(2), 1000, F(3, 1000)), (F(10), 100, F(50, 1000)), (F(1), 20, F(10, 1000))]


def assert_first_only(rule):
    assert [bool(rule(compile_time, calls, gain, 0)) for compile_time, calls, gain in BUCKETS] == [True, False, False]


def assert_strict(rule):
    assert rule(3, 6001, 0.002, 0.0015)
    assert not rule(3, 6000, 0.002, 0.0015)


def whenever_a_call_gets_faster(compile_time, calls, before, after):
    """WRONG: compilation is free."""
    return before > after


def at_break_even(compile_time, calls, before, after):
    """WRONG: breaking even is a gain."""
    return F(str(compile_time)) <= calls * (F(str(before)) - F(str(after)))


def test_three_buckets():
    assert_first_only(should_precompile)
    decisions = [should_precompile(compile_time, calls, gain, 0) for compile_time, calls, gain in BUCKETS]
    assert [decision.net_benefit for decision in decisions] == [1, -5, F(-4, 5)]
    assert "1000 calls save 3, more than compiling takes (2)" in decisions[0].reasons
    with pytest.raises(AssertionError):
        assert_first_only(whenever_a_call_gets_faster)


def test_breaking_even_is_no_gain():
    assert_strict(should_precompile)
    with pytest.raises(AssertionError):
        assert_strict(at_break_even)


def test_more_calls_change_the_decision():
    assert not should_precompile(10, 200, F(50, 1000), 0)
    assert should_precompile(10, 201, F(50, 1000), 0)


def test_loading_from_the_cache_costs_less_than_compiling():
    assert not should_precompile(10, 100, 0.05, 0)
    cached = should_precompile(10, 100, 0.05, 0, cached_load_time=0.5)
    assert cached
    assert cached.net_benefit == pytest.approx(4.5)
    assert "loading from the persistent cache takes" in cached.reasons[0]


def test_what_does_not_fit_into_memory_is_refused_whatever_it_saves():
    assert should_precompile(1, 1000, 1, 0, memory_bytes=100, free_bytes=100)
    refused = should_precompile(1, 1000, 1, 0, memory_bytes=101, free_bytes=100)
    assert not refused
    assert refused.net_benefit == 999
    assert refused.reasons[-1] == "101 bytes do not fit into 100"
    assert not should_precompile(1, 1, 2, 0.5, memory_bytes=101, free_bytes=100, first_request_deadline=1)


@pytest.mark.parametrize(
    ("deadline", "answer", "reason"),
    [
        (0.6, True, "only the executable meets"),
        (0.5, True, "only the executable meets"),
        (2, False, "meets its deadline of 2 without"),
        (0.4, False, "not even the executable"),
    ],
)
def test_a_deadline_that_only_the_executable_meets_decides(deadline, answer, reason):
    """One call, 2 s before and 0.5 s after, C = 10 s: a loss of 8.5 s."""
    decision = should_precompile(10, 1, 2, 0.5, first_request_deadline=deadline)
    assert bool(decision) is answer
    assert decision.net_benefit == -8.5
    assert reason in decision.reasons[-1]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"cached_load_time": -1}, "cached_load_time"),
        ({"first_request_deadline": math.nan}, "first_request_deadline"),
        ({"free_bytes": 10}, "memory_bytes"),
        ({"memory_bytes": 1, "free_bytes": -1}, "free_bytes"),
    ],
)
def test_options_are_checked(options, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        should_precompile(1, 1, 1, 1, **options)
    with pytest.raises(ValueError, match="calls"):
        should_precompile(1, -1, 1, 1)
