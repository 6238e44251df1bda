"""Many rounds in one program: `lax.while_loop` to generate, `lax.scan` to keep what every round did."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from flashspec.checks import at_least
from flashspec.language_model import Cache, Params
from flashspec.speculative.rounds import round_step
from flashspec.speculative.state import RoundInfo, State


def with_settings(state: State, settings: Any) -> State:
    """The state with other settings, or None to keep them out of what a loop carries or a program returns."""
    return dataclasses.replace(state, settings=settings)


def with_params(state: State, target_params: Params, drafter: Any) -> State:
    """The state with these parameters, or None so that a program which returns it need not copy a model."""
    return with_settings(state, dataclasses.replace(state.settings, target_params=target_params, drafter=drafter))


def split_caches(state: State) -> tuple[State, tuple[Cache, Cache]]:
    """The state without its caches, and the caches: a compiled program may overwrite (donate) these alone."""
    rest = dataclasses.replace(state, target_cache=None, draft_cache=None)
    return rest, (state.target_cache, state.draft_cache)


def run(state: State, *, max_rounds: Array | int | None = None, rounds_per_iteration: int = 1) -> State:
    """Rounds until every row is finished, as one `lax.while_loop`; nothing is read by Python.

    Args:
      state: from `init_state`.
      max_rounds: stop after about this many rounds (the next multiple of `rounds_per_iteration`); None for no limit.
      rounds_per_iteration: rounds between two looks at the loop's condition, each of which costs a GPU a round trip to
        the host where the loop is not recorded (`flashspec.loop_compiler_options`). Rounds after the last row finished
        change nothing, and cost their time.

    Returns:
      The state after the last round; `finish_reason` [B] is RUNNING only where `max_rounds` ended the loop first.

    Raises:
      ValueError: rounds_per_iteration is below 1.
    """
    at_least("rounds_per_iteration", rounds_per_iteration, 1)
    settings = state.settings
    limit = jnp.iinfo(jnp.int32).max if max_rounds is None else max_rounds

    def unfinished(carry: tuple[State, Array]) -> Array:
        return carry[0].running.any() & (carry[1] < limit)

    def iteration(carry: tuple[State, Array]) -> tuple[State, Array]:
        inner = with_settings(carry[0], settings)
        for _ in range(rounds_per_iteration):
            inner, _ = round_step(inner)
        return with_settings(inner, None), carry[1] + rounds_per_iteration

    # The settings stay outside of the carry: the loop reads the parameters where they lie.
    start = with_settings(state, None), jnp.zeros((), jnp.int32)
    return with_settings(lax.while_loop(unfinished, iteration, start)[0], settings)


def speculative_trace(state: State, num_rounds: int) -> tuple[State, RoundInfo]:
    """A fixed number of rounds as one `lax.scan`, with what each of them did.

    Args:
      state: from `init_state`.
      num_rounds: how many rounds to run; rounds of finished rows change nothing.

    Returns:
      The state after them, and a `RoundInfo` whose fields have a leading axis of num_rounds.

    Raises:
      ValueError: num_rounds is below 1.
    """
    at_least("num_rounds", num_rounds, 1)
    settings = state.settings

    def one(carry: State, _: None) -> tuple[State, RoundInfo]:
        after, info = round_step(with_settings(carry, settings))
        return with_settings(after, None), info

    final, infos = lax.scan(one, with_settings(state, None), None, length=num_rounds)
    return with_settings(final, settings), infos
