"""Requests that come and go: a batch of slots, of which a finished one is given to the next request.

A request is prefilled as a batch of its own (`init_state`) and then put into its slot (`admit`), between two rounds of
those that run. Its key, its settings and its limits come along, so its tokens are the same in any slot, beside any
neighbours, whatever ran in the slot before.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.cache.rows import replace_rows, set_rows
from flashspec.sampling import SamplingParams
from flashspec.speculative.state import LENGTH, Settings, State

_CACHES = ("target_cache", "draft_cache")
_BY_ROW = ("tokens", "logprobs", "lengths", "finish_reason", "counter")
_LIMITS = ("prompt_lengths", "min_lengths", "max_lengths", "keys")
_SHARED = ("target", "rule", "draft_length", "processor")


def vacant(state: State) -> State:
    """The state with every row ended, so that rounds change nothing until requests are put into its slots.

    Args:
      state: from `init_state`, of any prompts; its sampling settings are arrays [B].

    Returns:
      The state, all of whose rows have finished by length.
    """
    return dataclasses.replace(state, finish_reason=jnp.full_like(state.finish_reason, LENGTH))


def admit(state: State, slots: ArrayLike, rows: State) -> State:
    """Put the rows of one state into slots of another, in place of what was there.

    Prompt, pending token, caches, limits, sampling settings, key and counter of a row come along; totals begin anew.
    Models, rule, draft length, processor and stop tokens are those of the batch.

    Args:
      state: B rows, between two rounds.
      slots: [A] integers, where each row of `rows` goes, each slot named once; a row whose slot is not in 0..B-1 is
        left out, so that one program serves fewer than A rows.
      rows: from `init_state`, A rows with the same token width (P + max_new_tokens + D) as `state`. Both have their
        sampling settings as arrays [B] and [A], and as many of them.

    Returns:
      The state with the rows in it.

    Raises:
      ValueError: another model, rule, draft length, processor or token width; sampling settings that are not one a row.
    """
    slots = checks.array("slots", slots)
    for name in _SHARED:
        if getattr(rows.settings, name) != getattr(state.settings, name):
            raise checks.fail("rows", f"the {name} of `state`", getattr(rows.settings, name))
    if rows.tokens.shape[1] != state.tokens.shape[1]:
        raise checks.fail("rows", f"tokens of width {state.tokens.shape[1]}", rows.tokens.shape[1])
    fields: dict[str, Any] = {name: set_rows(getattr(state, name), slots, getattr(rows, name)) for name in _BY_ROW}
    caches = {name: replace_rows(getattr(state, name), slots, getattr(rows, name)) for name in _CACHES}
    totals = jax.tree.map(lambda old, new: set_rows(old, slots, jnp.zeros_like(new)), state.totals, rows.totals)
    return dataclasses.replace(
        state, settings=_settings(state.settings, slots, rows.settings), totals=totals, **fields, **caches
    )


def _settings(own: Settings, slots: Array, new: Settings) -> Settings:
    batch, size = own.prompt_lengths.shape[0], new.prompt_lengths.shape[0]
    laws: dict[str, Any] = {
        name: _sampling(name, getattr(own, name), slots, getattr(new, name), batch, size)
        for name in ("sampling", "draft_sampling")
    }
    limits: dict[str, Any] = {name: set_rows(getattr(own, name), slots, getattr(new, name)) for name in _LIMITS}
    return dataclasses.replace(own, **laws, **limits)


def _sampling(
    name: str, own: SamplingParams, slots: Array, new: SamplingParams, batch: int, size: int
) -> SamplingParams:
    """Each setting with the new rows' values; what has no value for every row cannot take a row's own."""
    written = {}
    for field in dataclasses.fields(SamplingParams):
        held, given = getattr(own, field.name), getattr(new, field.name)
        if held is None and given is None:
            continue
        rank = 2 if field.name in ("logit_bias", "allowed_tokens") else 1
        for value, rows, whose in ((held, batch, "state"), (given, size, "rows")):
            if value is None or jnp.ndim(value) != rank or jnp.shape(value)[0] != rows:
                got = None if value is None else f"shape {list(jnp.shape(value))}"
                raise checks.fail(f"{whose}.settings.{name}.{field.name}", f"one value for each of {rows} rows", got)
        written[field.name] = set_rows(held, slots, given)
    return dataclasses.replace(own, **written)
