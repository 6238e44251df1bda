"""Time of a whole from the times of its parts: eq. 33.1, and the time per token of many rounds."""

import math
from collections.abc import Iterable

from flashspec.checks import fail
from flashspec.costs.numbers import Number, nonnegative, positive, probability, ratio


def amdahl_speedup(fraction: Number, speedup: Number, overhead: Number = 0) -> Number:
    """End-to-end speed-up when a part of the time becomes faster.

    S = 1 / ((1 - f) + f / s + o)                                                            (eq. 33.1, with o = 0)

    Args:
      fraction: f in [0, 1], the part's share of the original time.
      speedup: s > 0, how many times faster the part becomes; `math.inf` gives the upper limit.
      overhead: o >= 0, new cost (layout changes, synchronisation) as a share of the original time.

    Returns:
      S, original time over new time.

    Raises:
      ValueError: an argument is out of its range, or the new time is 0 (f = 1, s infinite, o = 0).

    Source: chapter 33.1, example of 33.1, exercise 33.5.
    """
    probability("fraction", fraction)
    nonnegative("overhead", overhead)
    if not speedup > 0:
        raise fail("speedup", "a number above 0", speedup)
    accelerated = 0 if math.isinf(speedup) else ratio(fraction, speedup)
    new_time = (1 - fraction) + accelerated + overhead
    if new_time == 0:
        raise fail("speedup", "a finite number where fraction = 1 and overhead = 0", speedup)
    return ratio(1, new_time)


def time_per_token(times: Iterable[Number], tokens: Iterable[int]) -> Number:
    """Long-run time per token of many rounds: the ratio of sums.

    t = sum_i times_i / sum_i tokens_i

    The mean of the rounds' own ratios is another number, and not the time that a user waits: rounds of (12 ms, 1 token)
    and (12 ms, 5 tokens) take 4 ms a token, while their ratios average 7.2.

    Args:
      times: time of each round, at least 0, in any one unit.
      tokens: tokens that each round committed, at least 0; as many as `times`.

    Returns:
      Time per token, in the unit of `times`.

    Raises:
      ValueError: lengths differ, a value is negative, or no token was committed.

    Source: exercise 33.13.
    """
    times, tokens = list(times), list(tokens)
    if len(times) != len(tokens):
        raise fail("tokens", f"{len(times)} counts, one for each round", f"{len(tokens)}")
    for time, count in zip(times, tokens, strict=True):
        nonnegative("times", time)
        nonnegative("tokens", count)
    return ratio(sum(times), positive("sum of tokens", sum(tokens)))
