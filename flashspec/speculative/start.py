"""The first state of a call: prefill, or what a former state holds."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.checks import is_concrete
from flashspec.language_model import Cache, LanguageModel, Params
from flashspec.speculative.arguments import Call, prepare
from flashspec.speculative.loop import with_params
from flashspec.speculative.state import LENGTH, RUNNING, Settings, State, Totals


def begin(call: Call) -> State:
    """The state before the first round: both caches hold prompt length - 1 positions, the last token is pending."""
    settings = call.settings()
    batch, prompt_size = call.prompt_tokens.shape
    inside = jnp.arange(prompt_size, dtype=jnp.int32)[None, :] < settings.prompt_lengths[:, None]
    prompt = jnp.where(inside, call.prompt_tokens, 0)
    tokens = jnp.pad(prompt, ((0, 0), (0, call.capacity - prompt_size)))
    target_cache, draft_cache = materialise(settings, prompt, settings.prompt_lengths, call.capacity)
    return State(
        settings=settings,
        tokens=tokens,
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        lengths=settings.prompt_lengths,
        finish_reason=jnp.full(batch, RUNNING, jnp.int32),
        counter=jnp.zeros(batch, jnp.int32),
        target_cache=target_cache,
        draft_cache=draft_cache,
        totals=Totals.zeros(batch, call.draft_length),
    )


def materialise(settings: Settings, tokens: Array, lengths: Array, capacity: int) -> tuple[Cache, Cache]:
    """Both caches filled with all but the last token of each row of tokens [B, P]."""
    before_last = tokens[:, :-1]
    target_cache = settings.target.fill(settings.target_params, before_last, lengths - 1, capacity)
    if settings.drafter is None:
        return target_cache, ()
    return target_cache, settings.drafter.init(before_last, lengths - 1, capacity)


def resume(call: Call, former: State, caches: tuple[Cache, Cache] | None) -> State:
    """A former state under the settings of a new call.

    Rows that ended by length go on if the new call gives them more; rows that ended otherwise stay as they are. The
    counters go on, so that a key may be used again.

    Args:
      call: the new call.
      former: the rows; its settings and caches are not read.
      caches: the former state's, if they serve the call (`caches_serve`); else None, and both are filled anew.
    """
    settings = call.settings()
    more = max(call.capacity - former.tokens.shape[1], 0)
    tokens, logprobs = (jnp.pad(array, ((0, 0), (0, more))) for array in (former.tokens, former.logprobs))
    if caches is None:
        caches = materialise(settings, former.tokens, former.lengths, tokens.shape[1])
    may_go_on = (former.finish_reason == RUNNING) | (former.finish_reason == LENGTH)
    reason = jnp.where(former.lengths < settings.max_lengths, RUNNING, LENGTH)
    return dataclasses.replace(
        former,
        settings=settings,
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=jnp.where(may_go_on, reason, former.finish_reason).astype(jnp.int32),
        target_cache=caches[0],
        draft_cache=caches[1],
        totals=Totals.zeros(former.lengths.shape[0], call.draft_length),
    )


def caches_serve(call: Call, state: State) -> bool:
    """Whether `call` can take over the caches of `state`: the same models and parameters filled them, no earlier call
    took them, and they have room for its drafts and tokens.
    """
    old = state.settings
    models = [(each.target_params, each.drafter) for each in (call, old)]
    alike = call.target == old.target and len(set(map(jax.tree.structure, models))) == 1
    # Arrays are compared by identity: reading their values would cost too much.
    alike = alike and all(map(operator.is_, *map(jax.tree.leaves, models)))
    roomy = call.draft_length <= old.draft_length and call.capacity <= state.tokens.shape[1]
    return alike and roomy and not any(map(_deleted, jax.tree.leaves((state.target_cache, state.draft_cache))))


def _deleted(leaf: Any) -> bool:
    return is_concrete(leaf) and isinstance(leaf, Array) and leaf.is_deleted()


def init_state(
    key: Array, target: LanguageModel, target_params: Params, prompt_tokens: Any, prompt_lengths: Any, **options: Any
) -> State:
    """The state before the first round, for `round_step`, `speculative_trace` and `run`.

    Args:
      key: as in `flashspec.generate.generate`, like all that follow.
      target: the model whose distribution is kept.
      target_params: its parameters.
      prompt_tokens: [B, P] integers.
      prompt_lengths: [B] integers in 1..P.
      **options: drafter, draft_length, rule, sampling, draft_sampling, processor, stop_tokens, min_new_tokens,
        max_new_tokens.

    Returns:
      A state whose caches hold prompt_lengths - 1 positions and have room for P + max_new_tokens + D.

    Raises:
      ValueError: an argument that does not fit.
      NotImplementedError: a key of another generator than threefry2x32.
    """
    call = prepare(key, target, target_params, prompt_tokens, prompt_lengths, **options)
    return with_params(_begin(call), call.target_params, call.drafter)


@jax.jit
def _begin(call: Call) -> State:
    return with_params(begin(call), None, None)
