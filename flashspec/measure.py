"""Honest timing: a clock with a label, repeats in turn, and no ratio without a correctness check that passed.

A time is read from one of two clocks. `HOST` is the wall clock around `jax.block_until_ready`: what a user waits,
dispatch included. `DEVICE` is the time that a GPU's kernels took by CUPTI, without the gaps between them.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flashspec import costs
from flashspec.checks import at_least, fail, one_of

HOST = "host clock around block_until_ready"
DEVICE = "device time of the kernels, by CUPTI"

__all__ = [
    "DEVICE",
    "HOST",
    "AcceptanceStatistics",
    "Call",
    "Checked",
    "Interleaved",
    "Timing",
    "acceptance_statistics",
    "checked",
    "compile_call",
    "interleaved",
    "time_call",
    "time_per_later_token",
]


@dataclasses.dataclass(frozen=True)
class Call:
    """A compiled program with the arguments of one call; calling it runs the program.

    Attributes:
      executable: compiled ahead of time; it must not donate arguments, which would leave nothing for the next call.
      arguments: of the call.
      compile_s: seconds for tracing, lowering and compiling.
    """

    executable: jax.stages.Compiled
    arguments: tuple[Any, ...]
    compile_s: float

    def __call__(self) -> Any:
        return self.executable(*self.arguments)


def compile_call(
    function: Callable[..., Any], *arguments: Any, compiler_options: Mapping[str, Any] | None = None
) -> Call:
    """Compile `function`, jitted or not, for these arguments, and time the compilation apart from any call.

    Args:
      function: to compile.
      *arguments: of the call.
      compiler_options: of XLA, for this program alone, such as {"xla_gpu_enable_command_buffer": ""}.

    Returns:
      The call.
    """
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    start = time.perf_counter()
    executable = jitted.lower(*arguments).compile(compiler_options=dict(compiler_options or {}))
    return Call(executable, arguments, time.perf_counter() - start)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call, repeated.

    Attributes:
      seconds: of each repeat, in order.
      clock: `HOST` or `DEVICE`.
      first_call_s: of the call before the repeats, by the host clock.
      compile_s: where the call was compiled ahead of time, else None.
    """

    seconds: tuple[float, ...]
    clock: str
    first_call_s: float
    compile_s: float | None = None

    @property
    def steady_s(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> tuple[float, float]:
        """Lower and upper quartile of the repeats."""
        return _quartiles(self.seconds)

    def fields(self) -> dict[str, Any]:
        """What goes into a `flashspec.records.PerformanceRecord` of this timing."""
        return {
            "clock": self.clock,
            "compile_s": self.compile_s,
            "first_call_s": self.first_call_s,
            "steady_s": self.steady_s,
            "steady_low_s": self.spread_s[0],
            "steady_high_s": self.spread_s[1],
            "repeats": len(self.seconds),
        }


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(np.asarray(values), [0.25, 0.75])
    return float(low), float(high)


def _host_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _device_seconds(call: Callable[[], Any]) -> float:
    from jax.experimental.mosaic.gpu import profiler

    if not isinstance(call, Call):
        raise fail("clock", "HOST for a Python callable: CUPTI times one compiled program", "DEVICE")
    _, milliseconds = profiler.measure(call.executable)(*call.arguments)
    if milliseconds is None:
        raise NotImplementedError("CUPTI reported no kernel: device time is not available here; use clock=HOST")
    return float(milliseconds) / 1e3


def _clock(clock: str | None, calls: Sequence[Callable[[], Any]]) -> str:
    """The clock asked for, or device time where every call has one."""
    if clock is None:
        return DEVICE if jax.default_backend() == "gpu" and all(isinstance(call, Call) for call in calls) else HOST
    one_of("clock", clock, (HOST, DEVICE))
    if clock == DEVICE and jax.default_backend() != "gpu":
        raise NotImplementedError(f"device time is read by CUPTI, which {jax.default_backend()} does not have")
    return clock


def _time_in_turn(calls: Mapping[str, Callable[[], Any]], repeats: int, clock: str | None) -> dict[str, Timing]:
    at_least("repeats", repeats, 1)
    chosen = _clock(clock, list(calls.values()))
    read = _host_seconds if chosen == HOST else _device_seconds
    first = {name: _host_seconds(call) for name, call in calls.items()}
    rounds = [{name: read(call) for name, call in calls.items()} for _ in range(repeats)]
    return {
        name: Timing(tuple(r[name] for r in rounds), chosen, first[name], getattr(call, "compile_s", None))
        for name, call in calls.items()
    }


def time_call(call: Callable[[], Any], *, repeats: int = 11, clock: str | None = None) -> Timing:
    """Time one call: its first run apart, then the repeats.

    Args:
      call: from `compile_call`, or any function without arguments (then the first call may include compilation).
      repeats: after the first.
      clock: `HOST`, `DEVICE`, or None for `DEVICE` on a GPU where `call` is a compiled program, else `HOST`.

    Returns:
      A `Timing`, in seconds.

    Raises:
      ValueError: repeats below 1, an unknown clock, or `DEVICE` for a function that is not a compiled program.
      NotImplementedError: `DEVICE` where it cannot be read.
    """
    return _time_in_turn({"call": call}, repeats, clock)["call"]


@dataclasses.dataclass(frozen=True)
class Checked:
    """A correctness check, and whether it passed; `checked` runs one and makes it.

    Attributes:
      what: the claim in words, such as "greedy tokens equal plain decoding's".
      passed: whether it held.
    """

    what: str
    passed: bool


def checked(what: str, check: Callable[[], bool]) -> Checked:
    """Run a correctness check of the calls that will be compared."""
    return Checked(what, bool(check()))


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Timings of calls that took turns, with the check that lets their ratio be stated.

    Attributes:
      timings: by name.
      check: a `Checked` that passed.
    """

    timings: Mapping[str, Timing]
    check: Checked

    def ratio(self, slow: str, fast: str) -> float:
        """How many times faster `fast` is: the ratio of the medians."""
        return self.timings[slow].steady_s / self.timings[fast].steady_s

    def ratio_spread(self, slow: str, fast: str) -> tuple[float, float]:
        """Lower and upper quartile of the ratio, over repeats that ran next to each other."""
        pairs = zip(self.timings[slow].seconds, self.timings[fast].seconds, strict=True)
        return _quartiles([a / b for a, b in pairs])


def interleaved(
    calls: Mapping[str, Callable[[], Any]], *, check: Checked, repeats: int = 11, clock: str | None = None
) -> Interleaved:
    """Time calls in turn, a b a b ..., so that a machine that slows down slows all of them.

    Args:
      calls: name -> call, as for `time_call`; all are read from one clock.
      check: from `checked`, of these very calls.
      repeats: of each, after its first.
      clock: as for `time_call`.

    Returns:
      `Interleaved`, which states ratios.

    Raises:
      ValueError: the check did not pass: a wrong result has no speed; or as for `time_call`.
      NotImplementedError: as for `time_call`.
    """
    if not check.passed:
        raise fail("check", "one that passed, since a wrong result has no speed", f"failed: {check.what}")
    return Interleaved(_time_in_turn(calls, repeats, clock), check)


def time_per_later_token(total_s: float, first_s: float, tokens: int) -> float | None:
    """Time per token after the first.

    (total - first) / (n - 1)                                                                          (section 33.7)

    Args:
      total_s: seconds until the last token.
      first_s: seconds until the first token (TTFT).
      tokens: n, tokens generated.

    Returns:
      Seconds a token, or None where there is no later token.

    Raises:
      ValueError: fewer than one token, or `total_s` below `first_s`.
    """
    at_least("tokens", tokens, 1)
    if not total_s >= first_s >= 0:
        raise fail("total_s", f"at least first_s = {first_s}", total_s)
    return None if tokens == 1 else (total_s - first_s) / (tokens - 1)


@dataclasses.dataclass(frozen=True)
class AcceptanceStatistics:
    """Acceptance of draft tokens by position; every rate is a ratio of sums and stands beside its count.

    Attributes:
      accepted, tested: counts by position.
      conditional: accepted / tested by position, given that the position was tested; None where it never was.
      survival: product of `conditional` up to and including the position; None from the first untested one on.
    """

    accepted: tuple[int, ...]
    tested: tuple[int, ...]
    conditional: tuple[float | None, ...]
    survival: tuple[float | None, ...]


def acceptance_statistics(accepted: Any, tested: Any) -> AcceptanceStatistics:
    """Acceptance by position from counts.

    An overall accepted / proposed is not among the results: it mixes positions that were never reached, and may not be
    put into the powers of eq. 33.14.

    Args:
      accepted: [D] or [B, D] counts; rows are summed.
      tested: counts of the same shape. A position is tested when every earlier draft token of its round was accepted
        and neither a stop token nor the budget ended the row before it.

    Returns:
      `AcceptanceStatistics`.

    Raises:
      ValueError: shapes differ, or the counts cannot be: more accepted than tested, or more tested than accepted one
        position earlier.

    Source: sections 33.6 and 33.7, exercise 33.10.
    """
    kept, seen = np.asarray(accepted), np.asarray(tested)
    if kept.shape != seen.shape or kept.ndim not in (1, 2):
        raise fail("tested", f"the shape of accepted, [D] or [B, D], {kept.shape}", seen.shape)
    kept, seen = kept.reshape(-1, kept.shape[-1]), seen.reshape(-1, seen.shape[-1])
    if np.any(kept < 0) or np.any(kept > seen):
        raise fail("accepted", f"between 0 and tested = {seen.tolist()}", kept.tolist())
    if np.any(seen[:, 1:] > kept[:, :-1]):
        raise fail("tested", f"at most what was accepted one position earlier, {kept.tolist()}", seen.tolist())
    sums = kept.sum(axis=0).tolist(), seen.sum(axis=0).tolist()
    rates = [a / t for a, t in zip(*sums, strict=True) if t]
    unknown = [None] * (len(sums[0]) - len(rates))
    survival = [float(s) for s in costs.survival(rates)[1:]]
    return AcceptanceStatistics(tuple(sums[0]), tuple(sums[1]), (*rates, *unknown), (*survival, *unknown))
