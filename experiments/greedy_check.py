"""Greedy speculative decoding against the target's own maxima."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from experiments.pairs import Pair
from flashspec.language_model import LanguageModel, Params

# Two evaluations of a float32 forward in different shapes differ by a few hundred units in the last place.
ROUNDING = 256 * float(np.finfo(np.float32).eps)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """How emitted tokens compare with the target's maxima, in float32 at the highest precision.

    Attributes:
      equal: every emitted token's logit is within `tolerance` of its row's maximum.
      max_logit_diff: the largest gap, row maximum - emitted token's logit.
      tolerance: `ROUNDING` times the largest logit in magnitude.
      first_mismatch: the first new token, over all rows, that differs from plain greedy decoding's; None without one.
      mismatch_gap: the gap at that token.
    """

    equal: bool
    max_logit_diff: float
    tolerance: float
    first_mismatch: int | None
    mismatch_gap: float | None


def worst_of(checks: Sequence[Greedy]) -> Greedy:
    """One verdict on several batches: the largest gap, and the earliest token that differs."""
    differing = [check for check in checks if check.first_mismatch is not None]
    first = min(differing, key=lambda check: check.first_mismatch or 0, default=checks[0])
    widest = max(checks, key=lambda check: check.max_logit_diff / check.tolerance)
    return dataclasses.replace(
        widest,
        equal=all(check.equal for check in checks),
        first_mismatch=first.first_mismatch,
        mismatch_gap=first.mismatch_gap,
    )


@functools.partial(jax.jit, static_argnums=0)
def full_logits(model: LanguageModel, params: Params, tokens: Array) -> Array:
    """Logits [B, L, V] of whole rows in one forward, without the cache that generation used."""
    return model.logits(params, tokens, model.init_cache(*tokens.shape))[0]


def check_greedy(pair: Pair, tokens: Array, plain: Array, starts: Any, ends: Any) -> Greedy:
    """Judge the new tokens of greedy speculative decoding.

    Args:
      pair: with float32 parameters.
      tokens: [B, L], emitted by speculative decoding at temperature 0.
      plain: [B, L], by plain decoding.
      starts: [B], where the new tokens of each row start.
      ends: [B], where they end.

    Returns:
      The comparison.
    """
    logits = np.asarray(full_logits(pair.target, pair.target_params, tokens))[:, :-1]
    after = np.arange(1, tokens.shape[1])[None, :]
    since_start = after - np.asarray(starts)[:, None]
    new = (since_start >= 0) & (after < np.asarray(ends)[:, None])
    emitted = np.asarray(tokens)[:, 1:]
    own = np.take_along_axis(logits, emitted[..., None], axis=2)[..., 0]
    gaps = np.where(new, logits.max(axis=2) - own, 0.0)
    tolerance = ROUNDING * float(np.abs(logits[new]).max())
    differing = np.argwhere(new & (emitted != np.asarray(plain)[:, 1:]))
    first = min((tuple(place) for place in differing), key=lambda place: since_start[place], default=None)
    return Greedy(
        equal=bool(gaps.max() <= tolerance),
        max_logit_diff=float(gaps.max()),
        tolerance=tolerance,
        first_mismatch=None if first is None else int(since_start[first]),
        mismatch_gap=None if first is None else float(gaps[first]),
    )
