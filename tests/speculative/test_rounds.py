"""One round: what is committed, where both caches stand, and what finished or broken rows do."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.sampling import NO_ADMISSIBLE, NONFINITE, SamplingParams
from flashspec.speculative import rounds
from flashspec.speculative.drafters import ModelDrafter, NgramDrafter
from flashspec.speculative.loop import run, speculative_trace
from flashspec.speculative.rounds import round_step
from flashspec.speculative.start import init_state
from flashspec.speculative.state import LENGTH, RUNNING, STOP, Draws, State
from tests.mutants import mutant
from tests.speculative import toys
from tests.table_models import TokenCache

GREEDY = SamplingParams(temperature=0.0)
PROMPT, LENGTHS = jnp.array([[0, 1, 2, 0], [1, 1, 0, 0]], jnp.int32), jnp.array([4, 2], jnp.int32)
KEEP, REJECT = 0.0, 1 - 2**-23
step = jax.jit(round_step)


def start(drafter: Any = None, model: Any = None, **options: Any) -> State:
    options = {"draft_length": 3, "max_new_tokens": 9, **options}
    return init_state(
        jax.random.key(3), model or toys.model(), toys.table(1), PROMPT, LENGTHS, drafter=drafter, **options
    )


def draws(*coins: float, batch: int = 2) -> Draws:
    """Draws whose coins decide one-hot proposals: KEEP keeps what the target allows, REJECT rejects."""
    row = jnp.array(coins, jnp.float32)
    return Draws(jnp.full((batch, row.size), 0.5), jnp.tile(row[None], (batch, 1)), jnp.full(batch, 0.5))


def recording(model: Any, log: list[np.ndarray]) -> Any:
    def rollback(cache: TokenCache, length: jax.Array) -> TokenCache:
        log.append(np.asarray(cache.length))
        return model.rollback(cache, length)

    return dataclasses.replace(model, rollback=rollback)


def assert_moves(state: State, coins: tuple[float, ...], emitted: int) -> None:
    """Exercise 33.11: from length L, caches L - 1, then L + D, then one less than the new length."""
    lengths, drafted = np.asarray(state.lengths), state.settings.draft_length
    np.testing.assert_array_equal(state.target_cache.length, lengths - 1)
    np.testing.assert_array_equal(state.draft_cache.length, lengths - 1)
    seen: list[np.ndarray] = []
    settings = state.settings
    recorded = dataclasses.replace(
        settings,
        target=recording(settings.target, seen),
        drafter=dataclasses.replace(settings.drafter, model=recording(settings.drafter.model, seen)),
    )
    after, info = round_step(dataclasses.replace(state, settings=recorded), draws=draws(*coins))
    assert len(seen) == 2
    for before_rollback in seen:
        np.testing.assert_array_equal(before_rollback, lengths + drafted)
    np.testing.assert_array_equal(info.emitted, [emitted, emitted])
    np.testing.assert_array_equal(after.lengths, lengths + emitted)
    np.testing.assert_array_equal(after.target_cache.length, lengths + emitted - 1)
    np.testing.assert_array_equal(after.draft_cache.length, lengths + emitted - 1)


@pytest.mark.parametrize(
    ("coins", "emitted"), [((KEEP, REJECT, KEEP), 2), ((KEEP, KEEP, KEEP), 4), ((REJECT, KEEP, KEEP), 1)]
)
def test_lengths_and_caches_of_exercise_33_11(coins: tuple[float, ...], emitted: int) -> None:
    model = toys.model()
    state = start(ModelDrafter(model, toys.table(2)), draft_sampling=GREEDY)
    assert_moves(state, coins, emitted)
    kept = dataclasses.replace(model, rollback=lambda cache, length: cache)
    for wrong in (
        dataclasses.replace(state.settings, target=kept),
        dataclasses.replace(state.settings, drafter=ModelDrafter(kept, toys.table(2))),
    ):
        if emitted < 4:  # a fully accepted round has nothing to reject
            with pytest.raises(AssertionError):
                assert_moves(dataclasses.replace(state, settings=wrong), coins, emitted)


def cut_slowly(num_accepted: int, is_stop: tuple, flags: tuple, budget: int) -> tuple[int, int]:
    """The rules of a cut, one token at a time."""
    if budget == 0:
        return 0, LENGTH
    for j in range(num_accepted + 1):
        if flags[j]:
            return j, flags[j]
        if is_stop[j]:
            return j + 1, STOP
        if j + 1 == budget:
            return j + 1, LENGTH
    return num_accepted + 1, RUNNING


CUTS = list(
    itertools.product(
        range(3),
        itertools.product((False, True), repeat=3),
        itertools.product((0, NONFINITE, NO_ADMISSIBLE), repeat=3),
        range(5),
    )
)


def assert_cuts(cut: Callable[..., Any]) -> None:
    accepted, stops, flags, budget = (np.array(column) for column in zip(*CUTS, strict=True))
    emitted, reason = cut(
        *(jnp.asarray(a.astype(bool if a.dtype == bool else np.int32)) for a in (accepted, stops, flags, budget))
    )
    want = np.array([cut_slowly(*case) for case in CUTS])
    np.testing.assert_array_equal(np.stack([emitted, reason], axis=1), want)


def test_every_cut_equals_the_slow_rules() -> None:
    assert_cuts(rounds.cut)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "stopped, first_stop + 1, allowed",
            "stopped, jnp.minimum(first_stop + 2, allowed), allowed",
        ),  # bonus after stop
        (
            "jnp.minimum(jnp.minimum(num_accepted + 1, first_flagged), budget)",
            "jnp.minimum(num_accepted + 1, first_flagged)",
        ),
        ("jnp.minimum(num_accepted + 1, first_flagged)", "num_accepted + 1"),
        ("(first_flagged < num_accepted + 1) & (allowed < budget)", "first_flagged < width"),
        ("stopped = first_stop < allowed", "stopped = (first_stop < allowed) & (allowed < budget)"),
    ],
)
def test_wrong_cuts_are_seen(right: str, wrong: str) -> None:
    with pytest.raises(AssertionError):
        assert_cuts(mutant(rounds, (right, wrong)).cut)


def visible(state: State) -> list[np.ndarray]:
    """What a state means: everything but what its caches hold past their lengths."""
    leaves = [state.tokens, state.logprobs, state.lengths, state.finish_reason, state.counter]
    leaves += jax.tree.leaves(state.totals)
    for cache in (state.target_cache, state.draft_cache):
        held = np.arange(cache.tokens.shape[1]) < np.asarray(cache.length)[:, None]
        leaves += [np.where(held, cache.tokens, -1), cache.length]
    return [np.asarray(leaf) for leaf in leaves]


def assert_finished_rows_stay(one_round: Callable[..., Any]) -> None:
    state = start(ModelDrafter(toys.model(), toys.table(2)), stop_tokens=(2,), max_new_tokens=4)
    state = jax.jit(run)(state)
    assert set(np.asarray(state.finish_reason).tolist()) <= {LENGTH, STOP}
    again, info = one_round(state)
    for before, after in zip(visible(state), visible(again), strict=True):
        np.testing.assert_array_equal(before, after)
    for leaf in (info.tokens, info.logprobs, info.emitted, info.tested, info.accepted, info.proposed, info.ran):
        assert not np.asarray(leaf).any()


def test_finished_rows_are_exact_no_ops() -> None:
    assert_finished_rows_stay(round_step)
    for edit in (
        ("emitted = jnp.where(state.running, emitted, 0)", ""),
        ("state.counter + info.ran.astype(jnp.int32)", "state.counter + 1"),
        ("settings.target.rollback(target_cache, lengths - 1)", "target_cache"),
    ):
        with pytest.raises(AssertionError):
            assert_finished_rows_stay(mutant(rounds, edit).round_step)


def test_rows_of_a_batch_accept_different_counts() -> None:
    state = start(ModelDrafter(toys.model(), toys.table(2)), draft_sampling=GREEDY)
    mixed = Draws(jnp.full((2, 3), 0.5), jnp.array([[KEEP, KEEP, KEEP], [REJECT, KEEP, KEEP]]), jnp.full(2, 0.5))
    after, info = step(state, draws=mixed)
    np.testing.assert_array_equal(info.emitted, [4, 1])
    np.testing.assert_array_equal(info.accepted, [[True] * 3, [False] * 3])
    np.testing.assert_array_equal(info.tested, [[True] * 3, [True, False, False]])
    np.testing.assert_array_equal(after.target_cache.length, np.asarray(LENGTHS) + np.array([3, 0]))


def test_counts_stop_at_the_stop_token_and_at_the_budget() -> None:
    state = start(ModelDrafter(toys.model(), toys.table(2)), draft_sampling=GREEDY, max_new_tokens=2)
    after, info = step(state, draws=draws(KEEP, KEEP, KEEP))
    np.testing.assert_array_equal(info.emitted, [2, 2])
    np.testing.assert_array_equal(info.tested, [[True, True, False]] * 2)
    np.testing.assert_array_equal(after.finish_reason, [LENGTH, LENGTH])
    first = int(info.tokens[0, 0])
    stopping = dataclasses.replace(state.settings, is_stop=jnp.arange(3) == first)
    after, info = step(dataclasses.replace(state, settings=stopping), draws=draws(KEEP, KEEP, KEEP))
    assert int(info.emitted[0]) == 1
    assert int(after.finish_reason[0]) == STOP
    np.testing.assert_array_equal(info.tested[0], [True, False, False])
    np.testing.assert_array_equal(after.tokens[0, 5:], 0)


def test_a_trace_stacks_what_every_round_did() -> None:
    state = start(NgramDrafter(2))
    final, infos = jax.jit(speculative_trace, static_argnums=1)(state, 5)
    assert infos.tokens.shape == (5, 2, 4)
    np.testing.assert_array_equal(infos.emitted.sum(0), final.lengths - LENGTHS)
    np.testing.assert_array_equal(infos.accepted.astype(jnp.int32).sum(0), final.totals.accepted)
    for row in range(2):
        emitted = [np.asarray(infos.tokens)[r, row, : int(infos.emitted[r, row])] for r in range(5)]
        np.testing.assert_array_equal(
            np.concatenate(emitted), final.tokens[row, int(LENGTHS[row]) : int(final.lengths[row])]
        )
    assert np.asarray(infos.proposed).max() == 3
