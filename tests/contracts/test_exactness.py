"""The whole decoding loop keeps the target's law exactly, over every rule, drafter and cache; wrong loops do not."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from flashspec.costs import expected_tokens
from flashspec.speculative import Draws, ModelDrafter, round_step
from tests.contracts.round_law import (
    Cells,
    as_draws,
    assert_laws,
    check_caches,
    check_logprobs,
    compiled,
    initial_state,
    loop_laws,
)
from tests.contracts.situations import at_temperatures, freely, with_stop_tokens
from tests.table_models import ROWS, history, next_law, random_laws

CACHES = ("tokens", "dense", "window", "paged")
FACTORS = {
    "draft_length": (1, 2, 3, 4),
    "cache": CACHES,
    "draft_cache": CACHES,
    "rule": ("chain", "match", "greedy"),
    "drafter": ("model", "shallow", "ngram"),
    "vocab": (2, 3),
}


def pairwise(factors):
    """Combinations in which every two values of two factors meet, each chosen to cover most pairs still missing."""
    names = list(factors)

    def pairs(combination):
        return set(itertools.combinations(zip(names, combination, strict=True), 2))

    everything = list(itertools.product(*factors.values()))
    missing, chosen = set().union(*map(pairs, everything)), []
    while missing:
        best = max(everything, key=lambda combination: len(pairs(combination) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def check(case, starts, state):
    check_caches(case, starts, state)
    check_logprobs(case, starts, state)


def assert_exact(combination):
    for situation in (freely, with_stop_tokens, at_temperatures):
        case = situation(combination)
        assert_laws(case, loop_laws(case, check=check))


COVER = pairwise(FACTORS)


def test_every_two_values_of_two_factors_meet():
    met = {pair for combination in COVER for pair in itertools.combinations(enumerate(combination), 2)}
    sizes = [len(values) for values in FACTORS.values()]
    assert len(met) == sum(a * b for a, b in itertools.combinations(sizes, 2))
    assert len(COVER) <= 24


@pytest.mark.parametrize("combination", COVER, ids=lambda values: "-".join(map(str, values)))
def test_pairwise(combination):
    assert_exact(combination)


# The draft's cache cannot meet the target's, so that here both are of one kind.
PRODUCT = [combination for combination in itertools.product(*FACTORS.values()) if combination[1] == combination[2]]


@pytest.mark.slow
@pytest.mark.parametrize("combination", PRODUCT, ids=lambda values: "-".join(map(str, values)))
def test_full_product(combination):
    assert_exact(combination)


@pytest.mark.parametrize("cache", CACHES)
def test_plain_decoding(cache):
    for situation in (freely, with_stop_tokens, at_temperatures):
        case = situation((1, cache, "tokens", "match", "model", 3))
        plain = dataclasses.replace(case, drafter=None, draft=None, rule="chain", cells=Cells(final=4))
        assert_laws(plain, loop_laws(plain, check=check))


@pytest.mark.parametrize("draft_vocab", [2, 4])
def test_a_draft_of_another_vocabulary(draft_vocab):
    """With two ids the third is residual mass; with four the last is masked, and may leave nothing to draw from."""
    case = freely((2, "dense", "tokens", "chain", "model", 3))
    draft = history(random_laws(7, ROWS, draft_vocab, 2))
    # Its cache holds 0 for ids that the draft lacks, so that only the target's is compared.
    case = dataclasses.replace(case, draft=None, drafter=ModelDrafter(draft.model, draft.params))
    assert_laws(case, loop_laws(case, check=check))


@pytest.mark.parametrize(("cache", "draft_cache"), [("dense", "window"), ("paged", "tokens")])
def test_rows_alone_are_rows_of_a_batch_bit_for_bit(cache, draft_cache):
    case = with_stop_tokens((2, cache, draft_cache, "chain", "model", 3))
    rounds, starts = 3, case.starts
    rng = np.random.default_rng(0)
    draws = [as_draws(rng.random((len(starts), 2 * case.drafts + 1))) for _ in range(rounds)]

    def after_rounds(rows):
        state = initial_state(case, [starts[row] for row in rows])
        for each in draws:
            state = compiled(round_step)(state, Draws(*(part[rows] for part in each)))
        return [np.asarray(a) for a in (state.tokens, state.lengths, state.finish_reason, state.logprobs)]

    together = after_rounds(np.arange(len(starts)))
    for row in (0, 4, 7):
        for whole, alone in zip(together, after_rounds(np.array([row])), strict=True):
            np.testing.assert_array_equal(alone[0], whole[row])
    shifted = after_rounds(np.roll(np.arange(len(starts)), 1))
    for whole, moved in zip(together, shifted, strict=True):
        np.testing.assert_array_equal(np.roll(moved, -1, axis=0), whole)


def survivals(case, start):
    """Probability that the first i drafts of a first round are accepted, i = 0..D, from eq. 33.11 at every prefix."""

    def after(prefix, left):
        if not left:
            return [1.0]
        p, q = (next_law(model, prefix, 0, start.rules) for model in (case.target, case.draft))
        kept = np.minimum(p, q) if case.rule == "chain" else p * q
        deeper = [after((*prefix, token), left - 1) for token in range(len(p))]
        return [1.0, *(kept @ np.array(deeper))]

    return np.array(after(start.prompt, case.draft_length))


@pytest.mark.parametrize("rule", ["chain", "match"])
def test_counts_of_a_round_are_the_acceptance_of_the_chapter(rule):
    case = freely((2, "tokens", "tokens", rule, "model", 3))
    sums = {}

    def count(case, starts, state):
        for row, start in enumerate(starts):
            if state.counter[row] == 1:
                counts = (np.ones(1), state.totals.emitted[row], state.totals.tested[row], state.totals.accepted[row])
                sums[start] = sums.get(start, 0) + np.concatenate([np.atleast_1d(part) for part in counts])

    def on_the_host(case, starts, state):
        count(case, starts, jax.device_get(dataclasses.replace(state, settings=None, target_cache=None)))

    loop_laws(case, check=on_the_host)
    for start, (rows, *totals) in sums.items():
        emitted, tested, accepted = np.split(np.array(totals) / rows, [1, 1 + case.draft_length])
        alive, budget = survivals(case, start), start.rules.max_new
        within = np.arange(case.draft_length) < budget
        np.testing.assert_allclose(tested, alive[:-1] * within, atol=1e-6)
        np.testing.assert_allclose(accepted, alive[1:] * within, atol=1e-6)
        conditional = np.divide(alive[1:], alive[:-1], out=np.zeros(case.draft_length), where=alive[:-1] > 0)
        np.testing.assert_allclose(emitted[0], expected_tokens(conditional, remaining=budget), atol=1e-6)
        overall = accepted.sum() / case.draft_length
        if len(set(conditional)) > 1 and budget > case.draft_length:
            assert abs(emitted[0] - expected_tokens(overall, case.draft_length)) > 1e-3, "a mean may not go into powers"
