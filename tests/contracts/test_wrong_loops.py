"""Loops with one plausible mistake each: the assertions of `test_exactness` see every one of them."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.language_model import LanguageModel
from flashspec.speculative import Draws, ModelDrafter, accept, init_state, round_step, rounds
from tests.contracts.round_law import Case, Cells, Start, assert_laws, check_caches, loop_laws
from tests.contracts.situations import at_temperatures, freely, starts_of, with_stop_tokens
from tests.mutants import mutant
from tests.table_models import Rules, TableModel, TokenCache, bigram, exact_law, log

COMBINATION = (2, "tokens", "tokens", "chain", "model", 3)
ONE_DRAFT = (1, *COMBINATION[1:])


def roll_by_prefix(logits, tokens, lengths):
    """A processor whose effect depends on the last token of the prefix and on its length."""
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    vocab = logits.shape[1]
    source = (jnp.arange(vocab, dtype=jnp.int32)[None, :] - last - lengths[:, None]) % vocab
    return jnp.take_along_axis(logits, source, axis=1)


def roll_by_prefix_twin(logits, prefix):
    return np.roll(logits, (prefix[-1] + len(prefix)) % len(logits))


def with_processor(combination):
    case = freely(combination)
    starts = starts_of(2, processor=roll_by_prefix_twin)
    return dataclasses.replace(case, starts=starts, processor=roll_by_prefix)


def with_rule(*edits, **names):
    """A round that uses a wrong chain rule."""
    return mutant(rounds, verify_chain=mutant(accept, *edits, **names).verify_chain).round_step


def with_edit(*edits):
    return mutant(rounds, *edits).round_step


class Wrong(NamedTuple):
    """A wrong round, and the situation in which it shows."""

    step: Callable
    situation: Callable
    combination: tuple = COMBINATION


RATIO = "coins * _at(q, tokens) < _at(p[:-1], tokens)"
RESIDUAL_Q = "jnp.pad(q, ((0, 1), (0, 0)))[rejected]"
IN_ORDER = "jnp.cumprod((keep & usable[:-1]).astype(jnp.int32)).astype(bool)"
WRONG_RULES = {
    "residual replaced by the target": with_rule(residual_weights=lambda p, q: p),
    "ratio inverted": with_rule((RATIO, "coins * _at(p[:-1], tokens) < _at(q, tokens)")),
    "residual from the drawn token's q only": with_rule(
        (RESIDUAL_Q, "jnp.pad(q * jax.nn.one_hot(tokens, q.shape[1], dtype=q.dtype), ((0, 1), (0, 0)))[rejected]")
    ),
    "candidates counted out of order": with_rule((IN_ORDER, "keep & usable[:-1]")),
    "bonus from row D - 1": with_rule(("p[rejected]", "p[jnp.minimum(rejected, len(tokens) - 1)]")),
}

ROLLED_BACK = "settings.target.rollback(target_cache, lengths - 1)"
REJECTED_TOO = (
    "settings.target.rollback(target_cache, lengths - (info.emitted > settings.draft_length).astype(jnp.int32))"
)
ONE_LESS = "settings.target.rollback(target_cache, lengths - 1 - (info.emitted > 1).astype(jnp.int32))"
WRONG_CACHES = {
    "rejected KV kept, the target's": with_edit((ROLLED_BACK, "target_cache")),
    "rejected KV kept, the rejected token's own": with_edit((ROLLED_BACK, REJECTED_TOO)),
    "position off by one": with_edit((ROLLED_BACK, ONE_LESS)),
}

DRAFT_KEPT = with_edit(("drafter.commit(draft_cache, lengths - 1)", "draft_cache"))

COINS = "uniforms=(draws.accept, draws.final)"
WRONG_DRAWS = {
    "accept coin equal to the draft draw": with_edit((COINS, "uniforms=(draws.draft, draws.final)")),
    "final draw equal to an accept coin": with_edit((COINS, "uniforms=(draws.accept, draws.accept[:, 0])")),
}

# The square of a law is its logits at half the temperature.
SHARPER = "drafts, proposal.probs**2 / (proposal.probs**2).sum(-1, keepdims=True),"
WRONG_TEMPERATURES = {
    "draft scored at another temperature": with_edit(("drafts, proposal.probs,", SHARPER)),
    "target scored at the draft's temperature": with_edit(
        ("SampledLaw(settings, settings.sampling)(", "SampledLaw(settings, settings.draft_sampling)(")
    ),
}

STOP_CUT = "jnp.where(stopped, first_stop + 1, allowed)"
FIRST_STOP = "first_stop = jnp.where(is_stop,"
BUDGET_CUT = "jnp.minimum(jnp.minimum(num_accepted + 1, first_flagged), budget)"
EARLY = "early = ends <"
WRONG_STOPS = {
    "bonus after a stop token": with_edit(
        (STOP_CUT, "jnp.where(stopped, jnp.minimum(first_stop + 2, allowed), allowed)")
    ),
    "drafted stop token goes unnoticed": with_edit(
        (FIRST_STOP, "first_stop = jnp.where(is_stop & (order == num_accepted[:, None]),")
    ),
    "minimum length by the confirmed prefix": with_edit((EARLY, "early = ends[:, :1] + 0 * ends <")),
    "minimum length one too short": with_edit((EARLY, "early = ends + 1 <")),
}
WRONG_BUDGETS = {
    "tokens past the budget": with_edit(
        (BUDGET_CUT, "jnp.minimum(num_accepted + 1, first_flagged)"), ("allowed == budget", "allowed >= budget")
    ),
}

ENDS = "ends = lengths[:, None] + jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]"
WRONG_PREFIXES = {
    "processor by the confirmed prefix": with_edit(
        (ENDS, "ends = lengths[:, None] + jnp.zeros_like(logits[:, :, 0], jnp.int32)")
    ),
    "processor without the drafts": with_edit(("(logits, drafted, lengths)", "(logits, state.tokens, lengths)")),
}

WRONG = {
    name: Wrong(step, *where)
    for steps, *where in (
        (WRONG_RULES, freely),
        (WRONG_CACHES, freely),
        (WRONG_DRAWS, freely),
        (WRONG_TEMPERATURES, at_temperatures, ONE_DRAFT),  # its laws are finer: halves stay halves at any temperature
        (WRONG_STOPS, with_stop_tokens),
        (WRONG_BUDGETS, freely),
        (WRONG_PREFIXES, with_processor),
    )
    for name, step in steps.items()
}


def assert_exact(case, step=round_step):
    assert_laws(case, loop_laws(case, step))


def test_the_right_loop_with_a_processor():
    assert_exact(with_processor(COMBINATION))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_fails(name):
    step, situation, combination = WRONG[name]
    case = situation(combination)
    with pytest.raises(AssertionError):
        assert_exact(case, step)


def test_rejected_keys_of_the_draft_alone_are_seen_in_its_cache():
    # They change what is proposed, and with it the speed; the rule keeps the law whatever is proposed.
    case = freely(COMBINATION)
    loop_laws(case, check=check_caches)
    assert_exact(case, DRAFT_KEPT)
    with pytest.raises(AssertionError):
        loop_laws(case, DRAFT_KEPT, check=check_caches)


# A model whose second token depends on the first new one, as its cache remembers it.
FIRST, AFTER = np.array([1 / 2, 1 / 2]), np.array([[3 / 4, 1 / 4], [1 / 4, 3 / 4]])


def remembers_first_new_token() -> TableModel:
    def init_cache(batch, capacity):
        return TokenCache(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))

    def apply(table, tokens, cache):
        rows = jnp.arange(tokens.shape[0])[:, None]
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        written = cache.tokens.at[rows, positions].set(tokens, mode="drop")
        row = jnp.where(positions == 0, 0, 1 + written[:, 1:2])
        return table[row], TokenCache(written, cache.length + tokens.shape[1])

    table = log(np.vstack([FIRST, AFTER]))
    return TableModel(
        LanguageModel(apply, init_cache, 2),
        table,
        lambda prefix: 0 if len(prefix) == 1 else 1 + prefix[1],
        lambda cache: np.zeros((len(cache.length), 0), int),
    )


def stale_case() -> Case:
    draft = bigram(np.tile([3 / 4, 1 / 4], (2, 1)))
    starts = [Start((0,), Rules(max_new=2))]
    drafter = ModelDrafter(draft.model, draft.params)
    return Case(remembers_first_new_token(), draft, drafter, "chain", 1, Cells(4, 12, 12), starts)


def law_of_pairs(law):
    return [law[pair] for pair in ((0, 0), (0, 1), (1, 0), (1, 1))]


def test_stale_keys_of_the_chapter():
    case = stale_case()
    right = law_of_pairs(loop_laws(case)[0])
    np.testing.assert_allclose(right, [3 / 8, 1 / 8, 1 / 8, 3 / 8], rtol=0, atol=1e-12)
    np.testing.assert_allclose(right, law_of_pairs(exact_law(case.target, (0,), case.starts[0].rules)))
    stale = law_of_pairs(loop_laws(case, WRONG["rejected KV kept, the rejected token's own"].step)[0])
    np.testing.assert_allclose(stale, [3 / 8, 1 / 8, 1 / 4, 1 / 4], rtol=0, atol=1e-12)


class PeakCache(NamedTuple):
    """A length, and the longest that it ever was."""

    length: jnp.ndarray
    peak: jnp.ndarray


def constant_model(probs) -> TableModel:
    """One law for every prefix; the cache only counts."""

    def init_cache(batch, capacity):
        return PeakCache(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def apply(table, tokens, cache):
        length = cache.length + tokens.shape[1]
        return jnp.broadcast_to(table, (*tokens.shape, 2)), PeakCache(length, jnp.maximum(cache.peak, length))

    return TableModel(LanguageModel(apply, init_cache, 2), log(probs), lambda prefix: 0, lambda cache: None)


def lengths_of_round(coins, step):
    """Row and cache lengths before, within and after one round from a prompt of 2 tokens with D = 3 drafts."""
    target, draft = constant_model([[1 / 2, 1 / 2]]), constant_model([[1.0, 0.0]])
    drafter = ModelDrafter(draft.model, draft.params)
    state = init_state(
        jax.random.key(0), target.model, target.params, np.array([[1, 1]]), np.array([2]),
        drafter=drafter, draft_length=3, max_new_tokens=8,
    )  # fmt: skip
    draws = Draws(jnp.zeros((1, 3)), jnp.asarray([coins], jnp.float32), jnp.asarray([0.5]))
    after = jax.jit(lambda state: step(state, draws=draws)[0])(state)
    caches = (state.target_cache, state.draft_cache), (after.target_cache, after.draft_cache)
    before, now = ([int(cache.length[0]) for cache in pair] for pair in caches)
    within = [int(cache.peak[0]) for cache in caches[1]]
    return int(after.lengths[0]), before, within, now, int(after.tokens[0, int(after.lengths[0]) - 1])


def assert_lengths_of_the_chapter(step):
    prompt, drafts = 2, 3
    length, before, within, now, pending = lengths_of_round([0.0, 0.9, 0.0], step)
    assert (length, before, within, now) == (prompt + 2, [prompt - 1] * 2, [prompt + drafts] * 2, [prompt + 1] * 2)
    assert pending == 1, "the correction"
    length, before, within, now, _ = lengths_of_round([0.0, 0.0, 0.0], step)
    full = prompt + drafts
    assert (length, before, within, now) == (full + 1, [prompt - 1] * 2, [full] * 2, [full] * 2)


def test_lengths_when_the_second_draft_is_rejected_and_when_all_are_accepted():
    assert_lengths_of_the_chapter(round_step)


@pytest.mark.parametrize("step", [*WRONG_CACHES.values(), DRAFT_KEPT], ids=[*WRONG_CACHES, "the draft's alone"])
def test_lengths_show_kept_keys(step):
    with pytest.raises(AssertionError):
        assert_lengths_of_the_chapter(step)
