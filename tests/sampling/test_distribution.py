"""`probabilities` against the contract in plain Python, and that one program serves every row."""

import dataclasses
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.sampling import FINE, NO_ADMISSIBLE, NONFINITE, SamplingParams, distribution, nonfinite, probabilities
from tests.mutants import mutant
from tests.sampling import oracle

SIZE = 6
RANDOM = oracle.rows(300, SIZE, seed=0)


def params_of(rows: dict[str, Any]) -> SamplingParams:
    settings = {name: jnp.asarray(rows[name]) for name in ("temperature", "top_k", "top_p", "min_p")}
    return SamplingParams(**settings, logit_bias=jnp.asarray(rows["bias"]), allowed_tokens=jnp.asarray(rows["allowed"]))


def assert_follows_the_contract(module: ModuleType, rows: dict[str, Any]) -> None:
    """Every row whose decisions do not hang on a rounding has the oracle's probabilities, and exactly its zeros."""
    probs, flags = module.probabilities(
        jnp.asarray(rows["logits"]), params_of(rows), suppress=jnp.asarray(rows["suppress"])
    )
    assert not np.asarray(flags).any()
    compared = 0
    for b, got in enumerate(np.asarray(probs)):
        wanted, margin = oracle.distribution(**{name: value[b].tolist() for name, value in rows.items()})
        if margin > 1e-5:
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=0)
            compared += 1
    assert compared > 0.8 * len(probs)


def test_rows_follow_the_contract() -> None:
    assert_follows_the_contract(distribution, RANDOM)


WRONG = {
    "top-k keeps every tie": ("jnp.where((keys > least) | first_ties", "jnp.where((keys > least) | tied"),
    "ties to the higher id": (
        "jnp.cumsum(tied, axis=-1, dtype=jnp.int32)",
        "lax.cumsum(tied.astype(jnp.int32), axis=tied.ndim - 1, reverse=True)",
    ),
    "top-k keeps one too many": ("(top_k < vocab_size), top_k, ", "(top_k < vocab_size), top_k + 1, "),
    "top-p drops the token that crosses": ("jnp.sum(before < top_p", "jnp.sum(mass < top_p"),
    "top-p on everything, not on what top-k left": ("_token_ids(logits) < most, ", "True, "),
    "top-p before the temperature": (
        "tempered(_ordered_logits(falling))",
        "_weights(_ordered_logits(falling), jnp.max(logits, axis=-1, keepdims=True), 1.0)",
    ),
    "min-p of the total": ("weights >= _by_row(", "weights / weights.sum(axis=-1, keepdims=True) >= _by_row("),
    "the last maximum": (
        "jnp.min(jnp.where(candidates, token, candidates.shape[-1])",
        "jnp.max(jnp.where(candidates, token, -1)",
    ),
    "temperature multiplies": ("(logits - maximum) / temperature", "(logits - maximum) * temperature"),
    "bias subtracted": ("logits = logits + _by_token", "logits = logits - _by_token"),
    "allowed means forbidden": ("logits.ndim), logits, -jnp.inf)", "logits.ndim), -jnp.inf, logits)"),
    "suppressed means allowed": ("_by_token(suppress, logits.ndim)", "~_by_token(suppress, logits.ndim)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        assert_follows_the_contract(mutant(distribution, WRONG[name]), RANDOM)


@hypothesis.given(
    levels=st.lists(st.integers(0, 2), min_size=5, max_size=5), k=st.integers(1, 5), zero=st.sampled_from([0.0, -0.0])
)
@hypothesis.settings(max_examples=60)
def test_top_k_keeps_exactly_k_and_the_lower_ids_of_a_tie(levels: list[int], k: int, zero: float) -> None:
    logits = jnp.asarray([[level if level else zero for level in levels]], jnp.float32)
    probs, _ = probabilities(logits, SamplingParams(top_k=jnp.asarray([k])))
    kept = np.flatnonzero(np.asarray(probs)[0])
    assert kept.tolist() == sorted(sorted(range(5), key=lambda i: (-levels[i], i))[:k])


@pytest.mark.parametrize("size", [1, 4, 8])
def test_top_p_is_exact_where_weights_are(size: int) -> None:
    """Equal weights add up without rounding: keep the fewest that reach top_p, also where they reach it exactly."""
    for count in range(1, size + 1):
        for eps, wanted in ((0.0, count), (-0.01, count), (0.01, min(count + 1, size))):
            top_p = min(count / size + eps, 1.0)
            probs, _ = probabilities(jnp.zeros((1, size)), SamplingParams(top_p=top_p))
            share = np.float32(1) / np.float32(wanted)
            assert np.asarray(probs)[0].tolist() == [float(share)] * wanted + [0.0] * (size - wanted)


def test_top_p_of_one_keeps_the_rarest_token() -> None:
    logits = jnp.asarray([[0.0, -20.0, -40.0, -80.0]])
    for settings in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=jnp.asarray([1.0]))):
        assert np.asarray(probabilities(logits, settings)[0] > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-42, 1e-30, 1e-3, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = jnp.asarray([[1.0, 3e38, 3e38, -3e38, -jnp.inf]])
    probs = np.asarray(probabilities(logits, SamplingParams(temperature=temperature))[0])[0]
    wanted = [0, 1, 0, 0, 0] if temperature < 1e-38 else [0, 0.5, 0.5, 0, 0]
    np.testing.assert_allclose(probs, wanted, atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_any_floating_logits_give_float32(dtype: Any) -> None:
    probs, flags = probabilities(jnp.asarray([[1.0, 2.0]], dtype), SamplingParams())
    assert (probs.dtype, flags.dtype, flags.shape) == (jnp.float32, jnp.int32, (1,))


def test_64_bit_mode_gives_the_same_distribution(x64: None) -> None:
    logits = jnp.asarray(RANDOM["logits"]).astype(jnp.float64)
    probs, flags = probabilities(logits, params_of(RANDOM), suppress=jnp.asarray(RANDOM["suppress"]))
    assert (probs.dtype, flags.dtype) == (jnp.float32, jnp.int32)
    assert_follows_the_contract(distribution, RANDOM)


def test_positions_of_a_row_share_its_settings() -> None:
    """[B, T, V] is T separate positions; a suppression holds at its position, or for the row."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(3, 4, SIZE)), jnp.float32)
    suppress = jnp.asarray(rng.random((3, 4, SIZE)) < 0.3)
    params = params_of({name: value[:3] for name, value in oracle.rows(3, SIZE, seed=2).items()})
    for mask in (None, suppress, suppress[:, 0]):
        probs, flags = probabilities(logits, params, suppress=mask)
        assert (probs.shape, flags.shape) == ((3, 4, SIZE), (3, 4))
        for t in range(4):
            at = mask if mask is None or mask.ndim == 2 else mask[:, t]
            lone, lone_flags = probabilities(logits[:, t], params, suppress=at)
            np.testing.assert_allclose(probs[:, t], lone, rtol=1e-6)
            assert np.array_equal(flags[:, t], lone_flags)


# --- positions without a distribution ---

INF, NAN = float("inf"), float("nan")
FLAGGED = [
    ([0.0, NAN, 1.0], [0.0, 0.0, 0.0], [True, True, True], NONFINITE),
    ([0.0, INF, 1.0], [0.0, 0.0, 0.0], [True, True, True], NONFINITE),
    ([-INF, -INF, -INF], [0.0, 0.0, 0.0], [True, True, True], NONFINITE),
    ([0.0, NAN, 1.0], [0.0, 0.0, 0.0], [True, False, True], NONFINITE),
    ([3e38, 0.0, 0.0], [3e38, 0.0, 0.0], [True, True, True], NONFINITE),
    ([0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [False, False, False], NO_ADMISSIBLE),
    ([0.0, 0.0, 1.0], [-INF, -INF, -INF], [True, True, True], NO_ADMISSIBLE),
    ([-INF, 0.0, -INF], [0.0, 0.0, 0.0], [True, False, True], NO_ADMISSIBLE),
    ([-INF, 0.0, -INF], [0.0, 0.0, 0.0], [False, True, False], FINE),
]


def assert_flags(module: ModuleType) -> None:
    unbiased = [row for row in FLAGGED if not any(row[1])]
    for rows in (FLAGGED, unbiased):
        logits, bias, allowed, wanted = (np.asarray(column) for column in zip(*rows, strict=True))
        biases = None if rows is unbiased else jnp.asarray(bias, jnp.float32)
        params = SamplingParams(top_k=2, logit_bias=biases, allowed_tokens=jnp.asarray(allowed))
        probs, flags = module.probabilities(jnp.asarray(logits, jnp.float32), params)
        assert np.asarray(flags).tolist() == wanted.tolist()
        assert np.asarray(probs).sum(axis=-1).tolist() == (wanted == FINE).astype(float).tolist()


def test_positions_without_a_distribution_are_flagged_and_zero() -> None:
    assert_flags(distribution)
    assert (
        np.asarray(nonfinite(jnp.asarray([row[0] for row in FLAGGED], jnp.float32))).tolist()
        == [True] * 4 + [False] * 5
    )


@pytest.mark.parametrize(
    "edit",
    [
        ("jnp.isnan(logits) | (logits == jnp.inf), axis=-1) | ", "logits == jnp.inf, axis=-1) | "),
        ("logits, 0), flags", "logits, 0), 0 * flags"),
    ],
)
def test_a_flag_that_is_missed_is_noticed(edit: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        assert_flags(mutant(distribution, edit))


# --- one program ---


def test_new_settings_do_not_retrace() -> None:
    traces = []

    @jax.jit
    def traced(logits: jax.Array, params: SamplingParams) -> Any:
        traces.append(1)
        return probabilities(logits, params)

    for seed in range(4):
        rows = oracle.rows(5, SIZE, seed)
        traced(jnp.asarray(rows["logits"]), params_of(rows))
    for value in (0.0, 0.5):
        traced(jnp.zeros((5, SIZE)), SamplingParams(temperature=value, top_p=1 - value))
    assert len(traces) == 2, "one for settings by row, one for scalars"


def always_reached(text: str) -> str:
    """The computations of compiled HLO that run whatever a conditional decides."""
    bodies = {m[1]: m[0] for m in re.finditer(r"^(?:ENTRY )?%?([\w.-]+) .*?\{\n.*?^\}", text, re.M | re.S)}
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.M)
    assert entry is not None
    todo, seen = [entry[1]], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        called = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", bodies[name])
        todo += [other for other in called if other in bodies and other not in seen]
    return "\n".join(bodies[name] for name in seen)


def assert_sorts_only_on_request(compute: Callable[..., Any]) -> None:
    params = params_of({name: value[:4] for name, value in RANDOM.items()})
    text = jax.jit(compute).lower(jnp.zeros((4, SIZE)), params).compile().as_text()
    assert " sort(" in text
    assert " conditional(" in always_reached(text)
    assert " sort(" not in always_reached(text)


def test_the_sort_is_inside_a_conditional() -> None:
    assert_sorts_only_on_request(probabilities)
    eager = mutant(distribution, ("lax.cond(asked, cut, lambda: weights)", "jnp.where(asked, cut(), weights)"))
    with pytest.raises(AssertionError):
        assert_sorts_only_on_request(eager.probabilities)


def test_none_leaves_the_sort_out_of_the_program() -> None:
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(3, SIZE)), jnp.float32)

    def program(params: SamplingParams) -> str:
        return jax.jit(probabilities).lower(logits, params).compile().as_text()

    without = SamplingParams(temperature=0.7, top_k=None, top_p=None, min_p=0.1)
    assert " sort(" not in program(without)
    assert " sort(" in program(dataclasses.replace(without, top_k=0))
    assert " sort(" in program(dataclasses.replace(without, top_p=1.0))
    for keeps_all in ({"top_k": 0}, {"top_p": 1.0}, {"top_k": 0, "top_p": 1.0}):
        same = probabilities(logits, dataclasses.replace(without, **keeps_all))[0]
        np.testing.assert_array_equal(np.asarray(probabilities(logits, without)[0]), np.asarray(same))
    only_p = probabilities(logits, dataclasses.replace(without, top_p=0.5))[0]
    both = probabilities(logits, dataclasses.replace(without, top_k=0, top_p=0.5))[0]
    np.testing.assert_array_equal(np.asarray(only_p), np.asarray(both))
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(np.asarray(only_p), np.asarray(probabilities(logits, without)[0]))


@pytest.mark.parametrize("size", [5, 8, 37, 100])
def test_a_row_does_not_depend_on_its_neighbours(size: int) -> None:
    """Bit for bit, alone or beside rows that do or do not need the sort."""
    rng = np.random.default_rng(size)
    logits = jnp.asarray(rng.normal(size=(3, size)), jnp.float32)
    for top_k, top_p in ((0, 1.0), (3, 0.9)):
        alone = probabilities(logits[1:2], SamplingParams(0.7, jnp.asarray([top_k]), jnp.asarray([top_p])))[0][0]
        for others in ((0, 1.0), (2, 0.5)):
            ks, ps = jnp.asarray([others[0], top_k, 0]), jnp.asarray([others[1], top_p, 1.0])
            together = probabilities(logits, SamplingParams(jnp.asarray([0.0, 0.7, 2.0]), ks, ps))[0][1]
            assert np.asarray(together).tobytes() == np.asarray(alone).tobytes()
