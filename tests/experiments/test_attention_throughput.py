"""The table of attention's throughput: whose ratio it gives, and which goals are met, by stated times."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from experiments import attention_throughput, harness, registry
from experiments.attention_throughput import OURS, PORTABLE_BARS
from flashspec.measure import HOST, Interleaved, Timing, checked

CHECK = checked("stand-ins", lambda: True)


@pytest.fixture
def job(tmp_path: Path) -> harness.Job:
    args = argparse.Namespace(smoke=True, seed=0, out=tmp_path, repeats=1, parts=("portable",))
    return harness.Job(registry.find("attention_throughput"), args, "a command")


def stand_in(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Times of ours, of the first peer and of the second: 64 and 128 keys forward, blocks of 32 and 64 in training."""

    def measure(job: Any, case: Any, direction: str, field: Any, *, deterministic: bool) -> Interleaved:
        names = dict(zip(("ours", "first", "second"), (OURS, *field.peers), strict=True))
        return Interleaved({names[name]: Timing((x,), HOST, 0.0) for name, x in seconds.items()}, CHECK)

    monkeypatch.setattr(attention_throughput, "measure", measure)


@pytest.mark.parametrize(
    ("seconds", "forward", "training"),
    [
        ({"ours": 1.0, "first": 2.0, "second": 0.9}, False, True),
        ({"ours": 1.0, "first": 1.9, "second": 9.0}, True, False),
        ({"ours": 1.0, "first": 2.1, "second": 1.0}, True, True),
    ],
)
def test_the_forward_is_held_against_the_best_and_training_against_default_blocks(
    seconds: dict[str, float], forward: bool, training: bool, job: harness.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, **seconds)
    attention_throughput.run(job)
    assert [goal["met"] for goal in job.goals] == [forward, training]
    shown = [float(job.tables[f"portable_{direction}"]["rows"][0][-1]) for direction in PORTABLE_BARS]
    assert shown == pytest.approx([min(seconds["first"], seconds["second"]), seconds["first"]], abs=1e-3)


def test_without_a_gpu_the_portable_kernels_are_not_timed(job: harness.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.args.smoke = False
    stand_in(monkeypatch)
    attention_throughput.run(job)
    assert not job.tables


def test_a_rival_that_is_not_timed_has_no_ratio(job: harness.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, ours=1.0, second=2.0)
    attention_throughput.run(job)
    assert job.tables["portable_training"]["rows"][0][-1] == "-"
    assert [goal["goal"].split(":")[0] for goal in job.goals] == ["portable, forward"]
