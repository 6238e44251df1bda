"""Drafters: what they propose, by which law, and what they do with vocabularies that differ from the target's."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.sampling import SamplingParams, probabilities
from flashspec.speculative import drafters
from flashspec.speculative.drafters import (
    Drafter,
    ModelDrafter,
    NgramDrafter,
    Proposal,
    ShallowDrafter,
    latest_longest_match,
)
from flashspec.speculative.rounds import fit_vocabulary, propose, round_step
from flashspec.speculative.start import init_state
from flashspec.speculative.state import Draws, State
from tests.mutants import mutant
from tests.speculative import toys

PROMPT, LENGTHS = jnp.array([[0, 1, 2, 0, 1], [1, 1, 0, 0, 0]], jnp.int32), jnp.array([5, 2], jnp.int32)
UNIFORMS = jnp.array([[0.1, 0.5, 0.9], [0.7, 0.3, 0.2]], jnp.float32)


def start(drafter: Any, **options: Any) -> State:
    options = {"draft_length": 3, "max_new_tokens": 8, **options}
    return init_state(jax.random.key(0), toys.model(), toys.table(1), PROMPT, LENGTHS, drafter=drafter, **options)


def match_slowly(row: list[int], max_n: int) -> int:
    """Where the longest suffix of at most max_n tokens last ended before, or -1."""
    for n in range(min(max_n, len(row) - 1), 0, -1):
        ends = [end for end in range(n - 1, len(row) - 1) if row[end - n + 1 : end + 1] == row[-n:]]
        if ends:
            return ends[-1]
    return -1


def copy_slowly(row: list[int], max_n: int, count: int) -> list[int]:
    """What the n-gram drafter proposes, token by token."""
    end = match_slowly(row, max_n)
    longer = list(row)
    for i in range(count):
        longer.append(longer[end + 1 + i] if end >= 0 else row[-1])
    return longer[len(row) :]


def rows_of_tokens() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 13, size=200)
    tokens = rng.integers(0, 3, size=(200, 16))
    return tokens.astype(np.int32), lengths.astype(np.int32)


def assert_matches(find: Callable[..., Any], max_n: int) -> None:
    tokens, lengths = rows_of_tokens()
    end, found = find(jnp.asarray(tokens), jnp.asarray(lengths), max_n)
    want = np.array([match_slowly(row[:length].tolist(), max_n) for row, length in zip(tokens, lengths, strict=True)])
    np.testing.assert_array_equal(np.where(found, end, -1), want)


@pytest.mark.parametrize("max_n", [1, 2, 4])
def test_ngram_match_equals_the_slow_search(max_n: int) -> None:
    assert_matches(latest_longest_match, max_n)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("positions < lengths[:, None] - 1", "positions < lengths[:, None]"),  # the suffix matches itself
        (
            "latest_of_longest.max(1), longest",
            "longest.argmax(1).astype(jnp.int32), longest",
        ),  # the earliest occurrence
        ("& (positions >= back)", ""),  # wraps around the buffer
    ],
)
def test_wrong_ngram_matches_are_seen(right: str, wrong: str) -> None:
    with pytest.raises(AssertionError):
        assert_matches(mutant(drafters, (right, wrong)).latest_longest_match, 3)


def test_ngram_copies_what_followed_and_goes_on_past_the_end() -> None:
    tokens, lengths = rows_of_tokens()
    law = type("Law", (), {"vocab_size": 3, "__call__": lambda *_: None})()
    uniforms = jnp.zeros((len(lengths), 4), jnp.float32)
    proposal = NgramDrafter(3).propose((), jnp.asarray(tokens), jnp.asarray(lengths), uniforms, law)
    want = [copy_slowly(row[:length].tolist(), 3, 4) for row, length in zip(tokens, lengths, strict=True)]
    np.testing.assert_array_equal(proposal.tokens, want)
    np.testing.assert_array_equal(proposal.probs, np.eye(3)[np.array(want)])
    np.testing.assert_array_equal(
        proposal.counted, [match_slowly(row[:n].tolist(), 3) >= 0 for row, n in zip(tokens, lengths, strict=True)]
    )


def test_a_row_without_a_match_counts_no_proposal() -> None:
    state = start(NgramDrafter(2))
    prompt = state.tokens.at[1, :2].set(jnp.array([0, 1], jnp.int32))
    _, info = round_step(dataclasses.replace(state, tokens=prompt))
    np.testing.assert_array_equal(info.proposed, [3, 0])
    np.testing.assert_array_equal(info.draft_tokens, [[2, 0, 1], [1, 1, 1]])
    assert not np.asarray(info.tested[1]).any()
    assert np.asarray(info.emitted).min() >= 1


def draft_slowly(table: jax.Array, temperature: float, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """ModelDrafter by whole forwards without a cache, for UNIFORMS: tokens [B, D] and probs [B, D, vocab]."""
    model, rows = toys.model(vocab=vocab), [PROMPT[b, : int(LENGTHS[b])].tolist() for b in range(2)]
    tokens, probs = np.zeros((2, 3), int), np.zeros((2, 3, vocab))
    for b, row in enumerate(rows):
        for i in range(3):
            logits, _ = model.apply(table, jnp.array([row], jnp.int32), model.init_cache(1, len(row)))
            scores = np.exp(np.asarray(logits[0, -1], np.float64) / temperature)
            probs[b, i] = scores / scores.sum()
            tokens[b, i] = np.searchsorted(np.cumsum(probs[b, i]), float(UNIFORMS[b, i]), side="right")
            row.append(int(tokens[b, i]))
    return tokens, probs


def assert_drafts(proposal: Proposal, temperature: float) -> None:
    tokens, probs = draft_slowly(toys.table(2), temperature, 3)
    np.testing.assert_array_equal(proposal.tokens, tokens)
    np.testing.assert_allclose(proposal.probs, probs, rtol=2e-6)
    assert np.asarray(proposal.usable).all()
    np.testing.assert_array_equal(proposal.cache.length, np.asarray(LENGTHS) - 1 + 4)


def test_model_drafter_samples_its_own_model_at_its_own_temperature() -> None:
    drafter = ModelDrafter(toys.model(), toys.table(2))
    state = start(drafter, draft_sampling=SamplingParams(temperature=2.0))
    assert_drafts(propose(state, UNIFORMS), 2.0)
    with pytest.raises(AssertionError):  # scored at the target's temperature
        assert_drafts(propose(start(drafter), UNIFORMS), 2.0)
    behind = state.draft_cache._replace(length=state.draft_cache.length - 1)
    with pytest.raises(AssertionError):  # a draft cache that is one position behind
        assert_drafts(propose(dataclasses.replace(state, draft_cache=behind), UNIFORMS), 2.0)


def test_missing_ids_are_fed_as_0_and_never_proposed() -> None:
    small = ModelDrafter(toys.model(vocab=2), toys.table(2, vocab=2))
    proposal = propose(start(small), UNIFORMS)
    assert proposal.probs.shape == (2, 3, 3)
    np.testing.assert_array_equal(proposal.probs[..., 2], 0)
    np.testing.assert_array_equal(start(small).draft_cache.tokens[0, :4], [0, 1, 0, 0])
    _, info = round_step(start(small), draws=Draws(UNIFORMS, jnp.zeros((2, 3)), jnp.full(2, 0.5)))
    assert np.asarray(info.draft_tokens).max() < 2


def test_padded_ids_are_masked_before_the_softmax() -> None:
    table = toys.table(2, vocab=5)
    large = ModelDrafter(toys.model(vocab=5), table)
    proposal = propose(start(large), UNIFORMS)
    cut_first = ModelDrafter(toys.model(vocab=3), table[:, :3])
    np.testing.assert_array_equal(proposal.probs, propose(start(cut_first), UNIFORMS).probs)
    logits = jnp.array([[0.0, 1.0, 2.0, 3.0, 4.0]])
    probs, _ = probabilities(logits, SamplingParams())
    masked_after = np.asarray(probs[:, :3])  # sums to less than 1
    masked_before = np.asarray(probabilities(fit_vocabulary(logits, 3), SamplingParams())[0])
    np.testing.assert_allclose(masked_before.sum(), 1, rtol=1e-6)
    assert masked_after.sum() < 0.2


def test_a_draft_row_without_a_law_is_rejected_for_the_target_s_own_draw() -> None:
    drafter = ModelDrafter(toys.model(), toys.table(2).at[:].set(jnp.nan))
    none, final = jnp.zeros((2, 0)), jnp.array([0.3, 0.8])
    _, plain = round_step(start(None), draws=Draws(none, none, final))
    for rule in ("chain", "match"):
        accept = jnp.tile(final[:, None], (1, 3)) if rule == "match" else jnp.zeros((2, 3))
        state, info = round_step(start(drafter, rule=rule), draws=Draws(UNIFORMS, accept, final))
        np.testing.assert_array_equal(info.emitted, [1, 1])
        np.testing.assert_array_equal(info.tokens[:, :1], plain.tokens)
        np.testing.assert_array_equal(info.unusable, [3, 3])
        assert (np.asarray(state.finish_reason) == -1).all()


def test_a_shallow_drafter_shares_the_vocabulary() -> None:
    shallow = ShallowDrafter(toys.model(), toys.table(2))
    assert_drafts(propose(start(shallow), UNIFORMS), 1.0)
    with pytest.raises(ValueError, match=r"`drafter`: expected the target's vocabulary of 3, got 5"):
        start(ShallowDrafter(toys.model(vocab=5), toys.table(2, vocab=5)))


def test_drafters_are_pytrees_that_keep_the_protocol() -> None:
    params = toys.table(2)
    for drafter, leaves in ((ModelDrafter(toys.model(), params), 1), (NgramDrafter(2), 0)):
        assert isinstance(drafter, Drafter)
        assert len(jax.tree.leaves(drafter)) == leaves
        assert jax.tree.map(lambda x: x, drafter) == drafter
    with pytest.raises(ValueError, match="methods init, propose and commit"):
        start(object())
    with pytest.raises(ValueError, match="`max_n`: expected an integer of at least 1"):
        NgramDrafter(0)
