"""The numbers that cost models take, and the checks of their ranges."""

import math
from fractions import Fraction

from flashspec.checks import fail

type Number = int | float | Fraction


def probability(name: str, value: Number) -> Number:
    """Check that `value` lies in [0, 1] (NaN does not), and return it."""
    if not 0 <= value <= 1:
        raise fail(name, "a number in [0, 1]", value)
    return value


def nonnegative(name: str, value: Number) -> Number:
    """Check that `value` is finite and at least 0, and return it."""
    if not 0 <= value < math.inf:
        raise fail(name, "a finite number of at least 0", value)
    return value


def positive(name: str, value: Number) -> Number:
    """Check that `value` is finite and above 0, and return it."""
    if not 0 < value < math.inf:
        raise fail(name, "a finite number above 0", value)
    return value


def exact(value: Number) -> Fraction:
    """`value` as a fraction; a float is read as the shortest decimal that prints it, so 0.0015 is 3/2000.

    Strict comparisons need it: in binary floating point 3 / (0.002 - 0.0015) can fall on either side of 6000.
    """
    return Fraction(value) if isinstance(value, int | Fraction) else Fraction(repr(float(value)))


def ratio(numerator: Number, denominator: Number) -> Number:
    """numerator / denominator, exact when both are exact (Python divides two integers into a float)."""
    return Fraction(numerator) / denominator if isinstance(numerator, int) else numerator / denominator
