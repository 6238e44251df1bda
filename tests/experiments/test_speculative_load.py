"""The queue before a batch, and what is said of it: ratios of sums, tails, and from where speculation loses."""

import argparse
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import harness, load_workloads, registry, request_queue, speculative_load
from experiments.load_workloads import SETTINGS, UNIFORM_SETTINGS, Workload
from experiments.pairs import Pair
from experiments.request_queue import Clock, Request, Server, Sizes
from experiments.speculative_load import loses_from, percentile
from flashspec.speculative import ModelDrafter, slots
from tests.mutants import mutant
from tests.speculative import toys


def seconds_a_token(rounds: list[tuple[float, int]], module: ModuleType = request_queue) -> float:
    dispatches = tuple(module.Dispatch(seconds, tokens, 1) for seconds, tokens in rounds)
    return float(module.Trace((), dispatches, 1.0).s_per_token)


def test_time_a_token_is_a_ratio_of_sums() -> None:
    """Exercise 33.13: 12 ms for 3 tokens beat 20 ms for 4, though the second accepts more."""
    assert seconds_a_token([(12, 3)]) == 4
    assert seconds_a_token([(20, 4)]) == 5
    assert seconds_a_token([(12, 1), (12, 5)]) == 4
    assert seconds_a_token([(3, 0), (12, 1), (12, 5)]) == 4.5  # a prefill takes time and commits nothing


@pytest.mark.parametrize(
    "edit",
    [
        (
            "costs.time_per_token([d.seconds for d in self.dispatches], [d.tokens for d in self.dispatches])",
            "np.mean([d.seconds / d.tokens for d in self.dispatches if d.tokens])",  # 7.2: the mean of ratios
        ),
        ("[d.seconds for d in self.dispatches], [d", "[d.seconds * bool(d.tokens) for d in self.dispatches], [d"),
    ],
)
def test_another_average_is_told_apart(edit: tuple[str, str]) -> None:
    wrong = mutant(request_queue, edit)
    found = seconds_a_token([(3, 0), (12, 1), (12, 5)], wrong)
    assert found == pytest.approx(7.2 if "mean" in edit[1] else 4.0)
    assert found != 4.5


def test_percentiles_are_values_that_were_seen() -> None:
    values = list(map(float, range(1, 101)))
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert percentile([3.0, 1.0], 0.99) == 3


@pytest.mark.parametrize(
    ("speedups", "losing"),
    [
        ({1: 1.6, 4: 1.2, 16: 0.9, 64: 0.5}, 16),
        ({64: 0.5, 16: 1.1, 4: 0.9, 1: 1.6}, 64),  # slower at 4 by chance, not from 4 on
        ({1: 1.6, 64: 1.0}, None),
        ({1: 0.9, 4: 0.8}, 1),
    ],
)
def test_from_where_speculation_loses(speedups: dict[int, float], losing: int | None) -> None:
    assert loses_from(speedups) == losing


def test_a_clock_that_skips_what_nobody_works_in() -> None:
    moments = iter([10.0, 11.0, 11.0, 12.0, 12.0, 12.0])
    clock = Clock(lambda: next(moments))
    assert clock() == 1
    clock.skip_to(5)
    assert clock() == 6
    clock.skip_to(2)  # it never goes back
    assert clock() == 6


def workload(pair: Any) -> Workload:
    return Workload(pair, [np.array([0, 1, 2, 0]), np.array([2, 1])], SETTINGS, longest=4, new_tokens=6)


def test_requests_differ_in_arrivals_alone() -> None:
    at_once, later = (workload(None).requests(50, 3, rate) for rate in (None, 10.0))
    for one, other in zip(at_once, later, strict=True):
        assert one.arrival_s == 0
        np.testing.assert_array_equal(one.prompt, other.prompt)
        assert (one.new_tokens, one.sampling, one.number) == (other.new_tokens, other.sampling, other.number)
    assert np.mean(np.diff([one.arrival_s for one in later])) == pytest.approx(0.1, rel=0.5)
    assert workload(None).filtered
    assert not Workload(None, [], UNIFORM_SETTINGS, 1, 1).filtered  # type: ignore[arg-type]


def test_tokens_of_a_request_do_not_depend_on_who_comes_when() -> None:
    model, config = toys.model(vocab=5), types.SimpleNamespace(eos_token_ids=(4,))
    absent: Any = None
    drafter = ModelDrafter(model, toys.table(2, 5))
    pair = Pair(config, model, toys.table(1, 5), drafter, absent, jnp.float32)  # type: ignore[arg-type]
    server = Server(pair, Sizes(slots=2, prompt=4, new_tokens=6, draft_length=2, group=2), 0)
    requests = workload(pair).requests(7, 0)
    order = [6, 2, 0, 5, 1, 4, 3]
    others = [Request(0.001 * place, *_rest(requests[number])) for place, number in enumerate(order)]
    answers = []
    for asked in (requests, others, workload(pair).requests(7, 0, rate=200.0)):
        trace = server.serve(asked)
        answers.append({one.request.number: one.tokens.tolist() for one in trace.served})
        assert len(answers[-1]) == 7
        assert sum(one.new_tokens for one in trace.served) == sum(each.tokens for each in trace.dispatches)
        assert all(
            one.arrival_s <= done.admitted_s <= done.finished_s for done in trace.served for one in [done.request]
        )
        assert all(done.stopped or done.new_tokens == done.request.new_tokens for done in trace.served)
    assert answers[0] == answers[1] == answers[2]
    renumbered = [Request(0.0, r.prompt, r.new_tokens, r.sampling, r.number + 7) for r in requests]
    moved = {one.request.number - 7: one.tokens.tolist() for one in server.serve(renumbered).served}
    assert moved != answers[0]  # draws are those of the number


def _rest(request: Request) -> tuple[Any, ...]:
    return request.prompt, request.new_tokens, request.sampling, request.number


@pytest.mark.slow
def test_the_check_rejects_a_slot_that_keeps_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"smoke": True, "seed": 0, "out": tmp_path, "large": False, "draft_length": 2}
    job = harness.Job(registry.find("speculative_load"), argparse.Namespace(**options), "a command")
    tiny = load_workloads.tiny(0, 12, 6)

    def judged() -> bool:
        servers = {way: speculative_load.server(job, tiny, 2, way)() for way in speculative_load.WAYS}
        return speculative_load.check_tokens(job, tiny, servers, tiny.pair).passed

    assert judged()
    wrong = mutant(slots, ('_CACHES = ("target_cache", "draft_cache")', '_CACHES = ("draft_cache",)'))
    monkeypatch.setattr(request_queue, "admit", wrong.admit)
    assert not judged()
