"""Times of whole programs, and their records."""

import argparse
from pathlib import Path

import pytest

from experiments import registry, speculative_report
from experiments.harness import Job
from experiments.programs import Speed, Timings, later_token_seconds
from flashspec.measure import HOST, Checked, Interleaved, Timing
from flashspec.records import compare


@pytest.mark.parametrize(
    ("total", "first", "later", "seconds"),
    [(5.0, 1.0, 8, 0.5), (1.0, 1.0, 0, None), (0.9, 1.0, 8, None), (1.0, 1.0, 8, None)],
)
def test_a_time_per_later_token_is_positive_or_not_known(
    total: float, first: float, later: int, seconds: float | None
) -> None:
    assert later_token_seconds(total, first, later) == seconds


def recorded(out: Path, temperature: float = 0.8) -> Path:
    """The records of a run in the folder `out`."""
    args = argparse.Namespace(out=out, seed=0, smoke=False, temperature=temperature)
    speed, timing, check = Speed(1.0, 0.5, 2.0, 1.0, 1.0), Timing((1.0,), HOST, 1.0), Checked("a check", True)
    timings = Timings(speed, speed, [], Interleaved({"plain": timing, "speculative": timing}, check))
    job = Job(registry.Experiment("speculative", "Is it?", "nothing", "none"), args, "python -m experiments")
    speculative_report.record(job, timings, 4, check)
    return out / "records.jsonl"


def test_runs_into_two_folders_can_be_compared(tmp_path: Path) -> None:
    first = recorded(tmp_path / "before")
    found = compare(first, recorded(tmp_path / "after"))
    assert found.comparisons
    assert not found.left_out
    assert not compare(first, recorded(tmp_path / "warmer", temperature=1.0)).comparisons
