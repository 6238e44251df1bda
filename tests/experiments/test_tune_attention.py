"""The search for launch settings: a fast wrong result is never recorded, and what is recorded is read."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments import attention_cases, harness, registry, tune_attention
from experiments.attention_cases import Case
from experiments.tune_attention import Task, save, search
from flashspec.attention import ForwardConfig, tuning
from flashspec.attention.tuning import TuningKey
from flashspec.measure import HOST, Checked, Interleaved, Timing

HEURISTIC = ForwardConfig()
GOOD, SECTION, WRONG, NAN, BROKEN = (
    ForwardConfig(block_kv=64),
    ForwardConfig(block_kv=64, heads_per_section=1),
    ForwardConfig(stages=3),
    ForwardConfig(stages=1),
    ForwardConfig(block_kv=192),
)
# Seconds and relative errors: the two wrong ones would win.
SPEEDS = {HEURISTIC: (8.0, 2e-3), GOOD: (4.0, 2e-3), SECTION: (2.0, 2e-3), WRONG: (0.1, 4e-3), NAN: (0.1, np.nan)}
KEY = TuningKey("bfloat16", 16, 64, 64, 1, 128, 128, "full")


def task(speeds: dict[Any, tuple[float, float]], *configs: ForwardConfig) -> Task:
    """A shape of stand-ins; one without a speed "does not compile"."""

    def build(config: Any) -> Callable[[], float]:
        seconds, error = speeds[config]
        TIMES[str(config)] = seconds
        return lambda: error

    return Task("attention_forward", "a shape", KEY, (HEURISTIC, *configs), build, float)  # type: ignore[arg-type]


TIMES: dict[str, float] = {}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times as the stand-ins state them, of calls whose check passed."""

    def interleaved(calls: Any, *, check: Checked, repeats: int) -> Interleaved:
        assert check.passed
        return Interleaved({name: Timing((TIMES[name],) * repeats, HOST, 0.0) for name in calls}, check)

    monkeypatch.setattr(tune_attention, "interleaved", interleaved)


def test_the_fastest_right_settings_are_found_and_wrong_ones_named() -> None:
    found = search(task(SPEEDS, WRONG, GOOD, SECTION, NAN, BROKEN), repeats=3, workers=2)
    assert found.entry.config == SECTION
    assert (found.entry.heuristic_seconds, found.entry.seconds, found.entry.error) == (8.0, 2.0, 2e-3)
    assert set(found.wrong) == {WRONG, NAN, BROKEN}
    assert "allowed" in found.wrong[WRONG]
    assert "KeyError" in found.wrong[BROKEN]


def test_a_search_that_checks_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_attention, "_out", lambda errors, wrong, bound: None)
    with pytest.raises(AssertionError):  # a wrong result has no speed
        search(task(SPEEDS, WRONG, GOOD), repeats=3)
    monkeypatch.setattr(tune_attention, "checked", lambda what, check: Checked(what, True))
    assert search(task(SPEEDS, WRONG, GOOD), repeats=3).entry.config == WRONG


def test_a_gain_within_the_noise_leaves_the_heuristic() -> None:
    for seconds, best in ((7.95, HEURISTIC), (7.9, GOOD)):
        assert search(task(SPEEDS | {GOOD: (seconds, 2e-3)}, GOOD), repeats=3).entry.config == best


def test_a_wrong_heuristic_stops_the_search() -> None:
    with pytest.raises(ValueError, match="the heuristic's result is wrong"):
        search(task({HEURISTIC: (1.0, 0.5)}), repeats=1)
    with pytest.raises(ValueError, match="fails: KeyError"):
        search(task({}), repeats=1)


def test_what_is_saved_is_what_the_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(task(SPEEDS, GOOD), repeats=1)
    save(tmp_path, "attention_forward", "NVIDIA H200", [found.entry])
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    assert tuning.packaged("attention_forward", "NVIDIA H200") == {KEY: found.entry}


# What is searched.


def job(tmp_path: Path, family: str, *, smoke: bool) -> Any:
    args = argparse.Namespace(family=family, kernels=None, only="", smoke=smoke, seed=0, out=tmp_path)
    return harness.Job(registry.find("tune_attention"), args, "a command")


@pytest.mark.parametrize("family", tune_attention.FAMILIES)
def test_what_a_family_searches_is_what_its_files_may_hold(family: str, tmp_path: Path) -> None:
    found = tune_attention.tasks(job(tmp_path, family, smoke=True))
    assert all(task.kernel.startswith("ampere_") == (family == "ampere") for task in found)
    for task in found:
        kernel = tuning.KERNELS[task.kernel]
        assert {type(config) for config in task.configs} == {kernel.config}
        assert not any(kernel.refusals(task.key, config) for config in task.configs)
    assert {task.key.deterministic for task in found} == {False, True}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("ampere", {"kernels": ("forward", "decode")}, "`kernels`: expected some of forward, .* got 'decode'"),
        ("hopper", {"only": "T5"}, "`only`: expected a text in the name of some case, got 'T5'"),
    ],
)
def test_what_there_is_not_to_tune(family: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    asked = job(tmp_path, family, smoke=True)
    vars(asked.args).update(options)
    with pytest.raises(ValueError, match=message):
        tune_attention.tasks(asked)


def test_heads_without_gradients_of_a_family_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("forward_task", "backward_task", "decode_task"):
        monkeypatch.setattr(tune_attention, name, lambda job, case, *_: SimpleNamespace(label=str(case), case=case))
    for family, widest in (("hopper", 256), ("ampere", 128)):
        args = job(tmp_path, family, smoke=False)
        args.args.kernels = ("backward",)
        assert max(task.case.H for task in tune_attention.tasks(args)) == widest  # type: ignore[attr-defined]


# The cases that are timed.


def test_only_visible_pairs_count() -> None:
    case = Case(2, 8, 4, 2, 16)
    assert case.flops == 4 * 2 * 4 * 64 * 16
    assert dataclasses.replace(case, is_causal=True).flops == case.flops / 2
    assert dataclasses.replace(case, is_causal=True, window=(1, 0)).flops == case.flops / 4
    assert dataclasses.replace(case, documents=(4, 4)).flops == case.flops / 2


def test_a_distance_sees_what_is_wrong_and_what_is_no_number() -> None:
    want = [np.ones((3, 4), np.float32), np.full(2, 5, np.float32)]
    assert attention_cases.distance(want, want) == 0
    assert attention_cases.distance([want[0], want[1] * 1.5], want) == pytest.approx(0.5)
    assert np.isnan(attention_cases.distance([want[0] * np.nan, want[1]], want))
