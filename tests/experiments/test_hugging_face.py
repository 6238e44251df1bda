"""The comparison with Hugging Face's generate: what it says without torch, its ratios, and with torch its logits."""

import importlib.util

import numpy as np
import pytest

from experiments import hugging_face
from experiments.hugging_face import EAGER, STATIC, Timing, compare, rows
from flashspec.models.checkpoint import stored_tensors
from tests.models.examples import example, forward


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    said: list[str] = []
    assert compare({"plain": 1.0}, {}, [], np.zeros((1, 2), np.int32), 4, say=said.append) == []
    assert said == ["torch not installed: no comparison with Hugging Face's generate"]


def test_a_ratio_is_of_tokens_a_second() -> None:
    timings = [Timing(EAGER, 0.02, 8, True), Timing(STATIC, 0.01, 8, True)]
    ours = {"plain": 0.005, "speculative": 0.0025}
    assert rows(timings, ours, 2) == [[EAGER, 20, 100, 4, 8], [STATIC, 10, 200, 2, 4]]


def test_the_same_weights_give_the_same_logits() -> None:
    for name in hugging_face.NEEDED:
        pytest.importorskip(name)
    config, params = example("llama")
    tokens = np.arange(12, dtype=np.int32).reshape(1, 12) % config.vocab_size
    said: list[str] = []
    wanted = np.asarray(forward(config, params, tokens))
    weights = dict(stored_tensors(config, params))

    def found(wanted: np.ndarray) -> list[list[object]]:
        options = {"tolerance": 1e-4, "repeats": 1, "device": "cpu", "say": said.append}
        return compare({"plain": 1.0}, config.to_hf(), weights.items(), tokens, 4, wanted=wanted, **options)

    assert [row[0] for row in found(wanted)] == [EAGER, hugging_face.NOT_COMPILED]
    assert found(np.roll(wanted, 1, axis=-1)) == []  # other logits have no speed
    assert "differ from ours by" in said[-1]
