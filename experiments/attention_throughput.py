"""How fast attention runs for prefill and training, against the other implementations that are installed."""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import attention_peers
from experiments.attention_cases import (
    CLOSE,
    Case,
    distance,
    forward,
    gradients,
    operands,
    oracle,
    ours,
    part,
)
from experiments.compilation import build_those_that_can
from experiments.harness import Job
from flashspec.attention import Ampere, AttentionPlan, Hopper, plan_attention
from flashspec.checks import at_least
from flashspec.measure import Interleaved, checked, compile_call, interleaved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUESTION = "How fast is attention forward and backward, against the best of its peers on this device?"
NEEDS = "a GPU or a TPU; the peers are optional (extra `peers`)"
TIME = "18 minutes on an H200 for all parts; the smoke run anywhere"

OURS, DETERMINISTIC = "flashspec", "deterministic"
FORWARD_BAR, FORWARD_MEAN = 0.99, 1.03
TRAINING_BAR, TRAINING_MEAN = 0.99, 1.02
DETERMINISTIC_BAR = 0.80
PORTABLE_BARS = {"forward": (1.0, None), "training": (2.0, attention_peers.TRITON)}  # of the best, and of that peer
WINDOW_BAR = 1 / 5  # of the time of the full causal call
LINEAR = 1.1  # by how much memory for one more token may grow with T
WORK = {"forward": 1.0, "training": 3.5}  # in products of the forward: 2 of 2, 7 of 2
PARTS = ("forward", "training", "packed", "portable", "growth", "memory")

LONG, WINDOW = Case(1, 16384, 16, 16, 128, True), Case(1, 16384, 16, 16, 128, True, (1023, 0))
GRID = (
    *(Case(16, 1024, 16, 16, 128, causal) for causal in (False, True)),
    *(Case(4, 4096, 16, 16, 128, causal) for causal in (False, True)),
    *(Case(1, 16384, 16, 16, 128, causal) for causal in (False, True)),
    *(Case(4, 4096, 32, 8, 128, causal) for causal in (False, True)),
    Case(4, 4096, 32, 32, 64, True),
    Case(4, 4096, 8, 8, 256, True),
    WINDOW,
)
TRAINING = tuple(case for case in GRID if case.T > 1024 and case.window is None)
PORTABLE = (
    *(Case(4, 4096, 16, 16, 128, causal) for causal in (False, True)),
    Case(4, 4096, 32, 8, 128, True),
    Case(4, 4096, 32, 32, 64, True),
)
DOCUMENTS = (512, 1024, 3072, 256, 4096, 2048, 1280, 4096)
PACKED = (dataclasses.replace(LONG, documents=DOCUMENTS),)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
GROWTH = tuple(Case(LENGTHS[-1] // T, T, 16, 16, 128, causal) for causal in (False, True) for T in LENGTHS)
SMOKE = {
    "forward": (Case(1, 32, 2, 1, 16, True),),
    "training": (Case(1, 32, 2, 1, 16, True),),
    "packed": (Case(1, 32, 2, 1, 16, True, documents=(12, 20)),),
    "portable": (Case(1, 32, 2, 1, 16, True),),
    "growth": tuple(Case(64 // T, T, 1, 1, 16, True) for T in (32, 64)),
}


class Field(NamedTuple):
    """Who is timed.

    Args:
      implementation: ours; None for what the library chooses.
      peers: the others, by name.
      rival: the peer that our ratio is to; None for the best of each row.
    """

    implementation: Any = None
    peers: Mapping[str, attention_peers.Peer] = attention_peers.PEERS
    rival: str | None = None


ALL = Field()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each implementation, in turn")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the experiment (default: all)")


def run(job: Job) -> None:
    """All parts, or those that are asked for."""
    at_least("repeats", job.args.repeats, 1)
    for name in dict.fromkeys(job.args.parts):
        if name == "memory":
            memory(job)
        elif name == "growth":
            growth(job)
        elif name == "packed":
            for direction in WORK:
                _table(job, f"packed_{direction}", direction, SMOKE[name] if job.smoke else PACKED)
        elif name == "portable":
            portable(job)
        else:
            bars = {"forward": (FORWARD_BAR, FORWARD_MEAN), "training": (TRAINING_BAR, TRAINING_MEAN)}[name]
            cases = {"forward": GRID, "training": TRAINING}[name]
            _table(job, name, name, SMOKE[name] if job.smoke else cases, bars)


def portable(job: Job) -> None:
    """The kernels for every GPU, against jax's own for every GPU."""
    if not job.smoke and jax.default_backend() != "gpu":
        job.say("portable: these kernels run on an NVIDIA GPU alone")
        return
    implementation = None if job.smoke else Ampere()  # the smoke run has no such kernel, and XLA in its place
    for direction, (bar, rival) in PORTABLE_BARS.items():
        field = Field(implementation, attention_peers.PORTABLE[direction], rival)
        cases = SMOKE["portable"] if job.smoke else PORTABLE
        ratios = _table(job, f"portable_{direction}", direction, cases, field=field)
        if ratios:
            low, what = min(ratios), f"{rival} by its own blocks of 32" if rival else "the best peer"
            job.goal(f"portable, {direction}: at least {bar} of {what} in every row: {low:.2f}", low >= bar)


def _table(
    job: Job,
    name: str,
    direction: str,
    cases: tuple[Case, ...],
    bars: tuple[float, float] | None = None,
    field: Field = ALL,
) -> list[float]:
    """One row for each case; returns our ratios."""
    with_deterministic = direction == "training" and field == ALL
    rows, ratios, speeds, deterministic, seconds = [], [], {}, [], {}
    for case in job.track(cases, name):
        timed = measure(job, case, direction, field, deterministic=with_deterministic)
        rates = _rates(case, direction, timed)
        steady = rates.pop(DETERMINISTIC, None)
        speeds[str(case)] = rates
        seconds[case] = timed.timings[OURS].steady_s
        peers = {one: rate for one, rate in rates.items() if one != OURS}
        rivals = [rate for one, rate in peers.items() if field.rival in (None, one)]
        ratio = rates[OURS] / max(rivals) if rivals else None
        ran = _pass(case, direction, field)
        columns = [_cell(peers.get(peer)) for peer in field.peers]
        columns += [_cell(steady and steady / rates[OURS], 2)] if with_deterministic else []
        rows.append([str(case), ran.implementation, ran.source, f"{rates[OURS]:.0f}", *columns, _cell(ratio, 3)])
        ratios += [ratio] if ratio is not None else []
        deterministic += [steady / rates[OURS]] if steady is not None else []
        for one, timing in timed.timings.items():
            job.record(
                f"{name}/{case}/{one}", settings=dataclasses.asdict(case), **timing.fields() | {"compile_s": None}
            )
    columns = ["case", "kernel", "settings", OURS, *field.peers]
    columns += ["deterministic over default"] if with_deterministic else []
    clocks = ", ".join(dict.fromkeys(timing.clock for timing in timed.timings.values()))
    title = f"{name}, TFLOP/s (only visible pairs count, training 3.5 times), by {clocks}"
    job.table(name, title, [*columns, f"ratio to {field.rival or 'the best'}"], rows)
    with job.figure(name, f"Attention, {name}") as axes:
        draw(axes, speeds, field)
    if deterministic:
        low = min(deterministic)
        job.goal(
            f"{name}: the deterministic backward at {DETERMINISTIC_BAR} of the default: {low:.2f}",
            low >= DETERMINISTIC_BAR,
        )
    if LONG in seconds and WINDOW in seconds:
        share = seconds[WINDOW] / seconds[LONG]
        job.goal(f"{name}: the window takes {WINDOW_BAR} of the causal time: {share:.3f}", share <= WINDOW_BAR)
    if ratios and bars:
        mean = math.prod(ratios) ** (1 / len(ratios))
        job.say(f"{name}: geometric mean of our ratio to the best peer of each row: {mean:.3f}")
        job.goal(f"{name}: at least {bars[0]} of the best peer in every row", min(ratios) >= bars[0])
        job.goal(f"{name}: geometric mean of at least {bars[1]}", mean >= bars[1])
        job.reaches(f"attention, {name}", f"{min(ratios):.2f} to {max(ratios):.2f} of the best peer, mean {mean:.2f}")
    return ratios


def growth(job: Job) -> None:
    """Both directions by length, as many tokens in all."""
    cases = SMOKE["growth"] if job.smoke else GROWTH
    names = [OURS, *attention_peers.PEERS]
    for direction in WORK:
        speeds: dict[Case, Mapping[str, float]] = {}
        for case in job.track(cases, f"growth, {direction}"):
            timed = measure(job, case, direction, deterministic=False)
            speeds[case] = _rates(case, direction, timed)
            for one, timing in timed.timings.items():
                job.record(
                    f"growth_{direction}/{case}/{one}",
                    settings=dataclasses.asdict(case),
                    **timing.fields() | {"compile_s": None},
                )
        rows = [[str(case), *(_cell(rates.get(name)) for name in names)] for case, rates in speeds.items()]
        title = f"{direction} by length, TFLOP/s, B T constant"
        job.table(f"growth_{direction}", title, ["case", *names], rows)
        with job.figure(f"growth_{direction}", f"Attention by length, {direction}") as axes:
            for (number, name), causal in itertools.product(enumerate(names), (False, True)):
                line = {
                    case.T: rates[name] for case, rates in speeds.items() if case.is_causal == causal and name in rates
                }
                if line:
                    label = f"{name}, {'causal' if causal else 'full'}"
                    axes.plot(list(line), list(line.values()), "-" if causal else "--", color=f"C{number}", label=label)
            axes.set_xscale("log", base=2)
            axes.set(xlabel="T", ylabel="TFLOP/s")
            axes.legend(fontsize=7)


def memory(job: Job) -> None:
    """What a forward and a backward need beside operands and results, by the compiler's count; nothing runs."""
    lengths = (1024, 2048) if job.smoke else LENGTHS
    rows, needed = [], {}
    for T in job.track(lengths, "memory"):
        case = Case(1, T, 1, 1, 16, True) if job.smoke else Case(1, T, 16, 16, 128, True)
        sizes = {name: _beside(name, case) for name in WORK}
        needed[T] = sizes
        output = case.shapes[0].size * 2
        rows.append([str(case), *(f"{bytes_ / 2**20:.2f}" for bytes_ in (*sizes.values(), output))])
    columns = ["case", "forward, MiB", "training, MiB", "the output, for scale, MiB"]
    job.table("memory", "memory beside operands and results", columns, rows)
    low, high = lengths[0], lengths[-1]
    for name in WORK:
        growth = needed[high][name] * low / max(1, needed[low][name] * high)
        text = f"{name}: memory is linear in T: {growth:.2f} times as much a token at T = {high} as at {low}"
        job.claim(text, growth <= LINEAR)
    job.record("memory", values={f"{name}_{T}": float(sizes[name]) for T, sizes in needed.items() for name in WORK})


def _beside(direction: str, case: Case) -> int:
    """Bytes of temporaries of a program, as its compiler counts them."""
    shapes = case.shapes if direction == "training" else case.shapes[:3]
    analysis = jax.jit(_direction(direction)(ours(), case)).lower(*shapes).compile().memory_analysis()
    if analysis is None:
        raise NotImplementedError("this compiler counts no memory")
    return analysis.temp_size_in_bytes


def draw(axes: "Axes", speeds: Mapping[str, Mapping[str, float]], field: Field = ALL) -> None:
    """TFLOP/s of every implementation on every case, ours in front."""
    names = [OURS, *field.peers]
    for number, name in enumerate(names):
        places = [row + (number / len(names) - 0.4) * 0.9 for row, rates in enumerate(speeds.values()) if name in rates]
        height = 0.9 / len(names)
        axes.barh(places, [rates[name] for rates in speeds.values() if name in rates], height=height, label=name)
    axes.set_yticks(range(len(speeds)), list(speeds), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.35, -0.12))


def measure(job: Job, case: Case, direction: str, field: Field = ALL, *, deterministic: bool = True) -> Interleaved:
    """Every implementation in turn, after a check of each: a peer whose result is wrong is named and not timed."""
    program, arrays = _direction(direction), operands(case, job.seed, 4 if direction == "training" else 3)
    attends: dict[str, Callable[..., jax.Array]] = {OURS: ours(field.implementation)}
    if deterministic and direction == "training" and _pass(case, direction).implementation == "hopper":
        attends[DETERMINISTIC] = ours(Hopper(deterministic=True))
    attends |= attention_peers.installed(case, field.peers)
    builders = {
        name: functools.partial(compile_call, program(attend, case), *arrays) for name, attend in attends.items()
    }
    calls, failed = build_those_that_can(builders)
    want, right = oracle(case, program, arrays), {}
    for name, call in calls.items():
        try:
            right[name] = distance(part(case, jax.tree.leaves(call())), want) <= CLOSE
        except jax.errors.JaxRuntimeError as error:
            failed[name] = str(error)[:200]
    own = {OURS, DETERMINISTIC} & set(attends)
    for name, reason in failed.items():
        if name in own:
            raise NotImplementedError(f"{case}: {name}: {reason}")
        job.say(f"{name} does not take {case}: {reason}")
    for name in set(right) - own:
        if not right[name]:
            job.say(f"{name} is not timed on {case}: its result failed the check")
    agree = all(right[name] for name in own)
    check = checked(f"the last heads of {case} agree with float32 arithmetic", lambda: agree)
    timed = {name: call for name, call in calls.items() if name in own or right.get(name)}
    return interleaved(timed, check=check, repeats=1 if job.smoke else job.args.repeats)


def _direction(name: str) -> Callable[..., Any]:
    return {"forward": forward, "training": gradients}[name]


def _pass(case: Case, direction: str, field: Field = ALL) -> Any:
    """What the plan says of a direction."""
    ids = {name: jax.ShapeDtypeStruct(x.shape, jnp.int32) for name, x in case.options.items() if name.endswith("ids")}
    plan: AttentionPlan = plan_attention(*case.shapes[:3], **case.options | ids, implementation=field.implementation)
    return plan.forward if direction == "forward" else plan.backward


def _rates(case: Case, direction: str, timed: Interleaved) -> dict[str, float]:
    """TFLOP/s of each implementation."""
    return {name: WORK[direction] * case.flops / timing.steady_s / 1e12 for name, timing in timed.timings.items()}


def _cell(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
