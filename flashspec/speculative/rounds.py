"""One round of speculative decoding (33.6, algorithm 33.2): draft, verify, commit, roll both caches back."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.cache import Cache as KeyValueCache
from flashspec.checks import fail
from flashspec.language_model import Cache
from flashspec.sampling import SamplingParams, fold, probabilities
from flashspec.speculative.accept import NO_TOKEN, Verdict, verify_chain, verify_greedy, verify_match
from flashspec.speculative.drafters import Proposal, last_token, put
from flashspec.speculative.state import LENGTH, RUNNING, STOP, Draws, Processor, RoundInfo, Settings, State

RULES = ("chain", "match", "greedy")

# What a round's keys are folded with: no two kinds of draw share their bits.
DRAFT, ACCEPT, FINAL = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class SampledLaw:
    """Logits -> the distribution sampled from; one function for draft rows, verify rows, the bonus, plain decoding."""

    settings: Settings
    sampling: SamplingParams

    @property
    def vocab_size(self) -> int:
        """V, the target's vocabulary."""
        return self.settings.target.vocab_size

    def __call__(self, logits: Array, tokens: Array, lengths: Array) -> tuple[Array, Array]:
        """Logits [B, T, V'] whose row i conditions on tokens[b, : lengths[b] + i] -> probs [B, T, V], flags [B, T]."""
        logits = fit_vocabulary(logits, self.vocab_size)
        ends = lengths[:, None] + jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        if self.settings.processor is not None:
            rows = (process(self.settings.processor, logits[:, i], tokens, ends[:, i]) for i in range(logits.shape[1]))
            logits = jnp.stack(list(rows), axis=1)
        early = ends < self.settings.min_lengths[:, None]
        suppress = early[..., None] & self.settings.is_stop[None, None, :]
        return probabilities(logits, self.sampling, suppress=suppress)


def process(processor: Processor, logits: Array, tokens: Array, lengths: Array) -> Array:
    """The processor's logits [B, V]; it is shown each row's own prefix and nothing behind it."""
    inside = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    processed = processor(logits, jnp.where(inside, tokens, 0), lengths)
    if processed.shape != logits.shape:
        raise fail("processor", f"a result of shape {list(logits.shape)}", f"shape {list(processed.shape)}")
    return processed


def fit_vocabulary(logits: Array, vocab_size: int) -> Array:
    """Logits [..., V'] over the ids below vocab_size: later ids are cut off, missing ones have logit -inf."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, pad, constant_values=-jnp.inf)


def fresh_draws(keys: Array, counter: Array, draft_length: int) -> Draws:
    """The uniforms of each row's round number counter[B], from its own key alone: three streams, one fold each."""
    width = max(draft_length, 1)
    round_keys = fold(keys, counter)

    def stream(purpose: Array) -> Array:
        return jax.vmap(lambda key: jax.random.uniform(key, (width,), jnp.float32))(fold(round_keys, purpose))

    # All streams in one draw: on a GPU each draw is a kernel of its own.
    draft, accept, final = jax.vmap(stream)(jnp.array([DRAFT, ACCEPT, FINAL], jnp.int32))
    return Draws(draft[:, :draft_length], accept[:, :draft_length], final[:, 0])


def propose(state: State, uniforms: Array) -> Proposal:
    """The drafter's D tokens; without a drafter none, and D = 0."""
    settings = state.settings
    if settings.drafter is None:
        batch, vocab = state.lengths.shape[0], settings.target.vocab_size
        return Proposal(
            tokens=jnp.zeros((batch, 0), jnp.int32),
            probs=jnp.zeros((batch, 0, vocab), jnp.float32),
            usable=jnp.ones((batch, 0), bool),
            counted=jnp.ones(batch, bool),
            cache=state.draft_cache,
        )
    law = SampledLaw(settings, settings.draft_sampling)
    return settings.drafter.propose(state.draft_cache, state.tokens, state.lengths, uniforms, law)


def verify(rule: str, proposal: Proposal, target_probs: Array, draws: Draws) -> Verdict:
    """The verdict of one of the three exact rules on a proposal; target_probs is [B, D + 1, V]."""
    # The rules reject the id -1 unseen and draw from the target's own row.
    drafts = jnp.where(proposal.usable, proposal.tokens, NO_TOKEN)
    if rule == "greedy":
        return verify_greedy(drafts, target_probs)
    if rule == "match":
        own = jnp.concatenate([draws.accept, draws.final[:, None]], axis=1)
        return verify_match(None, drafts, target_probs, uniforms=own)
    return verify_chain(None, drafts, proposal.probs, target_probs, uniforms=(draws.accept, draws.final))


class Cut(NamedTuple):
    """How many of a round's candidates are committed, [B], and the finish reason after it, [B]."""

    emitted: Array
    finish_reason: Array


def cut(num_accepted: Array, is_stop: Array, flags: Array, budget: Array) -> Cut:
    """Committed = min(accepted + 1, budget, stop cut), and never a token of a flagged row.

    Args:
      num_accepted: [B] int32, accepted drafts; one more token follows them.
      is_stop: [B, D + 1] bool, candidates that are stop tokens.
      flags: [B, D + 1] int32, the finish reason of target rows that are no distribution; 0 for the others.
      budget: [B] int32, how many tokens the row may still get; 0 ends it by length.

    Returns:
      The cut. A stop token ends the row before the budget is looked at; a flagged row ends it only if it was reached.
    """
    width = is_stop.shape[1]
    order = jnp.arange(width, dtype=jnp.int32)[None, :]
    first_flagged = jnp.where(flags != 0, order, width).min(1)
    allowed = jnp.minimum(jnp.minimum(num_accepted + 1, first_flagged), budget)
    first_stop = jnp.where(is_stop, order, width).min(1)
    stopped = first_stop < allowed
    broken = (first_flagged < num_accepted + 1) & (allowed < budget)
    reason_of_flag = jnp.take_along_axis(flags, jnp.minimum(first_flagged, width - 1)[:, None], axis=1)[:, 0]
    reason = jnp.where(stopped, STOP, jnp.where(allowed == budget, LENGTH, jnp.where(broken, reason_of_flag, RUNNING)))
    return Cut(jnp.where(stopped, first_stop + 1, allowed), reason.astype(jnp.int32))


def overflowed(cache: Cache, lengths: Array) -> Array:
    """[B] bool: the cache has lost positions of the row (a full page pool), so that its logits are not the target's."""
    parts = jax.tree.leaves(cache, is_leaf=lambda part: isinstance(part, KeyValueCache))
    flags = [part.overflow for part in parts if isinstance(part, KeyValueCache)]
    return functools.reduce(jnp.logical_or, flags, jnp.zeros(lengths.shape, bool))


def round_step(state: State, *, draws: Draws | None = None) -> tuple[State, RoundInfo]:
    """Draft D tokens, verify them with one causal target forward over D + 1, commit, roll both caches back.

    The target reads the pending token and the D drafts, so that its row j is p( . | row, x_1..x_j) (33.6). Of the
    accepted drafts and the one token after them, min(accepted + 1, budget, stop cut) are committed, for the tokens and
    both caches alike; finished rows keep tokens, lengths and caches as they are.

    Args:
      state: from `init_state` or a round before.
      draws: uniforms that replace the row keys' own.

    Returns:
      The next state and what the round did.
    """
    settings, lengths = state.settings, state.lengths
    if draws is None:
        draws = fresh_draws(settings.keys, state.counter, settings.draft_length)
    proposal = propose(state, draws.draft)

    read = jnp.concatenate([last_token(state.tokens, lengths)[:, None], proposal.tokens], axis=1)
    logits, target_cache = settings.target.logits(settings.target_params, read, state.target_cache)
    drafted = put(state.tokens, lengths, proposal.tokens)
    target_probs, flags = SampledLaw(settings, settings.sampling)(logits, drafted, lengths)
    verdict = verify(settings.rule, proposal, target_probs, draws)

    order = jnp.arange(settings.draft_length + 1, dtype=jnp.int32)[None, :]
    candidates = put(jnp.pad(proposal.tokens, ((0, 0), (0, 1))), verdict.num_accepted, verdict.next_token[:, None])
    budget = jnp.where(overflowed(target_cache, lengths), 0, settings.max_lengths - lengths)
    emitted, reason = cut(verdict.num_accepted, settings.is_stop[candidates], flags, budget)
    emitted = jnp.where(state.running, emitted, 0)
    committed = order < emitted[:, None]
    chosen = jnp.take_along_axis(target_probs, candidates[..., None], axis=2)[..., 0]
    tested = committed[:, :-1] & proposal.counted[:, None]
    info = RoundInfo(
        tokens=jnp.where(committed, candidates, 0),
        logprobs=jnp.where(committed, jnp.log(jnp.where(committed, chosen, 1.0)), 0.0),
        emitted=emitted,
        draft_tokens=proposal.tokens,
        tested=tested,
        accepted=tested & (order[:, :-1] < verdict.num_accepted[:, None]),
        proposed=jnp.where(state.running & proposal.counted, settings.draft_length, 0).astype(jnp.int32),
        unusable=jnp.where(state.running, (~proposal.usable).sum(1, dtype=jnp.int32), 0),
        ran=state.running,
    )
    return advance(state, info, reason, target_cache, proposal.cache), info


def advance(state: State, info: RoundInfo, reason: Array, target_cache: Cache, draft_cache: Cache) -> State:
    """The state after a round: what it committed, and both caches rolled back to one position less than the row."""
    settings, lengths = state.settings, state.lengths + info.emitted
    drafter = settings.drafter
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, state.lengths, info.tokens),
        logprobs=put(state.logprobs, state.lengths, info.logprobs),
        lengths=lengths,
        finish_reason=jnp.where(state.running, reason, state.finish_reason),
        counter=state.counter + info.ran.astype(jnp.int32),
        target_cache=settings.target.rollback(target_cache, lengths - 1),
        draft_cache=draft_cache if drafter is None else drafter.commit(draft_cache, lengths - 1),
        totals=state.totals.plus(info),
    )
