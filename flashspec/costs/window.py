"""What a sliding window changes in the output of full attention: eq. 33.16."""

from flashspec.checks import fail
from flashspec.costs.numbers import Number, nonnegative


def window_error_bound(dropped_mass: Number, value_norm: Number) -> Number:
    """Upper bound on how far an output moves when keys are dropped and the rest is renormalised.

    ||o - o'|| <= 2 delta M,  delta < 1                                                                  (eq. 33.16)

    It holds for one row of one layer, is reached (kept value 1, dropped value -1), and says nothing of the quality of a
    task: layers and sampling may amplify it. A model that was trained with a window has no error: it drops nothing.

    Args:
      dropped_mass: delta in [0, 1), the *attention probability* that full attention puts on the dropped keys. That keys
        are far away does not make it small.
      value_norm: M >= 0, a bound on the norm of every value vector.

    Returns:
      The bound, in the unit of `value_norm`.

    Raises:
      ValueError: an argument is out of range; at delta = 1 nothing is kept and the equation makes no claim.

    Source: chapter 33.7, exercise 33.12.
    """
    if not 0 <= dropped_mass < 1:
        raise fail("dropped_mass", "a probability in [0, 1) (at 1 no key is kept: no bound)", dropped_mass)
    return 2 * dropped_mass * nonnegative("value_norm", value_norm)
