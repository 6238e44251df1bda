"""Eqs. 33.11, 33.14 and 33.15 against the chapter's numbers as exact fractions, and the choice of a draft length."""

import itertools
import math
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashspec import costs

CONDITIONAL = (F(9, 10), F(7, 10), F(1, 2))
probabilities = st.fractions(0, 1, max_denominator=12)


def quotient(alpha, draft_length):
    return (1 - alpha ** (draft_length + 1)) / (1 - alpha)


def tokens_by_enumeration(acceptance, goes_on, remaining):
    """E[N] from the definition: run over which drafts are accepted and which of them are stop tokens."""
    total = F(0)
    for outcome in itertools.product(["rejected", "stop", "goes on"], repeat=len(acceptance)):
        weight = math.prod(
            {"rejected": 1 - a, "stop": a * (1 - c), "goes on": a * c}[event]
            for event, a, c in zip(outcome, acceptance, goes_on, strict=True)
        )
        ended = next((i for i, event in enumerate(outcome) if event != "goes on"), len(outcome))
        total += weight * min(ended + 1, remaining)
    return total


@pytest.mark.parametrize(("alpha", "expected"), [(F(4, 5), F(369, 125)), (F(1), 4), (F(0), 1)])
def test_expected_tokens_of_a_constant_acceptance(alpha, expected):
    assert costs.expected_tokens(alpha, 3) == expected


def test_expected_tokens_is_a_sum_and_not_a_quotient():
    assert quotient(F(4, 5), 3) == F(369, 125), "the same number away from 1"
    near_one = 1 - 1e-9
    exact = float(costs.expected_tokens(F(near_one), 3))
    assert abs(costs.expected_tokens(near_one, 3) - exact) < 1e-14
    assert not abs(quotient(near_one, 3) - exact) < 1e-14
    assert costs.expected_tokens(1.0, 3) == 4
    with pytest.raises(ZeroDivisionError):
        quotient(F(1), 3)


def test_overall_acceptance_may_not_be_put_into_powers():
    accepted_over_proposed = sum(costs.survival(F(4, 5), 3)[1:]) / 3
    assert accepted_over_proposed == F(244, 375)
    wrong = costs.expected_tokens(accepted_over_proposed, 3)
    assert math.isclose(wrong, 2.3495, abs_tol=5e-5)
    assert not math.isclose(wrong, costs.expected_tokens(F(4, 5), 3), abs_tol=5e-5)


def test_expected_tokens_of_conditional_acceptances():
    assert costs.survival(CONDITIONAL) == [1, F(9, 10), F(63, 100), F(63, 200)]
    assert costs.expected_tokens(CONDITIONAL) == F(569, 200)
    assert [costs.expected_tokens(CONDITIONAL, remaining=left) for left in (0, 1, 2, 3)] == [
        0,
        1,
        F(19, 10),
        F(253, 100),
    ]
    assert (
        costs.expected_tokens(CONDITIONAL, remaining=4)
        == costs.expected_tokens(CONDITIONAL, remaining=99)
        == F(569, 200)
    )
    mean_in_powers = costs.expected_tokens(F(7, 10), 3)
    assert math.isclose(mean_in_powers, 2.533)
    assert mean_in_powers != F(569, 200)


@given(st.lists(st.tuples(probabilities, probabilities), max_size=3), st.integers(0, 5))
def test_expected_tokens_is_the_definition(positions, remaining):
    acceptance, goes_on = [a for a, _ in positions], [c for _, c in positions]
    got = costs.expected_tokens(acceptance, remaining=remaining, stop_survival=goes_on)
    assert got == tokens_by_enumeration(acceptance, goes_on, remaining)


def test_a_stop_token_cuts_the_round():
    got = costs.expected_tokens(CONDITIONAL, stop_survival=F(1, 2))
    assert got == tokens_by_enumeration(CONDITIONAL, [F(1, 2)] * 3, 9)
    assert got != costs.expected_tokens(CONDITIONAL)


@pytest.mark.parametrize(
    ("arguments", "keywords", "name"),
    [((1.5, 3), {}, "acceptance"), (([0.5, -0.1],), {}, "acceptance"), ((0.5,), {}, "draft_length"),
     (([0.5, 0.5], 3), {}, "acceptance"), ((0.5, -1), {}, "draft_length"), ((0.5, 3), {"remaining": -1}, "remaining"),
     ((0.5, 3), {"stop_survival": [1, 1]}, "stop_survival"), ((math.nan, 3), {}, "acceptance")],
)  # fmt: skip
def test_expected_tokens_refuses(arguments, keywords, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        costs.expected_tokens(*arguments, **keywords)


def test_expected_acceptance_of_each_rule():
    p, q = (F(1, 2), F(3, 10), F(1, 5)), (F(1, 5), F(1, 2), F(3, 10))
    assert costs.expected_acceptance("chain", p, q) == F(7, 10)
    assert costs.expected_acceptance("match", p, q) == F(1, 10) + F(3, 20) + F(3, 50)
    assert costs.expected_acceptance("greedy", p, q) == F(1, 5)
    assert costs.expected_acceptance("greedy", (F(2, 5), F(2, 5), F(1, 5)), q) == F(1, 5), "the first maximum"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5))
def test_matching_accepts_at_most_as_often_as_the_chain_rule(weights):
    p, q = ([F(each, sum(side) or 1) for each in side] for side in zip(*weights, strict=True))
    match, chain = (costs.expected_acceptance(rule, p, q) for rule in ("match", "chain"))
    assert match <= chain
    one_hot = [F(int(i == 0)) for i in range(len(p))]
    assert costs.expected_acceptance("match", p, one_hot) == costs.expected_acceptance("chain", p, one_hot) == p[0]


def test_expected_acceptance_takes_arrays_and_refuses_bad_ones():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    assert math.isclose(costs.expected_acceptance("chain", p, q), 0.7)
    with pytest.raises(ValueError, match="`rule`"):
        costs.expected_acceptance("typical", p, q)
    with pytest.raises(ValueError, match="`draft_probs`"):
        costs.expected_acceptance("chain", p, q[:2])
    with pytest.raises(ValueError, match="`target_probs`"):
        costs.expected_acceptance("chain", -p, q)


@pytest.mark.parametrize(
    ("verify", "with_k_forwards", "with_one_more"),
    [(12, F(369, 200), F(738, 425)), (30, F(369, 425), F(738, 875))],
)
def test_speculative_speedup(verify, with_k_forwards, with_one_more):
    round_costs = costs.RoundCosts(target_step=10, draft_step=1, verify=verify, overhead=1)
    assert costs.speculative_speedup(F(4, 5), 3, round_costs, draft_forwards=3) == with_k_forwards
    assert costs.speculative_speedup(F(4, 5), 3, round_costs) == with_one_more


def test_estimate_names_its_counts():
    round_costs = costs.RoundCosts(target_step=10, draft_step=1, verify={3: 12}, overhead=1)
    estimate = costs.estimate_round(F(4, 5), 3, round_costs)
    assert (estimate.draft_forwards, estimate.verified_tokens, estimate.round_time) == (4, 4, 17)
    assert estimate.time_per_token == F(17) / F(369, 125)
    assert estimate.speedup == 10 / estimate.time_per_token
    assert costs.estimate_round(F(4, 5), 3, round_costs, draft_forwards=0).round_time == 13


def test_more_acceptance_may_still_cost_more_per_token():
    scheme = {"A": F(12, 3), "B": F(20, 4)}
    assert min(scheme, key=scheme.get) == "A"
    assert costs.time_per_token([12] * 5, [3] * 5) < costs.time_per_token([20] * 5, [4] * 5)


def hill_climb(acceptance, round_costs, longest):
    best = costs.estimate_round(acceptance, 1, round_costs)
    for length in range(2, longest + 1):
        following = costs.estimate_round(acceptance, length, round_costs)
        if following.speedup <= best.speedup:
            return best
        best = following
    return best


def test_best_draft_length_scans_past_a_dip():
    staircase = {1: 10, 2: 16, 3: 16, 4: 16, 5: 16}
    round_costs = costs.RoundCosts(target_step=10, draft_step=F(1, 2), verify=staircase)
    best = costs.best_draft_length(F(9, 10), round_costs)
    speedups = {length: costs.speculative_speedup(F(9, 10), length, round_costs) for length in staircase}
    assert best.draft_length == max(speedups, key=speedups.get) == 5
    assert speedups[2] < speedups[1] < speedups[5], "not unimodal"
    assert hill_climb(F(9, 10), round_costs, 5).draft_length == 1 != best.draft_length


def test_best_draft_length_takes_a_callable_a_table_or_a_list():
    acceptance = [F(9, 10), F(1, 2), F(1, 10)]
    by_call = costs.RoundCosts(target_step=10, draft_step=1, verify=lambda length: 10 + length)
    best = costs.best_draft_length(acceptance, by_call)
    assert best == costs.best_draft_length(acceptance, by_call, draft_lengths=[3, 2, 1])
    table = costs.RoundCosts(target_step=10, draft_step=1, verify={length: 10 + length for length in range(1, 9)})
    assert best == costs.best_draft_length(acceptance, table), "lengths without an acceptance are not tried"
    free_draft = costs.best_draft_length(acceptance, by_call, draft_forwards=lambda length: 0)
    assert (free_draft.draft_forwards, best.draft_forwards) == (0, best.draft_length + 1)


def test_best_draft_length_prefers_the_shortest_on_ties():
    round_costs = costs.RoundCosts(target_step=1, draft_step=0, verify=1)
    assert costs.best_draft_length(0, round_costs, draft_lengths=[3, 1, 2]).draft_length == 1


def test_bad_costs_are_refused():
    good = costs.RoundCosts(target_step=10, draft_step=1, verify={2: 12})
    with pytest.raises(ValueError, match=r"`verify`: expected a time for draft length 3, got lengths \[2\]"):
        costs.estimate_round(0.5, 3, good)
    with pytest.raises(ValueError, match="`draft_lengths`"):
        costs.best_draft_length(0.5, costs.RoundCosts(10, 1, 12))
    with pytest.raises(ValueError, match="`draft_lengths`"):
        costs.best_draft_length(0.5, good, draft_lengths=[])
    with pytest.raises(ValueError, match="`target_step`"):
        costs.RoundCosts(0, 1, 12)
    with pytest.raises(ValueError, match="`draft_step`"):
        costs.RoundCosts(10, -1, 12)
    with pytest.raises(ValueError, match="`verify`"):
        costs.estimate_round(0.5, 3, costs.RoundCosts(10, 1, math.nan))
    with pytest.raises(ValueError, match="`draft_length`"):
        costs.estimate_round(0.5, 0, good)
