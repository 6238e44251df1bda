"""What a decoding loop carries (State), what stays fixed (Settings), and what it reports (RoundInfo, Totals)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.language_model import Cache, LanguageModel, Params
from flashspec.sampling import SamplingParams

# Finish reasons; `sampling` holds the other two, NONFINITE = 2 and NO_ADMISSIBLE = 3.
RUNNING = -1
LENGTH = 0
STOP = 1

type Processor = Callable[[Array, Array, Array], Array]


class Draws(NamedTuple):
    """The uniforms in [0, 1) of one round; given to `round_step` they replace its own.

    Args:
      draft: [B, D], one per draft token.
      accept: [B, D], the coins (rule "match": the target's own draws).
      final: [B], the correction or the bonus.
    """

    draft: Array
    accept: Array
    final: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """What one call fixes: models, rule, sampling, and each row's limits.

    Args:
      target: the model whose distribution is kept.
      rule: "chain", "match" or "greedy".
      draft_length: D; 0 without a drafter.
      processor: (logits [B, V], tokens [B, L], lengths [B]) -> logits [B, V], or None.
      target_params: the target's parameters.
      drafter: a drafter, or None for plain decoding.
      sampling: what the target's rows are sampled with.
      draft_sampling: what the drafter's rows are sampled with.
      is_stop: [V] bool.
      prompt_lengths: [B] int32.
      min_lengths: [B] int32; a row shorter than this gets no stop token.
      max_lengths: [B] int32; a row this long is finished.
      keys: [B] typed keys, one per row.
    """

    target: LanguageModel = dataclasses.field(metadata={"static": True})
    rule: str = dataclasses.field(metadata={"static": True})
    draft_length: int = dataclasses.field(metadata={"static": True})
    processor: Processor | None = dataclasses.field(metadata={"static": True})
    target_params: Params
    drafter: Any
    sampling: SamplingParams
    draft_sampling: SamplingParams
    is_stop: Array
    prompt_lengths: Array
    min_lengths: Array
    max_lengths: Array
    keys: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundInfo:
    """What one round did; all zero or False on rows that were finished before it.

    Args:
      tokens: [B, D + 1] int32, what was committed, in order, then 0.
      logprobs: [B, D + 1] float32, their log-probabilities under the target's actual distribution, then 0.
      emitted: [B] int32, how many tokens were committed.
      draft_tokens: [B, D] int32, what was proposed, tested or not.
      tested: [B, D] bool, drafts whose test decided a committed token (not after a rejection, a stop or the budget).
      accepted: [B, D] bool, those of them that were committed.
      proposed: [B] int32, drafts proposed; 0 where the drafter had nothing to propose.
      unusable: [B] int32, draft rows without a usable law, which were rejected unseen.
      ran: [B] bool, rows that were unfinished when the round began.
    """

    tokens: Array
    logprobs: Array
    emitted: Array
    draft_tokens: Array
    tested: Array
    accepted: Array
    proposed: Array
    unusable: Array
    ran: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the rounds of a call.

    Args:
      rounds: [B] int32, rounds in which the row was unfinished.
      proposed: [B] int32, draft tokens proposed.
      emitted: [B] int32, tokens committed.
      unusable: [B] int32, draft rows without a usable law.
      accepted: [B, D] int32, drafts accepted, by position.
      tested: [B, D] int32, drafts tested, by position.
    """

    rounds: Array
    proposed: Array
    emitted: Array
    unusable: Array
    accepted: Array
    tested: Array

    @classmethod
    def zeros(cls, batch: int, draft_length: int) -> "Totals":
        """Nothing counted yet."""
        by_row, by_position = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, draft_length), jnp.int32)
        return cls(by_row, by_row, by_row, by_row, by_position, by_position)

    def plus(self, info: RoundInfo) -> "Totals":
        """With one more round."""
        return Totals(
            rounds=self.rounds + info.ran.astype(jnp.int32),
            proposed=self.proposed + info.proposed,
            emitted=self.emitted + info.emitted,
            unusable=self.unusable + info.unusable,
            accepted=self.accepted + info.accepted.astype(jnp.int32),
            tested=self.tested + info.tested.astype(jnp.int32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Rows of tokens and the caches that follow them; between rounds both caches hold lengths - 1 positions.

    Args:
      settings: what the call fixes.
      tokens: [B, L] int32, 0 past `lengths`.
      logprobs: [B, L] float32, of the emitted tokens, at their positions; 0 elsewhere.
      lengths: [B] int32, prompt and emitted tokens; the last of them is pending: emitted, but in no cache yet.
      finish_reason: [B] int32: RUNNING = -1, LENGTH = 0, STOP = 1, NONFINITE = 2, NO_ADMISSIBLE = 3.
      counter: [B] int32, rounds that the row has run; folded into its key, so that no draw is used twice.
      target_cache: the target's cache.
      draft_cache: the drafter's cache.
      totals: sums over the rounds so far.
    """

    settings: Settings
    tokens: Array
    logprobs: Array
    lengths: Array
    finish_reason: Array
    counter: Array
    target_cache: Cache
    draft_cache: Cache
    totals: Totals

    @property
    def running(self) -> Array:
        """[B] bool, rows that still take part in rounds."""
        return self.finish_reason == RUNNING
