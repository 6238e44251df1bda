"""`python -m experiments all`: every experiment once, one index, and nothing that failed is missed."""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import all as everything
from experiments import registry

NAMES = ("bad", "good", "lost", "mute")
FAKES = {name: registry.Experiment(name, f"Is {name} so?", "nothing", "no time") for name in NAMES}
LIMIT_S = 180


def report(claims: dict[str, bool]) -> str:
    listed = [{"claim": claim, "holds": holds} for claim, holds in claims.items()]
    return json.dumps({"finished": True, "device": "toy", "claims": listed, "headline": {"reaches": "far"}})


REPORTS = {"good": report({"one is one": True, "two is two": True}), "bad": report({"one is two": False})}
CODES = {"good": 0, "bad": 1, "lost": 3, "mute": 0}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One succeeds, one refutes its claim, one fails without a report, and one leaves none although it ends well."""

    def command(name: str, args: argparse.Namespace, out: Path) -> list[str]:
        write = f"import sys, pathlib; p = pathlib.Path({str(out)!r}); p.mkdir(exist_ok=True); print('{name} says')"
        keep = f"; (p / 'report.json').write_text({REPORTS[name]!r})" if name in REPORTS else ""
        return [sys.executable, "-c", f"{write}{keep}; sys.exit({CODES[name]})"]

    monkeypatch.setattr(registry, "discover", lambda: FAKES)
    monkeypatch.setattr(everything, "command", command)


@pytest.mark.parametrize("jobs", ["1", "3"])
@pytest.mark.usefixtures("fakes")
def test_one_index_of_all_reports(tmp_path: Path, jobs: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert everything.run_all(["--out", str(tmp_path), "--jobs", jobs]) == 1
    shown = capfd.readouterr().out
    assert all(f"== {name}" in shown and f"{name} says" in shown for name in FAKES)
    text = (tmp_path / "index.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "Is " in line}
    assert list(rows) == ["[bad](bad/report.md)", "[good](good/report.md)", "lost", "mute"]
    assert "FAILS: one is two" in rows["[bad](bad/report.md)"]
    assert "| 2 claims hold | far | toy |" in rows["[good](good/report.md)"]
    assert "did not finish (exit code 3)" in rows["lost"]
    assert "did not finish (exit code 0)" in rows["mute"]
    failed = text.splitlines()[2]
    assert failed.startswith("1 of 4 experiments succeeded; ")
    assert {"bad (exit code 1)", "lost (exit code 3)", "mute (exit code 0)"} == set(failed.split("; ")[1:])


@pytest.mark.usefixtures("fakes")
def test_a_report_of_an_earlier_run_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "report.json").write_text(REPORTS["good"])
    everything.run_all(["--out", str(tmp_path)])
    assert "| lost | Is lost so? | did not finish" in (tmp_path / "index.md").read_text()


@pytest.mark.parametrize("claims", [{}, {"one is one": True}])
def test_results_in_words(claims: dict[str, bool]) -> None:
    outcome = everything.Outcome(FAKES["good"], 0, 1.0, json.loads(report(claims)))
    assert outcome.result == ("1 claim holds" if claims else "finished")
    assert everything.Outcome(FAKES["good"], 0, 1.0, {}).result.startswith("did not finish")


def test_a_missed_goal_is_told_and_fails_nothing() -> None:
    goals = [{"goal": "twice as fast", "met": False}, {"goal": "exact", "met": True}]
    outcome = everything.Outcome(FAKES["good"], 0, 1.0, json.loads(REPORTS["good"]) | {"goals": goals})
    assert outcome.succeeded
    assert outcome.result == "2 claims hold; 1 of 2 goals missed"


@pytest.mark.parametrize(
    ("smoke", "accelerator", "cores", "jobs"),
    [(True, False, 2, 2), (True, True, 2, 1), (False, False, 64, 1), (True, False, 1, 1)],
)
def test_times_and_accelerators_are_not_shared(
    monkeypatch: pytest.MonkeyPatch, smoke: bool, accelerator: bool, cores: int, jobs: int
) -> None:
    monkeypatch.setattr(everything, "has_accelerator", lambda: accelerator)
    monkeypatch.setattr(everything.os, "cpu_count", lambda: cores)
    assert everything.parse(["--smoke"] if smoke else []).jobs == jobs


def test_the_shared_options_reach_every_experiment(tmp_path: Path) -> None:
    line = everything.command("speculative", everything.parse(["--smoke", "--seed", "7"]), tmp_path / "speculative")
    assert line[1:] == ["-m", "experiments", "speculative", "--smoke", "--seed", "7", "--out", line[-1]]
    assert line[-1] == str(tmp_path / "speculative")


@pytest.mark.parametrize("argv", [["--jobs", "0"], ["--smok"], ["--jobs", "two"], ["speculative"]])
def test_a_wrong_option_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        everything.parse(argv)
    assert stopped.value.code == registry.WRONG_USE
    assert "usage: python -m experiments all" in capsys.readouterr().err


@pytest.mark.slow
def test_all_smoke_runs_take_three_minutes_on_two_cores(tmp_path: Path) -> None:
    """CPU time is what a busy machine does not stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = [sys.executable, "-m", "experiments", "all", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2 * LIMIT_S
