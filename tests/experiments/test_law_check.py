"""The law check: pools, distances, bounds, and a wrong rule that it catches through the compiled round."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import law_check
from experiments.law_check import Law, LawPlan, Prefix, pool, simulated_bound, total_variation
from experiments.pairs import Pair
from flashspec.sampling import SamplingParams
from flashspec.speculative import ModelDrafter
from tests.speculative import toys

PLAN = LawPlan(rows=256, dispatches=32, simulations=2000, seed=0)


def tiny_pair() -> Pair:
    """Two tables over 5 tokens that disagree."""
    absent: Any = None
    return Pair(
        absent,
        toys.model(vocab=5),
        toys.table(0, 5),
        ModelDrafter(toys.model(vocab=5), toys.table(1, 5)),
        absent,
        jnp.float32,
    )


def laws(sampling: SamplingParams) -> list[Law]:
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12) % 5
    return law_check.measure_laws(tiny_pair(), tokens, np.array([12, 9], np.int32), 2, 2, "chain", sampling, PLAN)


def test_the_round_follows_the_law_and_the_wrong_rule_does_not() -> None:
    for law in laws(SamplingParams()):
        assert law.draws == 256 * 32
        assert law.tv <= law.bound
        assert law.shows_control
        assert law.control_tv > law_check.CONTROL_OVER_BOUND * law.bound
        assert law.control_tv == pytest.approx(law.control_expected, abs=2 / math.sqrt(law.control_draws))


def test_a_certain_token_has_neither_a_distance_nor_a_control() -> None:
    for law in laws(SamplingParams(temperature=0.0)):
        assert law.is_certain
        assert (law.tv, law.bound, law.in_bounds) == (0.0, 0.0, 0.0)
        assert not law.shows_control
        assert dataclasses.replace(law, tv=1e-4).in_bounds == math.inf


def test_prefixes_are_beginnings_of_the_prompts() -> None:
    tokens = np.arange(60, dtype=np.int32).reshape(2, 30) % 5
    found = law_check.find_candidates(tiny_pair(), tokens, np.array([30, 3]), 1, "chain", SamplingParams())
    assert [len(prefix.tokens) for prefix in found.prefixes] == [*range(8, 25), 3]
    assert found.prompts == [0] * 17 + [1]
    for prompt, prefix in zip(found.prompts, found.prefixes, strict=True):
        np.testing.assert_array_equal(prefix.tokens, tokens[prompt, : len(prefix.tokens)])
    assert {found.prompts[row] for row in found.choose(2)} == {0, 1}


def test_rare_tokens_are_pooled() -> None:
    probs = np.array([0.5, 0.004, 0.3, 0.006, 0.19])
    pooled, groups = pool(probs, 10_000)
    np.testing.assert_allclose(pooled, [0.5, 0.3, 0.19, 0.01])
    np.testing.assert_allclose(np.array([1, 2, 3, 4, 5]) @ groups, [1, 3, 5, 6])
    assert pool(probs, 10**6)[0].size == 5  # every p is above 1 / 1000


def test_a_flat_law_is_not_pooled_away() -> None:
    flat = np.full(1000, 1e-3)
    pooled, groups = pool(flat, 10_000)
    assert pooled.size == 1 / law_check.POOL
    assert pooled.max() <= law_check.POOL + 1e-3
    np.testing.assert_array_equal(groups.sum(axis=1), 1.0)
    # One pool of all rare tokens, as for a law with few of them, would see nothing here.
    half = np.where(np.arange(1000) < 500, 2e-3, 0.0)
    assert total_variation(half @ groups, pooled) == pytest.approx(0.5)
    assert total_variation(half @ np.ones((1000, 1)), np.ones(1)) == pytest.approx(0.0)


def test_total_variation() -> None:
    assert total_variation(np.array([0.5, 0.5, 0.0]), np.array([0.2, 0.5, 0.3])) == pytest.approx(0.3)


def test_the_bound_is_that_of_a_coin() -> None:
    # |heads / n - 1/2| of a fair coin: the most extreme of 2000 samples is at 3 to 5 deviations, 1 / (2 sqrt n).
    plan = LawPlan(rows=100, dispatches=100, simulations=2000, seed=1)
    in_deviations = simulated_bound(np.array([0.5, 0.5]), plan) * 2 * math.sqrt(plan.draws)
    assert 3.0 < in_deviations < 5.0
    wrong = simulated_bound(np.array([0.5, 0.5]), dataclasses.replace(plan, dispatches=1)) * 2 * math.sqrt(plan.draws)
    assert not wrong < 5.0  # the noise of fewer draws


def test_the_wrong_rule_s_law() -> None:
    prefix = Prefix(np.array([1]), np.array([0.6, 0.4]), np.array([0.2, 0.8]))
    # min(p, q) = (0.2, 0.4); the 0.4 that is rejected is drawn from p and not all given to token 0.
    np.testing.assert_allclose(prefix.control_probs, [0.2 + 0.4 * 0.6, 0.4 + 0.4 * 0.4])
    assert prefix.control_distance == pytest.approx(0.16)
    agreeing = dataclasses.replace(prefix, draft_probs=prefix.target_probs)
    assert agreeing.control_distance == pytest.approx(0.0)
