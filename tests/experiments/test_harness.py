"""The harness: one anatomy, an output folder with everything in it, and clear errors with their exit codes."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from experiments import harness, registry
from experiments.harness import Job
from flashspec.records import read_records

FAKE = registry.Experiment("fake", "Is it so?", "nothing", "no time")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=3)


def good(job: Job) -> None:
    job.say("Some words.")
    for step in job.track(range(job.args.size), "counting"):
        job.record("step", settings={"seed": job.seed}, values={"step": step})
    job.table(
        "squares", "Squares", ["n", "n^2 | exact"], [[n, n**2] for n in range(job.args.size)] + [[0.123456, None]]
    )
    with job.figure("line", "A line") as axes:
        axes.plot([0, 1], [0, 1])
    job.claim("one is one", True)
    job.reaches("arithmetic", "squares of 3 numbers")
    job.report["answer"] = {"array": np.arange(2), "nan": float("nan")}


def refuted(job: Job) -> None:
    job.claim("one is two", 1 == 2)


def short_of_its_goal(job: Job) -> None:
    job.goal("twice as fast", False)
    job.goal("as fast", True)


def wrong_option(job: Job) -> None:
    job.record("before the error")
    raise ValueError("`size`: expected at least 1, got 0")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run a function as an experiment in a folder of its own; returns the exit code."""

    def run_function(function: object, *argv: str) -> int:
        module = ModuleType("fake")
        module.run = function  # type: ignore[attr-defined]
        module.add_arguments = add_arguments  # type: ignore[attr-defined]
        monkeypatch.setattr(registry, "find", lambda name: FAKE)
        monkeypatch.setattr(registry, "load", lambda name: module)
        monkeypatch.setattr(sys, "argv", ["experiments/__main__.py", "fake", *argv])
        return harness.run_experiment("fake", ["--out", str(tmp_path), *argv])

    return run_function


def test_a_run_leaves_report_records_and_plot(run, tmp_path: Path) -> None:
    assert run(good, "--size", "4", "--seed", "7") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["command"] == "python -m experiments fake --size 4 --seed 7"
    assert report["finished"] is True
    assert {"device", "jax", "date", "environment", "question", "seconds"} <= set(report)
    assert report["claims"] == [{"claim": "one is one", "holds": True}]
    assert report["headline"] == {"part": "arithmetic", "reaches": "squares of 3 numbers"}
    assert report["answer"] == {"array": [0, 1], "nan": None}
    assert report["tables"]["squares"]["rows"][-2:] == [["3", "9"], ["0.1235", ""]]
    records = read_records(tmp_path / "records.jsonl")
    assert [record.values["step"] for record in records] == [0, 1, 2, 3]
    assert all(record.settings == {"seed": 7} and record.command == report["command"] for record in records)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Is it so?")
    for part in ("Some words.", "holds: one is one", "n^2 \\| exact", "![A line](line.png)", "## Environment"):
        assert part in text
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_replaces_the_first(run, tmp_path: Path) -> None:
    assert run(good) == run(good) == 0
    assert len(read_records(tmp_path / "records.jsonl")) == 3


def test_a_refuted_claim_fails_the_process(run, tmp_path: Path) -> None:
    assert run(refuted) == 1
    assert "FAILS: one is two" in (tmp_path / "report.md").read_text()


def test_a_missed_goal_is_reported_and_fails_nothing(run, tmp_path: Path) -> None:
    assert run(short_of_its_goal) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["goals"] == [{"goal": "twice as fast", "met": False}, {"goal": "as fast", "met": True}]
    assert "MISSED: twice as fast" in (tmp_path / "report.md").read_text()


def test_a_wrong_value_is_an_error_that_keeps_what_was_measured(run, tmp_path: Path, capsys) -> None:
    assert run(wrong_option) == registry.WRONG_USE
    assert "error: `size`: expected at least 1, got 0" in capsys.readouterr().err
    assert "wrong_option" in (tmp_path / "error.txt").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["finished"] is False
    assert len(read_records(tmp_path / "records.jsonl")) == 1


@pytest.mark.parametrize("argv", [["--sise", "3"], ["--size", "three"], ["--smok"], ["extra"]])
def test_an_unknown_option_is_refused(run, argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(good, *argv)
    assert stopped.value.code == registry.WRONG_USE
    assert "usage: python -m experiments fake" in capsys.readouterr().err


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False, timeout=60)


def test_listing_shows_every_experiment_and_does_not_import_jax() -> None:
    done = python("-X", "importtime", "-m", "experiments")
    assert done.returncode == 0
    assert all(name in done.stdout for name in registry.discover())
    assert " jax\n" not in done.stderr


def test_an_unknown_experiment_is_refused_with_the_nearest() -> None:
    done = python("-m", "experiments", "blockwise_memori")
    assert done.returncode == registry.WRONG_USE
    assert "there is no experiment 'blockwise_memori'; there is blockwise_memory" in done.stderr


def write(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}.py").write_text(source)


def test_modules_with_a_question_are_experiments(tmp_path: Path) -> None:
    write(tmp_path, "helper", "import jax\nNEEDS = 'x'\n")
    write(tmp_path, "zeta", "QUESTION = 'Why?'\nNEEDS = 'a ' 'CPU'\nTIME = '1 s'\nimport does_not_exist\n")
    assert registry.discover(tmp_path) == {"zeta": registry.Experiment("zeta", "Why?", "a CPU", "1 s")}


@pytest.mark.parametrize("source", ["QUESTION = 'Why?'\n", "QUESTION = 'Why?'\nNEEDS = 'x'\nTIME = 3\n"])
def test_an_experiment_that_does_not_say_what_it_takes_is_refused(tmp_path: Path, source: str) -> None:
    write(tmp_path, "silent", source)
    with pytest.raises(ValueError, match=r"experiment silent: .*missing \[.*'TIME'\]"):
        registry.discover(tmp_path)


def test_every_experiment_asks_a_question() -> None:
    found = registry.discover()
    assert found
    assert all(experiment.question.endswith("?") for experiment in found.values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("attention_throughput --repeats -1", "`repeats`: expected an integer of at least 1, got -1"),
        ("decode_roofline --acceptance 1.5", "`acceptance`: expected a number between 0 and 1, got [1.5]"),
        ("decode_roofline --capacity 0", "`capacity`: expected an integer of at least 1, got 0"),
        ("decode_roofline --draft-length -2", "`draft-length`: expected an integer of at least 1, got -2"),
        ("fusion --repeats 0", "`repeats`: expected an integer of at least 1, got 0"),
        ("large_pair --acceptance nan", "`acceptance`: expected a number between 0 and 1, got [nan]"),
        ("large_pair --repeats 0", "`repeats`: expected an integer of at least 1, got 0"),
        ("tune_attention --workers 0", "`workers`: expected an integer of at least 1, got 0"),
        ("verify_bandwidth --tokens 1 -1", "`tokens`: expected an integer of at least 1, got -1"),
        ("verify_bandwidth --heads 5x2", "`heads`: expected NxK with N a multiple of K, such as 32x8, got '5x2'"),
    ],
)
def test_a_wrong_number_is_refused_in_a_smoke_run_too(line: str, message: str, tmp_path: Path, capsys) -> None:
    """Though that has numbers of its own: what is given and not used would be dropped in silence."""
    name, *argv = line.split()
    assert harness.run_experiment(name, [*argv, "--smoke", "--out", str(tmp_path)]) == registry.WRONG_USE
    assert f"error: {message}" in capsys.readouterr().err
