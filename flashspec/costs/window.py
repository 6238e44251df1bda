"""What a sliding window changes in the output of full attention: eq. 33.16."""

import math
from typing import Any

import numpy as np

from flashspec.checks import fail


def dropped_mass(weights: Any, kept: Any) -> Any:
    """Share of its attention probability that each row puts on keys which a window drops.

    delta = sum_{j dropped} w_j / sum_j w_j                                                         (section 33.7)

    Args:
      weights: [..., S], at least 0: attention probabilities, or e^(score - maximum) without their normaliser. Numbers
        of any kind; fractions stay exact.
      kept: bool [..., S], which keys the window leaves.

    Returns:
      delta [...] in [0, 1].

    Raises:
      ValueError: a weight is negative or not finite, no key has weight, or `kept` is not boolean or of another shape.

    Source: chapter 33.7.
    """
    weights, kept = np.asarray(weights), np.asarray(kept)
    if kept.dtype != np.bool_ or weights.ndim == 0 or np.broadcast_shapes(kept.shape, weights.shape) != weights.shape:
        raise fail(
            "kept", f"booleans that broadcast to the weights' shape {weights.shape}", f"{kept.dtype} {kept.shape}"
        )
    if not np.all((weights >= 0) & (weights < math.inf)):
        raise fail("weights", "finite numbers of at least 0", "others among them")
    total = weights.sum(axis=-1)
    if not np.all(total > 0):
        raise fail("weights", "at least one key with weight in each row", "a row without")
    return np.where(kept, 0 * weights, weights).sum(axis=-1) / total


def window_error_bound(dropped_mass: Any, value_norm: Any) -> Any:
    """Upper bound on how far an output moves when keys are dropped and the rest is renormalised.

    ||o - o'|| <= 2 delta M,  delta < 1                                                                  (eq. 33.16)

    It holds for one row of one layer, is reached (kept value 1, dropped value -1), and says nothing of the quality of a
    task: layers and sampling may amplify it. A model that was trained with a window has no error: it drops nothing.

    Args:
      dropped_mass: delta in [0, 1), the *attention probability* that full attention puts on the dropped keys, from
        `dropped_mass`; a number or an array. That keys are far away does not make it small.
      value_norm: M >= 0, a bound on the norm of every value vector; a number, or an array that broadcasts.

    Returns:
      The bound, in the unit of `value_norm`.

    Raises:
      ValueError: an argument is out of range; at delta = 1 nothing is kept and the equation makes no claim.

    Source: chapter 33.7, exercise 33.12.
    """
    mass, norm = np.asarray(dropped_mass), np.asarray(value_norm)
    if not np.all((mass >= 0) & (mass < 1)):
        raise fail("dropped_mass", "a probability in [0, 1) (at 1 no key is kept: no bound)", dropped_mass)
    if not np.all((norm >= 0) & (norm < math.inf)):
        raise fail("value_norm", "a finite number of at least 0", value_norm)
    return 2 * dropped_mass * value_norm
