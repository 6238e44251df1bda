"""`generate` as it is called, held against the exact law of its texts and against a slow loop in plain Python."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.generate import Generation, generate
from flashspec.sampling import SamplingParams
from flashspec.speculative import LENGTH, RUNNING, STOP, ModelDrafter, NgramDrafter
from tests.table_models import ROWS, Rules, TableModel, exact_law, history, next_law, random_laws

ROWS_DRAWN = 20_000
PROMPT = (1, 0)
RULES = Rules(max_new=4, min_new=1, stop=(2,), temperature=0.8)
TARGET, DRAFT = history(random_laws(1, ROWS, 3, 60)), history(random_laws(2, ROWS, 3, 60))
DRAFTERS = {"model": ModelDrafter(DRAFT.model, DRAFT.params), "ngram": NgramDrafter(2), "none": None}


def texts(generation: Generation) -> dict[tuple[int, ...], float]:
    """Each text of new tokens with its frequency."""
    tokens, lengths = np.asarray(generation.tokens)[:, len(PROMPT) :], np.asarray(generation.lengths) - len(PROMPT)
    padded = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, -1)
    seen, counts = np.unique(padded, axis=0, return_counts=True)
    return {tuple(row[row >= 0].tolist()): count / len(tokens) for row, count in zip(seen, counts, strict=True)}


def assert_law(frequencies: dict[tuple[int, ...], float], law: dict[tuple[int, ...], float]) -> None:
    """Total variation within what 999 in 1000 samples of the law itself keep."""
    assert set(frequencies) <= set(law)
    probs = np.array(list(law.values()))
    samples = np.random.default_rng(0).multinomial(ROWS_DRAWN, probs / probs.sum(), 2000) / ROWS_DRAWN
    bound = np.quantile(np.abs(samples - probs).sum(1) / 2, 0.999)
    assert np.abs(np.array([frequencies.get(text, 0) for text in law]) - probs).sum() / 2 <= bound


@pytest.mark.parametrize(("drafter", "rule"), [("model", "chain"), ("ngram", "chain"), ("model", "match")])
def test_texts_follow_the_target_s_law(drafter: str, rule: str) -> None:
    generation = generate(
        jax.random.key(8),
        TARGET.model,
        TARGET.params,
        np.tile(PROMPT, (ROWS_DRAWN, 1)),
        np.full(ROWS_DRAWN, len(PROMPT)),
        drafter=DRAFTERS[drafter],
        draft_length=2,
        rule=rule,
        sampling=SamplingParams(temperature=RULES.temperature),
        stop_tokens=RULES.stop,
        min_new_tokens=RULES.min_new,
        max_new_tokens=RULES.max_new,
    )
    assert_law(texts(generation), exact_law(TARGET, PROMPT, RULES))
    for wrong in (dataclasses.replace(RULES, temperature=0.9), dataclasses.replace(RULES, min_new=0)):
        with pytest.raises(AssertionError):
            assert_law(texts(generation), exact_law(TARGET, PROMPT, wrong))


def first_above(weights: np.ndarray, u: float) -> int:
    mass = np.cumsum(weights)
    return int(np.flatnonzero((mass > u * mass[-1]) & (weights > 0))[0])


def slow_round(rule: str, p: list[np.ndarray], q: list[np.ndarray], drafts: list[int], coins: Any, final: float) -> Any:
    """Accepted drafts, and the token after them."""
    for i, x in enumerate(drafts):
        if rule == "chain" and coins[i] * q[i][x] >= p[i][x]:
            return i, first_above(np.maximum(p[i] - q[i], 0), final)
        if rule == "match" and (own := first_above(p[i], coins[i])) != x:
            return i, own
        if rule == "greedy" and (own := int(p[i].argmax())) != x:
            return i, own
    return len(drafts), first_above(p[-1], final)


def slow_row(key: jax.Array, prompt: list[int], rule: str, length: int, rules: Rules) -> dict[str, Any]:
    """One row of `generate`, by the definitions; float64, from the same uniforms."""

    def law(model: TableModel, prefix: list[int]) -> np.ndarray:
        return next_law(model, prefix, len(prefix) - len(prompt), rules)

    row, logprobs, reason, rounds = list(prompt), [], RUNNING, 0
    tested, accepted = np.zeros(length, int), np.zeros(length, int)
    while reason == RUNNING:
        streams = (jax.random.fold_in(jax.random.fold_in(key, rounds), purpose) for purpose in range(3))
        draws, coins, (final, *_) = (np.asarray(jax.random.uniform(each, (length,)), float) for each in streams)
        drafts: list[int] = []
        for u in draws:
            drafts.append(first_above(law(DRAFT, row + drafts), u))
        p, q = ([law(model, row + drafts[:i]) for i in range(length + 1)] for model in (TARGET, DRAFT))
        kept, following = slow_round(rule, p, q, drafts, coins, final)
        rounds += 1
        for i, token in enumerate([*drafts[:kept], following]):
            row.append(token)
            logprobs.append(np.log(p[i][token]))
            if i < length:
                tested[i] += 1
                accepted[i] += i < kept
            new = len(row) - len(prompt)
            reason = STOP if token in rules.stop else LENGTH if new == rules.max_new else RUNNING
            if reason != RUNNING:
                break
    counts = {"rounds": rounds, "proposed": rounds * length, "emitted": len(row) - len(prompt)}
    return {"row": row, "logprobs": logprobs, "reason": reason, **counts, "tested": tested, "accepted": accepted}


def assert_row(generation: Generation, b: int, slow: dict[str, Any]) -> None:
    length, new = len(slow["row"]), slow["emitted"]
    assert int(generation.lengths[b]) == length
    np.testing.assert_array_equal(generation.tokens[b, :length], slow["row"])
    np.testing.assert_array_equal(generation.tokens[b, length:], 0)
    np.testing.assert_allclose(generation.logprobs[b, :new], slow["logprobs"], atol=1e-5)
    np.testing.assert_array_equal(generation.logprobs[b, new:], 0)
    assert int(generation.finish_reason[b]) == slow["reason"]
    for name in ("rounds", "proposed", "emitted", "tested", "accepted"):
        np.testing.assert_array_equal(getattr(generation.info, name)[b], slow[name])


@pytest.mark.parametrize(("rule", "length", "temperature"), [("chain", 2, 0.9), ("match", 3, 1.3), ("greedy", 4, 0.0)])
def test_every_number_is_the_slow_loop_s(rule: str, length: int, temperature: float) -> None:
    rng = np.random.default_rng(length)
    batch, rules = 8, dataclasses.replace(RULES, max_new=7, temperature=temperature)
    keys, lengths = jax.random.split(jax.random.key(length), batch), rng.integers(1, 5, batch)
    prompts, minimum = rng.integers(0, 3, (batch, 4)), rng.integers(0, 4, batch)
    generation = generate(
        keys,
        TARGET.model,
        TARGET.params,
        prompts,
        lengths,
        drafter=DRAFTERS["model"],
        draft_length=length,
        rule=rule,
        sampling=SamplingParams(temperature=temperature),
        stop_tokens=rules.stop,
        min_new_tokens=minimum,
        max_new_tokens=rules.max_new,
    )
    generation = jax.device_get(dataclasses.replace(generation, state=jnp.zeros(())))
    slow = [
        slow_row(keys[b], prompts[b, : lengths[b]].tolist(), rule, length, dataclasses.replace(rules, min_new=least))
        for b, least in enumerate(minimum)
    ]
    for b in range(batch):
        assert_row(generation, b, slow[b])
        if (slow[b]["tested"] < slow[b]["rounds"]).any():
            with pytest.raises(AssertionError):
                assert_row(generation, b, slow[b] | {"tested": np.full(length, slow[b]["rounds"])})
    assert any((row["tested"] < row["rounds"]).any() for row in slow), "some draft was not tested"
