"""Times of whole programs, and their records."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from experiments import decode_roofline, large_pair, programs, registry, round_costs, speculative_report
from experiments.harness import Job
from experiments.programs import Outcome, Program, Prompts, Speed, Timings, later_token_seconds, later_tokens_per_round
from experiments.ruled_models import SAMPLING, SMOKE, random_params, ruled_pair
from flashspec.costs import RoundCosts
from flashspec.measure import HOST, Checked, Interleaved, Timing
from flashspec.records import compare
from flashspec.speculative import Totals


@pytest.mark.parametrize(
    ("total", "first", "later", "seconds"),
    [(5.0, 1.0, 8, 0.5), (1.0, 1.0, 0, None), (0.9, 1.0, 8, None), (1.0, 1.0, 8, None)],
)
def test_a_time_per_later_token_is_positive_or_not_known(
    total: float, first: float, later: int, seconds: float | None
) -> None:
    assert later_token_seconds(total, first, later) == seconds


def totals(emitted: int, rounds: int) -> Totals:
    """Of one row with two drafts a round."""
    count, drafts = np.array([emitted], np.int32), np.array([[2 * rounds, rounds]], np.int32)
    return Totals(np.array([rounds]), 2 * count, count, 0 * count, drafts // 2, drafts)  # type: ignore[arg-type]


def test_the_time_of_a_round_comes_from_the_rounds_after_the_first() -> None:
    prefill, a_round, emitted, rounds = 7.0, 2.0, 9, 5
    later = later_token_seconds(prefill + rounds * a_round, prefill + a_round, emitted - 1)
    assert later == 1.0
    per_round = later_tokens_per_round(totals(emitted, rounds))
    assert per_round is not None
    assert later * per_round == a_round
    assert later * emitted / rounds == 1.8, "the first round's tokens among those of the later ones"
    assert later_tokens_per_round(totals(3, 1)) is None


@pytest.mark.parametrize("module", [large_pair, decode_roofline])
@pytest.mark.parametrize(("wrong", "apart"), [(False, 0.0), (True, 1 / 0.9 - 1)], ids=["later", "all"])
def test_a_run_that_takes_what_its_parts_do_is_as_predicted(
    module: Any, wrong: bool, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of 2 s after the first, which gave one token of 9: 8 tokens in 4 rounds, and a plain token takes 1 s."""
    if wrong:
        monkeypatch.setattr(module, "later_tokens_per_round", lambda info: info.emitted[0] / info.rounds[0])
    parts = RoundCosts(target_step=1.0, draft_step=0.25, verify={2: 1.125}, overhead=0.125)  # 3 c_d + c_v + c_m = 2
    found = compared(module, totals(9, 5), parts)
    assert found["speedup"] / found["predicted"] - 1 == pytest.approx(apart, abs=1e-6)
    assert found["tokens_per_round"] == 1.8


@pytest.mark.parametrize("module", [large_pair, decode_roofline])
def test_one_round_is_compared_with_nothing(module: Any) -> None:
    parts = RoundCosts(target_step=1.0, draft_step=0.25, verify={2: 1.125}, overhead=0.125)
    found = compared(module, totals(3, 1), parts)
    assert (found["speedup"], found["predicted"]) == (None, None)


def compared(module: Any, info: Totals, parts: RoundCosts) -> dict[str, Any]:
    """What the experiment makes of a run whose later tokens take 1 s, plain or not."""
    speed = Speed(1.0, 1.0, 1.0, 1.0, 1.0)
    outcome: Any = Outcome(None, None, info)  # type: ignore[arg-type]
    timings = Timings(speed, speed, [outcome], Interleaved({}, Checked("a check", True)))
    job: Any = SimpleNamespace(args=SimpleNamespace(draft_length=2), smoke=True)
    job.say = job.claim = job.record = lambda *words, **fields: None
    if module is large_pair:
        _, tokens_per_round, speedup, predicted, *_ = large_pair.compare(job, timings, parts, 0.5)
        return {"tokens_per_round": tokens_per_round, "speedup": speedup, "predicted": predicted}
    found = decode_roofline._compare(job, timings, parts, 0.5, 2)
    return {**found._asdict(), "speedup": found.measured}


def test_what_is_timed_is_compiled_as_generation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA refuses an option that it does not know, so that a program which compiles was not given it."""
    pair = ruled_pair(SMOKE, {role: random_params(config, 0) for role, config in SMOKE.items()}, 0.8)
    prompts = Prompts(np.zeros((1, 4), np.int32), np.array([4], np.int32))
    shape = round_costs.Shape(1, 16, steps=1, repeats=1)
    builders = {
        "program": lambda: Program(pair, 2, "chain", 4, prompts, SAMPLING).call,
        **{
            f"{part}, {length}": build
            for (part, length), build in round_costs.part_loops(pair, [2], SAMPLING, shape).items()
        },
    }
    for module in (programs, round_costs):
        monkeypatch.setattr(module, "loop_compiler_options", lambda: {"no_such_option": "1"})
    for build in builders.values():
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'no_such_option'"):
            build()


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
