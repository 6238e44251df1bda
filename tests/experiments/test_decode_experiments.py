"""The arithmetic of the two experiments on decoding."""

import numpy as np
import pytest

from experiments.shared_prefix import first_that_pays
from experiments.verify_bandwidth import Case, close, head_counts


def test_bytes_count_live_keys_and_values() -> None:
    case = Case("ragged", 4, 32, 8, (100, 28), 32768)
    assert case.bytes == 128 * 8 * 128 * 2 * 2  # not the slots of the cache
    assert case.label == "ragged 2 x 32768"


def test_outputs_agree_within_rounding_only() -> None:
    want = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    assert close(want * (1 + 2**-9), want)
    assert not close(want * 1.05, want)
    assert not close(np.where(want == want.max(), np.nan, want), want)


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
