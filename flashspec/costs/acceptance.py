"""Tokens that a speculative round commits: eqs. 33.11 and 33.14.

An acceptance is *conditional*: position i's rate among the rounds that tested it, which is after i - 1 acceptances. The
overall share accepted / proposed counts untested drafts as rejected; put into powers it gives another number.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import TypeGuard, cast

import numpy as np

from flashspec.checks import at_least, fail, one_of
from flashspec.costs.numbers import Number, probability

type Numbers = Sequence[Number] | np.ndarray
type PerPosition = Number | Numbers


def survival(
    acceptance: PerPosition, draft_length: int | None = None, *, stop_survival: PerPosition = 1
) -> list[Number]:
    """Probability that a round goes on after its first i drafts, for i = 0..D.

    s_0 = 1,  s_i = prod_{j <= i} a_j c_j

    Args:
      acceptance: a_j, the conditional acceptance of draft j; one number for all positions, or a sequence of D.
      draft_length: D; may be left out when a sequence is given.
      stop_survival: c_j, the probability that draft j is no stop token, given that it and all before it were accepted
        and none before it was one; one number, or a sequence of D.

    Returns:
      D + 1 numbers that never increase.

    Raises:
      ValueError: a probability outside [0, 1], or lengths that do not agree.

    Source: chapter 33.7.
    """
    length = _draft_length(acceptance, draft_length)
    accept = _per_position("acceptance", acceptance, length)
    goes_on = _per_position("stop_survival", stop_survival, length)
    return list(itertools.accumulate(map(operator.mul, accept, goes_on), operator.mul, initial=cast(Number, 1)))


def expected_tokens(
    acceptance: PerPosition,
    draft_length: int | None = None,
    *,
    remaining: int | None = None,
    stop_survival: PerPosition = 1,
) -> Number:
    """Expected tokens that one round commits.

    E[N] = sum_{i=0}^{min(D, L - 1)} s_i,  with s_i of `survival` = alpha^i for a constant acceptance       (eq. 33.14)

    The chapter's quotient (1 - alpha^{D+1}) / (1 - alpha) is the same number, but 0 / 0 at alpha = 1 and without
    correct digits near it; the sum has no such place.

    Args:
      acceptance, draft_length, stop_survival: see `survival`.
      remaining: L >= 0, tokens left in the length budget; None for no limit.

    Returns:
      E[N], between 1 and D + 1 (0 when L = 0).

    Raises:
      ValueError: see `survival`; a negative `remaining`.

    Source: chapter 33.7, exercise 33.10.
    """
    terms = survival(acceptance, draft_length, stop_survival=stop_survival)
    return sum(terms if remaining is None else terms[: at_least("remaining", remaining, 0)])


def expected_acceptance(rule: str, target_probs: Numbers, draft_probs: Numbers) -> Number:
    """Probability that a rule accepts a draft x ~ q at one prefix.

    chain: sum_x min(p(x), q(x)) (eq. 33.11);  match: sum_x p(x) q(x);  greedy: q(first maximum of p)

    Matching accepts at most as often as the chain rule; it needs no q, and for a one-hot q the two are equal.

    Args:
      rule: "chain", "match" or "greedy".
      target_probs: p, V probabilities.
      draft_probs: q, V probabilities.

    Returns:
      The acceptance in [0, 1].

    Raises:
      ValueError: an unknown rule, sizes that differ, or a probability outside [0, 1].

    Source: chapter 33.5, 33.6.
    """
    one_of("rule", rule, ("chain", "match", "greedy"))
    if len(target_probs) != len(draft_probs):
        raise fail("draft_probs", f"{len(target_probs)} probabilities, as many as target_probs", len(draft_probs))
    target = [probability("target_probs", p) for p in target_probs]
    draft = [probability("draft_probs", q) for q in draft_probs]
    if rule == "chain":
        return sum(map(min, target, draft))
    if rule == "match":
        return sum(map(operator.mul, target, draft))
    return draft[target.index(max(target))]


def is_sequence(value: PerPosition) -> TypeGuard[Numbers]:
    """Whether `value` has one number per position (a numpy scalar has no length, an array has)."""
    return hasattr(value, "__len__")


def _draft_length(acceptance: PerPosition, draft_length: int | None) -> int:
    if draft_length is not None:
        return at_least("draft_length", draft_length, 0)
    if not is_sequence(acceptance):
        raise fail("draft_length", "an integer, since acceptance is one number", None)
    return len(acceptance)


def _per_position(name: str, value: PerPosition, length: int) -> list[Number]:
    values = list(value) if is_sequence(value) else [cast(Number, value)] * length
    if len(values) != length:
        raise fail(name, f"one number, or {length}, one for each draft", f"{len(values)}")
    return [probability(name, each) for each in values]
