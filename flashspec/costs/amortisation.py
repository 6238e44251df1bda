"""When compiling for a shape pays: eq. 33.9."""

import math

from flashspec.costs.numbers import Number, exact, nonnegative


def net_benefit(compile_time: Number, calls: int, time_before: Number, time_after: Number) -> Number:
    """Time saved by compiling, less what compiling took.

    n (t_e - t_c) - C                                                                                     (eq. 33.9)

    Args:
      compile_time: C >= 0.
      calls: n >= 0, calls expected of this shape.
      time_before: t_e >= 0, one call as it runs without this executable (op by op, or in the next larger bucket).
      time_after: t_c >= 0, one call of the executable. All times in one unit.

    Returns:
      The benefit in the unit of the times; negative when compiling does not pay.

    Raises:
      ValueError: a negative or non-finite argument.

    Source: chapter 33.4, exercise 33.6.
    """
    _check(compile_time, time_before, time_after)
    return nonnegative("calls", calls) * (time_before - time_after) - compile_time


def pays_off(compile_time: Number, calls: int, time_before: Number, time_after: Number) -> bool:
    """Whether `calls` calls repay the compilation: C + n t_c < n t_e, strictly (eq. 33.9).

    Floats are compared as the decimals that they print as, so that breaking even exactly is never a gain by rounding.

    Args: see `net_benefit`.

    Returns:
      True when time is saved; False when it is lost or merely broken even.

    Raises:
      ValueError: a negative or non-finite argument.

    Source: chapter 33.4.
    """
    _check(compile_time, time_before, time_after)
    return net_benefit(exact(compile_time), calls, exact(time_before), exact(time_after)) > 0


def break_even_calls(compile_time: Number, time_before: Number, time_after: Number) -> int | float:
    """The fewest calls from which compiling pays.

    min {n : n > C / (t_e - t_c)} = floor(C / (t_e - t_c)) + 1                                            (eq. 33.9)

    Args: see `net_benefit`.

    Returns:
      The number of calls; `math.inf` when a call does not become faster.

    Raises:
      ValueError: a negative or non-finite argument.

    Source: chapter 33.4: C = 3 s and 2 to 1.5 ms need more than 6000 calls, so 6001.
    """
    _check(compile_time, time_before, time_after)
    gain = exact(time_before) - exact(time_after)
    return math.floor(exact(compile_time) / gain) + 1 if gain > 0 else math.inf


def _check(compile_time: Number, time_before: Number, time_after: Number) -> None:
    nonnegative("compile_time", compile_time)
    nonnegative("time_before", time_before)
    nonnegative("time_after", time_after)
