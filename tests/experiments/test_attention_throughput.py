"""The table of attention's throughput: whose ratio it gives, and which goals are met, by stated times."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from experiments import attention_peers, attention_throughput, harness, registry
from experiments.attention_throughput import OURS, PORTABLE_BARS
from flashspec.measure import HOST, Interleaved, Timing, checked

CHECK = checked("stand-ins", lambda: True)


@pytest.fixture
def job(tmp_path: Path) -> harness.Job:
    args = argparse.Namespace(smoke=True, seed=0, out=tmp_path, repeats=1, parts=("portable",))
    return harness.Job(registry.find("attention_throughput"), args, "a command")


def stand_in(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Times of ours, of Triton by its own blocks, and by blocks of 64."""
    names = {"ours": OURS, "triton": attention_peers.TRITON, "triton_64": attention_peers.TRITON_64}

    def measure(job: Any, case: Any, direction: str, field: Any, *, deterministic: bool) -> Interleaved:
        timed = [name for name in seconds if names[name] in (OURS, *field.peers)]
        return Interleaved({names[name]: Timing((seconds[name],), HOST, 0.0) for name in timed}, CHECK)

    monkeypatch.setattr(attention_throughput, "measure", measure)


@pytest.mark.parametrize(
    ("seconds", "forward", "training"),
    [
        ({"ours": 1.0, "triton": 2.0, "triton_64": 0.9}, True, True),  # the goals are about the blocks of its defaults
        ({"ours": 1.0, "triton": 1.9, "triton_64": 9.0}, True, False),
        ({"ours": 1.0, "triton": 0.9, "triton_64": 9.0}, False, False),
    ],
)
def test_the_portable_kernels_are_held_against_the_default_blocks(
    seconds: dict[str, float], forward: bool, training: bool, job: harness.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, **seconds)
    attention_throughput.run(job)
    assert [goal["met"] for goal in job.goals] == [forward, training]
    for direction in PORTABLE_BARS:
        (row,) = job.tables[f"portable_{direction}"]["rows"]
        assert float(row[-1]) == pytest.approx(seconds["triton"], abs=1e-3)
    assert attention_peers.TRITON_64 in job.tables["portable_training"]["columns"]
    assert attention_peers.TRITON_64 not in job.tables["portable_forward"]["columns"]


def test_without_a_gpu_the_portable_kernels_are_not_timed(job: harness.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.args.smoke = False
    stand_in(monkeypatch)
    attention_throughput.run(job)
    assert not job.tables


def test_a_rival_that_is_not_timed_has_no_ratio(job: harness.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, ours=1.0, triton_64=2.0)
    attention_throughput.run(job)
    assert [job.tables[f"portable_{direction}"]["rows"][0][-1] for direction in PORTABLE_BARS] == ["-", "-"]
    assert not job.goals
