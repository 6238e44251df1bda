"""Shape buckets: the few lengths that programs are compiled for, what padding up to them costs, and the best choice.

All sums are exact: costs are integers or fractions, a float is read as the decimal that it prints as, and expectations
are `Fraction`s. So "fewest buckets on ties" is never decided by rounding.
"""

import dataclasses
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import add
from typing import Any

import numpy as np

from flashspec.checks import at_least, fail
from flashspec.costs.numbers import Number, exact, nonnegative

type Lengths = Iterable[Any] | Mapping[Any, Any]  # of integers, Python's or numpy's; checked by value
type Cost = str | Callable[[int, int], Number]

COSTS: dict[str, Callable[[int, int], Number]] = {
    "linear": lambda bound, length: bound - length,
    "quadratic": lambda bound, length: bound**2 - length**2,
}


@dataclasses.dataclass(frozen=True)
class ShapeBuckets:
    """The lengths that programs are compiled for; every length runs in the smallest that holds it.

    Args:
      bounds: strictly increasing positive integers, the largest length of each bucket.

    Raises:
      ValueError: no bounds, or bounds that are not positive integers in strictly increasing order.

    Source: chapter 33.4.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        bounds = tuple(at_least("bounds", bound, 1) for bound in _items("bounds", self.bounds))
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise fail("bounds", "at least one bound, strictly increasing", list(bounds))
        object.__setattr__(self, "bounds", bounds)

    def bucket_of(self, length: int | np.integer) -> int:
        """The bound of the bucket that serves `length`.

        b(T) = min {b in bounds : b >= T}                                                             (section 33.4)

        Args:
          length: T >= 1. (An empty input needs no program.)

        Returns:
          The smallest bound that is at least `length`.

        Raises:
          ValueError: `length` is not an integer of at least 1, or is above the last bound.
        """
        wanted = at_least("length", length, 1)
        if wanted > self.bounds[-1]:
            raise fail("length", f"at most {self.bounds[-1]}, the bound of the last bucket", wanted)
        return self.bounds[bisect_left(self.bounds, wanted)]


def expected_padding(lengths: Lengths, buckets: ShapeBuckets) -> Fraction:
    """Mean number of padded positions of a call.

    E[b(T) - T]                                                                                       (section 33.4)

    Args:
      lengths: observed lengths T >= 1, or a mapping from length to how often it was observed.
      buckets: what they are served in.

    Returns:
      The exact mean, in positions.

    Raises:
      ValueError: no lengths, an illegal length or count, or a length above the last bound.

    Source: chapter 33.4.
    """
    return _expected(lengths, buckets, COSTS["linear"])


def expected_extra_area(lengths: Lengths, buckets: ShapeBuckets) -> Fraction:
    """Mean number of extra scores of a call's dense attention (per head), which the mean padding does not tell.

    E[b(T)^2 - T^2]                                                                                   (section 33.4)

    Args: see `expected_padding`.

    Returns:
      The exact mean, in positions squared.

    Raises:
      ValueError: as `expected_padding`.

    Source: chapter 33.4.
    """
    return _expected(lengths, buckets, COSTS["quadratic"])


def optimal_buckets(lengths: Lengths, max_buckets: int, cost: Cost = "linear", *, multiple_of: int = 1) -> ShapeBuckets:
    """The buckets of least expected extra work, exactly, by dynamic programming.

    argmin over bounds of E[cost(b(T), T)]                                                            (section 33.4)

    Bounds are chosen among the observed lengths, rounded up to multiples of `multiple_of`; no other choice is better as
    long as the cost does not fall when the bound grows. On ties the fewest buckets win, and then the smaller bounds
    (the largest that differs decides). Time grows as max_buckets n^2, for n distinct lengths.

    Args:
      lengths: observed lengths T >= 1, or a mapping from length to how often it was observed. A length with the count
        0 is covered and weighs nothing: `{8192: 0}` makes 8192 servable.
      max_buckets: the most buckets to use, at least 1.
      cost: of serving the length T in a bucket of bound b: "linear" b - T, "quadratic" b^2 - T^2, or a function of
        (b, T) with finite values of at least 0, such as a measured time.
      multiple_of: what every bound is a multiple of, such as a kernel's tile.

    Returns:
      The buckets. Their last bound is the largest length, rounded up.

    Raises:
      ValueError: no lengths, an illegal length, count, cost, `max_buckets` or `multiple_of`.

    Source: chapter 33.4.
    """
    choices = _choices(_counts(lengths), max_buckets, cost, multiple_of)
    return ShapeBuckets(min(choices, key=lambda choice: choice[0])[1])


def bucket_tradeoff(
    lengths: Lengths, max_buckets: int, cost: Cost = "linear", *, multiple_of: int = 1
) -> list[tuple[int, Fraction]]:
    """How the least expected extra work falls with the number of buckets, each of which is one more compilation.

    min over n bounds of E[cost(b(T), T)], n = 1, 2, ...                                              (section 33.4)

    Args: see `optimal_buckets`.

    Returns:
      Pairs of the number of buckets n and the exact least expectation, for every n up to `max_buckets` or to the number
      of distinct lengths after rounding up.

    Raises:
      ValueError: as `optimal_buckets`.

    Source: chapter 33.4.
    """
    counts = _counts(lengths)
    choices = _choices(counts, max_buckets, cost, multiple_of)
    return [(len(bounds), total / counts.total()) for total, bounds in choices]


def _choices(
    counts: Counter[int], most: int, cost: Cost, multiple_of: int
) -> Iterator[tuple[Fraction, tuple[int, ...]]]:
    """The least total cost and its bounds, for exactly one bucket, two, and so on."""
    most, multiple = at_least("max_buckets", most, 1), at_least("multiple_of", multiple_of, 1)
    bounds = sorted({-(-length // multiple) * multiple for length in counts})
    serving, scale = _serving_costs(counts, bounds, _cost_function(cost))
    totals = [costs[0] for costs in serving]
    chosen: list[tuple[int, ...]] = [(bound,) for bound in bounds]
    yield Fraction(totals[-1], scale), chosen[-1]
    for number in range(1, min(most, len(bounds))):
        # Entry k of `totals` is what the lengths up to bounds[number - 1 + k] cost in `number` buckets, the last of
        # them with that bound. One bucket more, with the bound `last`, serves all that is above the bound before it.
        options = [list(map(add, totals, serving[last][number:])) for last in range(number, len(bounds))]
        totals = [min(option) for option in options]
        before = [option.index(total) for option, total in zip(options, totals, strict=True)]
        chosen = [(*chosen[k], bounds[number + at]) for at, k in enumerate(before)]
        yield Fraction(totals[-1], scale), chosen[-1]


def _serving_costs(
    counts: Counter[int], bounds: list[int], cost: Callable[[int, int], Number]
) -> tuple[list[list[int]], int]:
    """Entry [last][first]: what the lengths of buckets first..last cost in `last`; as integers over a scale."""
    lengths = sorted(counts)
    edges = [0, *(bisect_left(lengths, bound + 1) for bound in bounds)]
    values = [[_exact_cost(cost, bound, length) for length in lengths if length <= bound] for bound in bounds]
    scale = math.lcm(*{value.denominator for row in values for value in row})
    table = []
    for last, row in enumerate(values):
        whole = (value.numerator * (scale // value.denominator) for value in row)
        weighted = [counts[length] * value for length, value in zip(lengths, whole, strict=False)]
        own = [sum(weighted[edges[k] : edges[k + 1]]) for k in range(last + 1)]
        table.append(list(accumulate(reversed(own)))[::-1])
    return table, scale


def _expected(lengths: Lengths, buckets: ShapeBuckets, cost: Callable[[int, int], Number]) -> Fraction:
    counts = _counts(lengths)
    total = sum(count * exact(cost(buckets.bucket_of(length), length)) for length, count in counts.items())
    return Fraction(total) / counts.total()


def _exact_cost(cost: Callable[[int, int], Number], bound: int, length: int) -> int | Fraction:
    value = nonnegative("cost", cost(bound, length))
    return value if isinstance(value, int) else exact(value)


def _cost_function(cost: Cost) -> Callable[[int, int], Number]:
    function = COSTS.get(cost) if isinstance(cost, str) else cost
    if not callable(function):
        raise fail("cost", '"linear", "quadratic" or a function of (bound, length)', repr(cost))
    return function


def _counts(lengths: Lengths) -> Counter[int]:
    """How often each length occurs, checked."""
    pairs = lengths.items() if isinstance(lengths, Mapping) else ((value, 1) for value in _items("lengths", lengths))
    counts: Counter[int] = Counter()
    for length, count in pairs:
        counts[at_least("lengths", length, 1)] += at_least("lengths", count, 0)
    if not counts.total():
        raise fail("lengths", "at least one length that occurs", "none")
    return counts


def _items(name: str, values: object) -> list[object]:
    """The items of an iterable or of an array, as Python objects."""
    values = np.asarray(values).tolist() if hasattr(values, "__array__") else values
    if not isinstance(values, Iterable):
        raise fail(name, "a sequence of integers", repr(values))
    return list(values)
