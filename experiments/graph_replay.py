"""Compilation and replay are not the same: one decode step run several ways, and three ways to stop a loop of them."""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.decode_loops import Decoder, by_host, by_shape, by_value, count_operations, op_by_op, prepare
from experiments.harness import Job
from experiments.pairs import bundled_prompts, load_pair
from flashspec.measure import HOST, Call, Checked, Interleaved, checked, compile_call, interleaved
from flashspec.recording import RECORDED

QUESTION = "What do compilation and recorded command buffers each save of a decode step, and what breaks a recording?"
NEEDS = "a GPU for command buffers and device time; the rest runs on a CPU"
TIME = "2 minutes on 2 CPU cores, 1 on an H200"

NEVER = np.int32(-1)  # the stop token of a loop that shall not stop
BUFFERS: Mapping[str, dict[str, str]] = {
    "default": {},
    "off": {"xla_gpu_enable_command_buffer": ""},
    "with loops": {"xla_gpu_enable_command_buffer": RECORDED},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=4, help="of the bundled target")
    parser.add_argument("--steps", type=int, default=48, help="budget of new tokens")
    parser.add_argument("--repeats", type=int, default=9)


def run(job: Job) -> None:
    """Time the step, then stop loops of it by a shape, by a traced value and by a host read."""
    args = job.args
    layers, budget, repeats = (1, 8, 1) if job.smoke else (args.layers, args.steps, args.repeats)
    # In float32, since programs that fuse differently round 16 bits differently, and a near tie is another token.
    decoder = prepare(load_pair(layers=layers), bundled_prompts()[0], budget)
    if jax.default_backend() != "gpu":
        job.say("This device has no command buffers and no device clock: what they save needs a GPU.")
    step = time_step(job, decoder, repeats)
    shaped = compile_call(functools.partial(by_shape, decoder, budget=budget), *decoder.operands, NEVER)
    stop, expected = choose_stop(shaped)
    time_loops(job, decoder, step, shaped, stop, expected, repeats)


def buffers() -> dict[str, dict[str, str]]:
    """The settings of command buffers that differ on this device."""
    return dict(BUFFERS) if jax.default_backend() == "gpu" else {"default": {}}


def named(what: str, setting: str) -> str:
    """The name of a program under a setting of command buffers, where there are several."""
    return what if len(buffers()) == 1 else f"{what}, command buffers {setting}"


def with_buffers(job: Job, what: str, compiled: Callable[..., Call]) -> dict[str, Call]:
    """A program under each setting of command buffers; where the runtime cannot run what it recorded, that is told."""
    calls = {}
    for setting, options in buffers().items():
        try:
            call = compiled(compiler_options=options)
            jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as error:
            if setting == "default":
                raise
            job.say(f"{named(what, setting)}, does not run: {str(error).splitlines()[0]}")
        else:
            calls[setting] = call
    return calls


def time_step(job: Job, decoder: Decoder, repeats: int) -> Call:
    """One step op by op and compiled, with each setting of command buffers; returns it compiled by default."""
    calls: dict[str, Callable[[], Any]] = {"op by op": functools.partial(op_by_op, decoder)}
    compiled = with_buffers(job, "compiled", functools.partial(compile_call, decoder.step, *decoder.operands))
    calls |= {named("compiled", name): call for name, call in compiled.items()}
    tokens = {name: int(call()[0][0]) for name, call in calls.items()}
    check = checked("every way gives the same next token", lambda: len(set(tokens.values())) == 1)
    job.claim(check.what, check.passed)
    times = interleaved(calls, check=check, repeats=repeats, clock=HOST)
    count = count_operations(jax.make_jaxpr(decoder.step)(*decoder.operands).jaxpr)
    rows = []
    for name, call in calls.items():
        kernels, device_s = on_device(call)
        timing, ratio = times.timings[name], times.ratio("op by op", name)
        launched = count if name == "op by op" else kernels
        rows.append(
            [name, timing.compile_s, 1 if isinstance(call, Call) else count, launched, 1e3 * timing.steady_s,
             None if device_s is None else 1e3 * device_s, ratio]
        )  # fmt: skip
        values = {"ratio_over_op_by_op": ratio, "kernels": kernels, "device_s": device_s}
        job.record(name, settings={"part": "step"}, check=check.what, values=values, **timing.fields())
    columns = [
        "step",
        "compile, s",
        "dispatches from Python",
        "kernels",
        "host, ms",
        "device, ms",
        "speed over op by op",
    ]
    job.table("step", "One decode step, waited for", columns, rows)
    job.reaches(
        "compilation and replay",
        f"a decode step takes {rows[0][4]:.3g} ms op by op ({count} dispatches) and {rows[1][4]:.3g} ms as one program",
    )
    return compiled["default"]


def on_device(call: Callable[[], Any]) -> tuple[int | None, float | None]:
    """Kernels that a compiled call runs, and the median of their seconds, by CUPTI; nothing where it sees none."""
    if jax.default_backend() != "gpu" or not isinstance(call, Call):
        return None, None
    from jax.experimental.mosaic.gpu import profiler

    measured = profiler.measure(call.executable, aggregate=False)
    runs = [measured(*call.arguments)[1] or [] for _ in range(5)]
    if not all(runs):
        return None, None
    return len(runs[0]), statistics.median(sum(milliseconds for _, milliseconds in run) for run in runs) / 1e3


def choose_stop(shaped: Call) -> tuple[int, list[int]]:
    """A token that first comes late in the greedy continuation, and the tokens up to it."""
    tokens = np.asarray(shaped()[0]).tolist()
    first = {token: tokens.index(token) for token in tokens}
    wanted = 2 * len(tokens) // 3
    stop = min(first, key=lambda token: (abs(first[token] - wanted), token))
    return stop, tokens[: first[stop] + 1]


def time_loops(
    job: Job, decoder: Decoder, step: Call, shaped: Call, stop: int, expected: Sequence[int], repeats: int
) -> None:
    """The three ways to stop: what they give, how many programs they need, and what they take."""
    budgets = (decoder.budget, decoder.budget - 1)
    traced_stop, budget = jnp.asarray(stop, jnp.int32), jnp.asarray(decoder.budget, jnp.int32)
    operands = (*decoder.operands, traced_stop)
    what = "by a traced value"
    by_setting = with_buffers(
        job, what, functools.partial(compile_call, functools.partial(by_value, decoder), *operands, budget)
    )
    programs = {named(what, name): call for name, call in by_setting.items()}
    calls: dict[str, Callable[[], Any]] = {
        "by a host read": lambda: by_host(decoder, step, stop, decoder.budget),
        "by a shape": dataclasses.replace(shaped, arguments=operands),
        **programs,
        "no stop, nothing read": lambda: by_host(decoder, step, stop, len(expected), read=False),
    }
    check = judge_loops(job, calls, expected)
    told = not stops_right(shaped(), expected)
    job.claim("a loop without the stop condition, as a control, is told apart", told)
    count_programs(job, decoder, traced_stop, budgets)
    times = interleaved(calls, check=check, repeats=repeats, clock=HOST)
    show_loops(job, times, len(expected), decoder.budget)


def stops_right(result: tuple[Any, Any], expected: Sequence[int]) -> bool:
    """Whether a loop gave these tokens, stopped there, and left zeros after them."""
    tokens, length = np.asarray(result[0]), int(result[1])
    return length == len(expected) and tokens[:length].tolist() == list(expected) and not tokens[length:].any()


def judge_loops(job: Job, calls: Mapping[str, Callable[[], Any]], expected: Sequence[int]) -> Checked:
    """The same tokens and the same stop, whoever decides."""
    results = [call() for call in calls.values()]
    what = f"all ways give the same {len(expected)} tokens and stop there"
    check = checked(what, lambda: all(stops_right(result, expected) for result in results))
    job.claim(check.what, check.passed)
    return check


def count_programs(job: Job, decoder: Decoder, stop: Array, budgets: Sequence[int]) -> None:
    """A shape costs a specialisation for each value, a traced value none."""
    traces = {"by a shape": 0, "by a traced value": 0}

    def counted(name: str, function: Callable[..., Any]) -> Any:
        def traced(*operands: Any, **options: Any) -> Any:
            traces[name] += 1  # runs while tracing alone
            return function(decoder, *operands, **options)

        return jax.jit(traced, static_argnames="budget" if name == "by a shape" else ())

    shaped, valued = counted("by a shape", by_shape), counted("by a traced value", by_value)
    for budget in budgets:  # each trace would be compiled once
        shaped.trace(*decoder.operands, stop, budget=budget)
        valued.trace(*decoder.operands, stop, jnp.asarray(budget, jnp.int32))
    by_kind = " and ".join(f"{count} {name}" for name, count in traces.items())
    job.claim(f"{len(budgets)} budgets take so many programs: {by_kind}", list(traces.values()) == [len(budgets), 1])


def show_loops(job: Job, times: Interleaved, tokens: int, budget: int) -> None:
    """Time by token, where the host read costs, and what each way does to a recording."""
    capture = {
        "by a host read": ("read by Python", tokens, tokens, "cut at every token: the host decides"),
        "by a shape": ("while tracing", 1, 0, "whole: nothing is left to decide, at the price of the budget's steps"),
        "no stop, nothing read": ("not at all", tokens, 0, "one step at a time"),
    }
    traced = ("on the device", 1, 0, "where loops may be recorded; else the runtime reads the predicate")
    base, rows = "by a host read", []
    for name, timing in times.timings.items():
        decided, dispatches, reads, recording = capture.get(name, traced)
        ratio = times.ratio(base, name)
        rows.append([name, decided, dispatches, reads, 1e3 * timing.steady_s / tokens, ratio, recording])
        settings = {"part": "loop", "tokens": tokens, "budget": budget}
        job.record(name, settings=settings, check=times.check.what, values={"speed_ratio": ratio}, **timing.fields())
    columns = [
        "stops",
        "decided",
        "dispatches",
        "reads by Python",
        "host, ms a token",
        f"speed over {base}",
        "recording",
    ]
    job.table("loops", f"{tokens} tokens until the stop, of a budget of {budget}", columns, rows)
    read, free = (times.timings[name].steady_s / tokens for name in (base, "no stop, nothing read"))
    job.say(
        f"A token takes {1e3 * read:.3g} ms where Python reads it, {1e3 * free:.3g} ms where the same steps are "
        "dispatched and nothing is read: a host that waits cannot dispatch ahead. The loop by a traced value keeps "
        "the stop condition without the read."
    )
