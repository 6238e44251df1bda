"""Timing says what it read, a ratio needs a passed check, and rates are ratios of sums."""

import itertools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from flashspec import costs
from flashspec.measure import (
    DEVICE,
    HOST,
    Checked,
    acceptance_statistics,
    checked,
    compile_call,
    interleaved,
    time_call,
    time_per_later_token,
)

PASSED = checked("1 is 1", lambda: True)


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Callable[[], None]]:
    """A clock that only moves when a call says that it took time; returns `takes(*seconds)`, a call that cycles."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def takes(*seconds: float) -> Callable[[], None]:
        cycle = itertools.cycle(seconds)

        def call() -> None:
            now[0] += next(cycle)

        return call

    return takes


def test_first_call_is_apart_from_the_steady_state(fake_clock: Callable[..., Callable[[], None]]) -> None:
    timing = time_call(fake_clock(9.0, 1.0, 3.0, 2.0), repeats=3)
    assert timing.first_call_s == 9.0
    assert timing.seconds == (1.0, 3.0, 2.0)
    assert timing.steady_s == 2.0, "the mean with the first call would be 3.75"
    assert timing.spread_s == (1.5, 2.5)
    assert timing.clock == HOST
    assert timing.compile_s is None


def test_a_compiled_call_times_its_compilation_apart() -> None:
    call = compile_call(lambda x: x @ x, jnp.ones((8, 8)))
    timing = time_call(call, repeats=2)
    assert call.compile_s > 0
    assert timing.fields() == {
        "clock": HOST,
        "compile_s": call.compile_s,
        "first_call_s": timing.first_call_s,
        "steady_s": timing.steady_s,
        "steady_low_s": timing.spread_s[0],
        "steady_high_s": timing.spread_s[1],
        "repeats": 2,
    }
    assert call()[0, 0] == 8


def test_a_jitted_function_is_compiled_as_it_is() -> None:
    call = compile_call(jax.jit(lambda x, n: x * n, static_argnums=1), jnp.ones(2), 3)
    assert call.executable is not None


def test_interleaved_takes_turns(fake_clock: Callable[..., Callable[[], None]]) -> None:
    order: list[str] = []
    takes = {"slow": fake_clock(1.0, 4.0, 8.0, 12.0), "fast": fake_clock(1.0, 2.0, 2.0, 3.0)}

    def logged(name: str) -> Callable[[], None]:
        return lambda: order.append(name) or takes[name]()  # type: ignore[func-returns-value]

    result = interleaved({name: logged(name) for name in takes}, check=PASSED, repeats=3)
    assert order == ["slow", "fast"] * 4
    assert result.ratio("slow", "fast") == 4.0
    assert result.ratio_spread("slow", "fast") == (3.0, 4.0)


def test_a_drifting_machine_does_not_favour_the_one_that_ran_first(
    fake_clock: Callable[..., Callable[[], None]],
) -> None:
    """Twins on a machine that slows with every call: in turn their ratio is near 1, one after the other it is not."""
    slowing = [1.0 + 0.1 * i for i in range(40)]
    shared = itertools.chain(slowing)

    def twin() -> None:
        fake_clock(next(shared))()

    in_turn = interleaved({"a": twin, "b": twin}, check=PASSED, repeats=9).ratio("b", "a")
    shared = itertools.chain(slowing)
    one_by_one = [time_call(twin, repeats=9).steady_s for _ in range(2)]
    assert abs(in_turn - 1) < 0.1
    assert one_by_one[1] / one_by_one[0] > 1.5


def test_no_ratio_without_a_passed_check() -> None:
    calls: list[int] = []
    with pytest.raises(ValueError, match="wrong result has no speed, got failed: 1 is 2"):
        interleaved({"a": lambda: calls.append(1)}, check=checked("1 is 2", lambda: False))
    assert calls == [], "nothing is timed either"
    assert Checked("x", True) == checked("x", lambda: True)


def test_device_time_is_refused_where_it_cannot_be_read() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has it")
    with pytest.raises(NotImplementedError, match="CUPTI"):
        time_call(lambda: None, clock=DEVICE)


@pytest.mark.gpu
def test_device_time_is_below_the_host_clock() -> None:
    call = compile_call(lambda x: x @ x, jnp.ones((512, 512)))
    device, host = time_call(call), time_call(call, clock=HOST)
    assert device.clock == DEVICE
    assert 0 < device.steady_s < host.steady_s


@pytest.mark.parametrize("clock", ["wall", ""])
def test_an_unknown_clock_is_refused(clock: str) -> None:
    with pytest.raises(ValueError, match="clock"):
        time_call(lambda: None, clock=clock)


def test_time_per_later_token() -> None:
    assert time_per_later_token(9.0, 1.0, 5) == 2.0
    assert time_per_later_token(9.0, 1.0, 5) != 9.0 / 5, "the total over all tokens hides the prefill in the rate"
    assert time_per_later_token(2.0, 2.0, 1) is None


@pytest.mark.parametrize(("total", "first", "tokens"), [(1.0, 2.0, 3), (1.0, 0.5, 0), (1.0, -1.0, 2)])
def test_impossible_latencies_are_refused(total: float, first: float, tokens: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        time_per_later_token(total, first, tokens)


def test_rates_are_ratios_of_sums() -> None:
    """Rounds of (12 ms, 1 token) and (12 ms, 5 tokens): 4 ms a token; the mean of ratios says 7.2."""
    times, tokens = [12, 12], [1, 5]
    assert costs.time_per_token(times, tokens) == 4
    assert sum(t / n for t, n in zip(times, tokens, strict=True)) / 2 == pytest.approx(7.2)


def test_acceptance_is_conditional_on_having_been_tested() -> None:
    result = acceptance_statistics(accepted=[[9, 4, 1], [9, 3, 0]], tested=[[10, 8, 4], [10, 6, 0]])
    assert result.accepted == (18, 7, 1)
    assert result.tested == (20, 14, 4)
    assert result.conditional == (18 / 20, 7 / 14, 1 / 4)
    assert result.survival == pytest.approx((0.9, 0.45, 0.1125))
    assert result.conditional[1] != 7 / 20, "accepted over proposed counts what was never tested"
    assert result.conditional[1] != (4 / 8 + 3 / 6 + 0) / 3, "nor is it a mean of the rows' ratios"


def test_positions_that_were_never_tested_have_no_rate() -> None:
    result = acceptance_statistics([2, 0, 0], [4, 2, 0])
    assert result.conditional == (0.5, 0.0, None)
    assert result.survival == (0.5, 0.0, None)
    assert acceptance_statistics([0], [0]).survival == (None,)


@pytest.mark.parametrize(
    ("accepted", "tested", "message"),
    [
        ([3], [2], "accepted"),
        ([-1], [2], "accepted"),
        ([1, 1], [2, 2], "one position earlier"),
        ([[2, 0], [0, 0]], [[2, 1], [2, 1]], "one position earlier"),
        ([1, 1], [2], "shape"),
    ],
)
def test_impossible_counts_are_refused(accepted: list[int], tested: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        acceptance_statistics(accepted, tested)
