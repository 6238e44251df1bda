"""Speed-up of speculative decoding from measured costs, and the best draft length: eq. 33.15."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flashspec.checks import at_least, fail
from flashspec.costs.acceptance import PerPosition, expected_tokens, is_sequence
from flashspec.costs.numbers import Number, nonnegative, positive, ratio

type PerLength = Number | Mapping[int, Number] | Callable[[int], Number]


@dataclass(frozen=True)
class RoundCosts:
    """Measured times, all in one unit.

    Attributes:
      target_step: c_t, one step of plain decoding with the target.
      draft_step: c_d, one forward of the draft.
      verify: c_v(D), the target's forward over D + 1 tokens; one number, a table {D: time}, or a callable of D.
      overhead: c_m, caches and sampling of one round.
    """

    target_step: Number
    draft_step: Number
    verify: PerLength
    overhead: Number = 0

    def __post_init__(self) -> None:
        positive("target_step", self.target_step)
        nonnegative("draft_step", self.draft_step)
        nonnegative("overhead", self.overhead)

    def verify_at(self, draft_length: int) -> Number:
        """c_v(D); a ValueError when the table lacks D or the time is not above 0."""
        if callable(self.verify):
            return positive("verify", self.verify(draft_length))
        if isinstance(self.verify, Mapping):
            if draft_length not in self.verify:
                raise fail("verify", f"a time for draft length {draft_length}", f"lengths {sorted(self.verify)}")
            return positive("verify", self.verify[draft_length])
        return positive("verify", self.verify)


@dataclass(frozen=True)
class RoundEstimate:
    """What eqs. 33.14 and 33.15 say of one draft length.

    Attributes:
      draft_length: D.
      expected_tokens: E[N].
      draft_forwards: forwards of the draft in a round.
      verified_tokens: tokens in the target's forward, D + 1.
      round_time: c of the whole round, in the unit of the costs.
      time_per_token: round_time / E[N].
      speedup: over plain decoding.
    """

    draft_length: int
    expected_tokens: Number
    draft_forwards: int
    verified_tokens: int
    round_time: Number
    time_per_token: Number
    speedup: Number


def estimate_round(
    acceptance: PerPosition,
    draft_length: int,
    costs: RoundCosts,
    *,
    draft_forwards: int | None = None,
    stop_survival: PerPosition = 1,
) -> RoundEstimate:
    """Tokens, time and speed-up of a round with D drafts.

    c = F c_d + c_v(D) + c_m,  S = c_t E[N] / c                                                         (eq. 33.15)

    The chapter charges F = D draft forwards. A loop that keeps both caches aligned runs D + 1, the last one only to
    write its keys and values, as this library's does: that is the default here.

    Args:
      acceptance: see `survival`; of a longer sequence the first D are used.
      draft_length: D >= 1.
      costs: the times.
      draft_forwards: F >= 0; None for D + 1. The chapter's number is D; a drafter without a model has 0.
      stop_survival: see `survival`; of a longer sequence the first D are used.

    Returns:
      The estimate.

    Raises:
      ValueError: see `survival` and `RoundCosts`.

    Source: chapter 33.7.
    """
    at_least("draft_length", draft_length, 1)
    forwards = draft_length + 1 if draft_forwards is None else at_least("draft_forwards", draft_forwards, 0)
    tokens = expected_tokens(
        _first(acceptance, draft_length), draft_length, stop_survival=_first(stop_survival, draft_length)
    )
    time = forwards * costs.draft_step + costs.verify_at(draft_length) + costs.overhead
    return RoundEstimate(
        draft_length=draft_length,
        expected_tokens=tokens,
        draft_forwards=forwards,
        verified_tokens=draft_length + 1,
        round_time=time,
        time_per_token=ratio(time, tokens),
        speedup=ratio(costs.target_step * tokens, time),
    )


def speculative_speedup(
    acceptance: PerPosition, draft_length: int, costs: RoundCosts, *, draft_forwards: int | None = None
) -> Number:
    """Speed-up over plain decoding: S = c_t E[N] / (F c_d + c_v(D) + c_m) (eq. 33.15).

    Args: see `estimate_round`.

    Returns:
      S; below 1 when speculation is slower.

    Raises:
      ValueError: see `estimate_round`.

    Source: chapter 33.7.
    """
    return estimate_round(acceptance, draft_length, costs, draft_forwards=draft_forwards).speedup


def best_draft_length(
    acceptance: PerPosition,
    costs: RoundCosts,
    *,
    draft_lengths: Iterable[int] | None = None,
    draft_forwards: Callable[[int], int] | None = None,
    stop_survival: PerPosition = 1,
) -> RoundEstimate:
    """The draft length with the highest expected speed-up, found by trying every one.

    Measured c_v(D) is a staircase (tiles, cache lines), so S(D) may fall and rise again: a search that stops at the
    first fall misses the best length.

    Args:
      acceptance: see `survival`.
      costs: the times.
      draft_lengths: lengths to try; by default those of the `verify` table that `acceptance` covers, or 1..D for a
        sequence of D acceptances.
      draft_forwards: F as a function of D; None for D + 1.
      stop_survival: see `survival`.

    Returns:
      The estimate of the best length, the shortest one on ties. Speculate only if its `speedup` is above 1.

    Raises:
      ValueError: no length to try; see `estimate_round`.

    Source: chapter 33.7.
    """
    lengths = sorted(_candidates(acceptance, costs) if draft_lengths is None else draft_lengths)
    if not lengths:
        raise fail("draft_lengths", "at least one length", "none")
    forwards = {length: None if draft_forwards is None else draft_forwards(length) for length in lengths}
    estimates = [
        estimate_round(acceptance, length, costs, draft_forwards=forwards[length], stop_survival=stop_survival)
        for length in lengths
    ]
    return max(estimates, key=lambda estimate: estimate.speedup)


def _candidates(acceptance: PerPosition, costs: RoundCosts) -> Iterable[int]:
    covered = len(acceptance) if is_sequence(acceptance) else None
    if isinstance(costs.verify, Mapping):
        return [length for length in costs.verify if covered is None or length <= covered]
    if covered is None:
        raise fail("draft_lengths", "the lengths to try, since neither acceptance nor costs name them", None)
    return range(1, covered + 1)


def _first(value: PerPosition, length: int) -> PerPosition:
    return value[:length] if is_sequence(value) else value
