"""What conditions act on: minimum lengths and processors per draft position, broken rows only where they are used."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.language_model import LanguageModel
from flashspec.sampling import NO_ADMISSIBLE, NONFINITE, SamplingParams
from flashspec.speculative import rounds
from flashspec.speculative.drafters import ModelDrafter
from flashspec.speculative.loop import run
from flashspec.speculative.rounds import round_step
from flashspec.speculative.start import init_state
from flashspec.speculative.state import LENGTH, RUNNING, STOP, Draws, State
from tests.mutants import mutant
from tests.speculative import toys

GREEDY = SamplingParams(temperature=0.0)
PROMPT, LENGTHS = jnp.array([[0, 1, 2, 0], [1, 1, 0, 0]], jnp.int32), jnp.array([4, 2], jnp.int32)
KEEP, REJECT = 0.0, 1 - 2**-23
step = jax.jit(round_step)
DRAFTED = jnp.array([[0, 1, 2, 0, 2, 1, 1, 0], [1, 1, 0, 2, 2, 0, 0, 0]], jnp.int32)


def start(model: LanguageModel | None = None, **options: Any) -> State:
    options = {"draft_length": 3, "max_new_tokens": 9, **options}
    drafter = ModelDrafter(toys.model(), toys.table(2))
    return init_state(
        jax.random.key(3), model or toys.model(), toys.table(1), PROMPT, LENGTHS, drafter=drafter, **options
    )


def law_of(state: State, module: Any = rounds) -> tuple[np.ndarray, np.ndarray]:
    """The law of the four rows that follow the prompts in DRAFTED, from equal logits."""
    law = module.SampledLaw(state.settings, state.settings.sampling)
    probs, flags = law(jnp.zeros((2, 4, 3)), DRAFTED, LENGTHS)
    return np.asarray(probs), np.asarray(flags)


def assert_minimum_length(module: Any = rounds) -> None:
    """With two new tokens at least, the stop token 1 is ruled out in the first two rows and in no other."""
    probs, _ = law_of(start(stop_tokens=(1,), min_new_tokens=2), module)
    np.testing.assert_array_equal(probs[..., 1] > 0, [[False, False, True, True]] * 2)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)


ENDS = "ends = lengths[:, None] + jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]"


@pytest.mark.parametrize("wrong", [ENDS + " + 1", ENDS + " * 0", "ends = jnp.full(logits.shape[:2], 3, jnp.int32)"])
def test_minimum_length_counts_each_row_s_own_prefix(wrong: str) -> None:
    assert_minimum_length()
    with pytest.raises(AssertionError):
        assert_minimum_length(mutant(rounds, (ENDS, wrong)))


def no_repeats(logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Rules out the last token of the prefix; reads the whole buffer, so that what lies behind shows as well."""
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    total = tokens.sum(1)[:, None].astype(logits.dtype)
    return jnp.where(jnp.arange(3)[None, :] == last, -jnp.inf, logits + total * jnp.arange(3.0)[None, :])


def assert_processed(module: Any = rounds) -> None:
    probs, _ = law_of(start(processor=no_repeats), module)
    for b in range(2):
        for i in range(4):
            prefix = np.asarray(DRAFTED)[b, : int(LENGTHS[b]) + i]
            scores = np.exp(prefix.sum() * (np.arange(3.0) - 2)) * (np.arange(3) != prefix[-1])
            np.testing.assert_allclose(probs[b, i], scores / scores.sum(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (ENDS, ENDS + " - 1"),
        ("tokens, ends[:, i])", "tokens, ends[:, 0])"),
        ("jnp.where(inside, tokens, 0)", "tokens"),
    ],
)
def test_a_processor_sees_the_prefix_of_each_position(right: str, wrong: str) -> None:
    assert_processed()
    with pytest.raises(AssertionError):
        assert_processed(mutant(rounds, (right, wrong)))


def test_a_processor_that_changes_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`processor`: expected a result of shape \[2, 3\], got shape \[2, 2\]"):
        law_of(start(processor=lambda logits, tokens, lengths: logits[:, :2]))


@functools.cache
def poisoned(value: float) -> LanguageModel:
    """A target whose logits are broken where they predict row 0's position 6 and row 1's position 4."""
    model = toys.model()

    def apply(params: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        logits, cache = model.apply(params, tokens, cache)
        ahead = tokens.shape[1] - 1 - jnp.arange(tokens.shape[1], dtype=jnp.int32)
        predicted = cache.length[:, None] - ahead[None, :]
        return jnp.where((predicted == (LENGTHS + 2)[:, None])[..., None], value, logits), cache

    return dataclasses.replace(model, apply=apply)


def outcome(
    coins: tuple[float, ...],
    value: float = np.nan,
    budget: int = 9,
    stop: bool = False,
    one_round: Callable[..., Any] = step,
) -> tuple[list[int], list[int]]:
    """(emitted, finish reason) of a round in which the coins decide and the third target row is broken."""
    state = start(poisoned(value), draft_sampling=GREEDY)
    limits = dataclasses.replace(state.settings, max_lengths=LENGTHS + budget, is_stop=jnp.full(3, stop))
    state = dataclasses.replace(state, settings=limits)
    draws = Draws(jnp.full((2, 3), 0.5), jnp.tile(jnp.array(coins, jnp.float32)[None], (2, 1)), jnp.full(2, 0.5))
    after, info = one_round(state, draws=draws)
    emitted = np.asarray(info.emitted)
    for b in range(2):
        row = np.asarray(after.tokens)[b]
        assert (row[int(LENGTHS[b]) + emitted[b] :] == 0).all()
        assert ((row >= 0) & (row < 3)).all()
    np.testing.assert_array_equal(after.target_cache.length, np.asarray(after.lengths) - 1)
    np.testing.assert_array_equal(np.asarray(after.logprobs) <= 0, True)
    return emitted.tolist(), np.asarray(after.finish_reason).tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_row_stops_only_a_row_that_reaches_it(value: float) -> None:
    assert outcome((KEEP, KEEP, KEEP), value) == ([2, 2], [NONFINITE] * 2)
    assert outcome((KEEP, REJECT, KEEP), value) == ([2, 2], [RUNNING] * 2)
    assert outcome((REJECT, KEEP, KEEP), value) == ([1, 1], [RUNNING] * 2)
    assert outcome((KEEP, KEEP, KEEP), value, budget=2) == ([2, 2], [LENGTH] * 2)
    assert outcome((KEEP, KEEP, KEEP), value, stop=True) == ([1, 1], [STOP] * 2)


def test_ignored_flags_are_seen() -> None:
    ignoring = mutant(
        rounds, ("settings.is_stop[candidates], flags, budget", "settings.is_stop[candidates], flags * 0, budget")
    )
    with pytest.raises(AssertionError):
        assert outcome((KEEP, KEEP, KEEP), one_round=ignoring.round_step) == ([2, 2], [NONFINITE] * 2)


def test_a_row_with_nothing_admissible_stops_before_a_token() -> None:
    allowed = jnp.array([[True] * 3, [False] * 3])
    after, info = step(start(sampling=SamplingParams(allowed_tokens=allowed)))
    assert int(info.emitted[0]) >= 1
    assert int(info.emitted[1]) == 0
    np.testing.assert_array_equal(after.finish_reason, [RUNNING, NO_ADMISSIBLE])
    np.testing.assert_array_equal(after.tokens[1], [1, 1] + [0] * 14)


def test_a_row_whose_pages_ran_out_stops_by_length() -> None:
    ended = jax.jit(run)(start(toys.short_of_pages(9), sampling=GREEDY))
    lengths = np.asarray(ended.lengths)
    np.testing.assert_array_equal(ended.finish_reason, [LENGTH, LENGTH])
    assert (lengths > LENGTHS).all()
    assert (lengths < LENGTHS + 9).any()
    for b in range(2):  # what was emitted is what a full pool gives
        row = np.asarray(ended.tokens)[b, : lengths[b]].tolist()
        for end in range(int(LENGTHS[b]), lengths[b]):
            assert row[end] == np.argmax(toys.table(1)[toys.toy("paged").row_of(row[:end])])
