"""The arithmetic of the experiments on decoding, and what they leave out."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments import decode_roofline
from experiments.shared_prefix import first_that_pays
from experiments.verify_bandwidth import Case, close, head_counts
from flashspec import models


def test_bytes_count_live_keys_and_values() -> None:
    case = Case("ragged", 4, 32, 8, (100, 28), 32768)
    assert case.bytes == 128 * 8 * 128 * 2 * 2  # not the slots of the cache
    assert case.label == "ragged 2 x 32768"


def test_outputs_agree_within_rounding_only() -> None:
    want = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    assert close(want * (1 + 2**-9), want)
    assert not close(want * 1.05, want)
    assert not close(np.where(want == want.max(), np.nan, want), want)


def test_a_form_that_there_is_not_is_told() -> None:
    said: list[str] = []
    job: Any = SimpleNamespace(smoke=False, say=said.append)
    for name in ("gemma-2-2b", "qwen3-8b"):
        assert decode_roofline.fused_model(job, models.PRESETS[name], ((1, 1),)) is None
    assert "the family gemma2 normalises" in said[0]
    assert "runs on cuda of compute capability 9.0 only" in said[1]


def test_numbers_of_heads() -> None:
    assert head_counts("32x8") == (32, 8)
    for wrong in ("32", "32x", "x8", "5x2", "32x0", "0x8", "-32x8", "axb", "32x8x1"):
        with pytest.raises(ValueError, match=f"`heads`: expected NxK .* got '{wrong}'"):
            head_counts(wrong)


@pytest.mark.parametrize(
    ("speeds", "first"),
    [
        ([(64, 0.9), (128, 1.1), (256, 1.4)], "128"),
        ([(64, 1.2), (128, 0.9), (256, 1.4)], "256"),  # not 64: the next one loses again
        ([(64, 0.9), (128, 0.8)], "no length here"),
        ([(64, 1.1)], "64"),
    ],
)
def test_the_first_prefix_that_pays(speeds: list[tuple[int, float]], first: str) -> None:
    assert first_that_pays(speeds) == first
