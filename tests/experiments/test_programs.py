"""Times of whole programs."""

import pytest

from experiments.programs import later_token_seconds


@pytest.mark.parametrize(
    ("total", "first", "later", "seconds"),
    [(5.0, 1.0, 8, 0.5), (1.0, 1.0, 0, None), (0.9, 1.0, 8, None), (1.0, 1.0, 8, None)],
)
def test_a_time_per_later_token_is_positive_or_not_known(
    total: float, first: float, later: int, seconds: float | None
) -> None:
    assert later_token_seconds(total, first, later) == seconds
