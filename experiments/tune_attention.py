"""Which launch settings run attention fastest on this device: a search, whose result the library reads."""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import attention_throughput
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
from experiments.compilation import WORKERS, build_those_that_can
from experiments.harness import Job
from flashspec.attention import (
    Ampere,
    DenseView,
    Hopper,
    ampere,
    decode_attention,
    hopper,
    hopper_decode,
    plan_attention,
    tuning,
)
from flashspec.checks import at_least, fail
from flashspec.devices import multiprocessors
from flashspec.measure import Call, checked, compile_call, interleaved
from pallas_kernels.gpu.hopper import attention_decode_config
from pallas_kernels.gpu.hopper.attention_decode_config import DecodeShape

QUESTION = "Which launch settings run attention fastest on this device, and how much faster than the heuristic's?"
NEEDS = (
    "a Hopper GPU, or for --family ampere one of compute capability 8.0 or more; "
    "--smoke goes through the search with XLA's attention in place of every candidate"
)
TIME = "20 minutes on an H200 for everything, about one for a shape of one kernel"

KERNELS = ("forward", "backward", "deterministic", "decode")
DECODE = tuple((B, S, T) for B, S in ((1, 32768), (16, 8192), (64, 4096)) for T in (1, 4, 8, 16))  # at N32 K8 H128
QUICK = 3  # timed calls of every candidate
SCREENED = 3  # candidates that are timed again, beside the heuristic
WORSE = 1.5  # times the error of the heuristic's result that a candidate's may have
GAIN = 1.01  # times as fast as the heuristic's that others have to be to take its place
SECTIONS = ("heads_per_section", "section")  # settings that are searched last: they change the order of work alone


class Family(NamedTuple):
    """Kernels of one kind of GPU.

    Args:
      settings: makes settings of a call.
      searches: candidates of a call, by kernel.
      kernels: that there are.
      prefix: of the names of the kernels' files.
      widest: the largest head size with gradients.
    """

    settings: Any
    searches: Callable[[Any], Mapping[str, tuple[tuning.TuningKey, tuple[Any, ...]]]]
    kernels: tuple[str, ...] = KERNELS
    prefix: str = ""
    widest: int = 256


FAMILIES = {
    "hopper": Family(Hopper, hopper.searches),
    "ampere": Family(Ampere, ampere.searches, KERNELS[:3], "ampere_", ampere.LARGEST_BACKWARD_HEAD),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=FAMILIES, default="hopper", help="of kernels (default: hopper)")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, help="to tune (default: all of the family)")
    parser.add_argument("--only", default="", help="only cases whose name has this text, such as 'T4096'")
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of the best candidates, in turn")
    parser.add_argument("--seconds", type=float, default=1500.0, help="after which no further shape is begun")
    parser.add_argument("--workers", type=int, default=WORKERS, help="candidates that are compiled at once")


@dataclasses.dataclass(frozen=True)
class Task:
    """One shape of one kernel.

    Attributes:
      kernel: whose file gets the entry.
      label: of the shape, for people.
      key: of the entry.
      configs: to try, the heuristic's first.
      build: compiles a call with some settings.
      error: of a result, relative to the norm of the float32 twin's.
    """

    kernel: str
    label: str
    key: tuning.TuningKey
    configs: tuple[Any, ...]
    build: Callable[[Any], Call]
    error: Callable[[Any], float]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      entry: to be recorded.
      tried: how many settings gave a right result.
      wrong: reasons of those that did not, or did not compile, by settings.
    """

    entry: tuning.Entry
    tried: int
    wrong: Mapping[Any, str]


def run(job: Job) -> None:
    """Search every shape, and write the files anew after each."""
    device = jax.devices()[0].device_kind
    for name in ("repeats", "workers"):
        at_least(name, getattr(job.args, name), 1)
    if not job.smoke and jax.devices()[0].platform != "gpu":
        raise NotImplementedError(f"there is no kernel to tune on {device}")
    entries: dict[str, dict[tuning.TuningKey, tuning.Entry]] = {}
    rows, ratios, start = [], [], time.perf_counter()
    for task in tasks(job):
        if time.perf_counter() - start > job.args.seconds:
            job.say(f"not begun for lack of time: {task.kernel}, {task.label}")
            continue
        found = search(task, repeats=1 if job.smoke else job.args.repeats, workers=job.args.workers)
        for config, reason in found.wrong.items():
            job.say(f"{task.kernel}, {task.label}: {config} is out: {reason}")
        entry = found.entry
        ratio = entry.heuristic_seconds / entry.seconds
        ratios.append(ratio)
        changes = _changes(entry.config, task.configs[0])
        rows.append(
            [
                task.kernel,
                task.label,
                found.tried,
                len(found.wrong),
                1e6 * entry.heuristic_seconds,
                1e6 * entry.seconds,
                ratio,
                changes,
            ]
        )
        values = {"heuristic_s": entry.heuristic_seconds, "best_s": entry.seconds, "error": entry.error}
        job.record(f"{task.kernel}/{task.label}", values=values, settings=dataclasses.asdict(entry.config))
        held = entries.setdefault(task.kernel, {} if job.smoke else dict(tuning.packaged(task.kernel, device)))
        held[entry.key] = entry
        save(job.out / "tuned", task.kernel, device, list(held.values()))
        job.console.print(f"{time.perf_counter() - start:.0f} s: {task.kernel}, {task.label}: {ratio:.3f} by {changes}")
    columns = ["kernel", "shape", "right", "out", "heuristic, us", "best, us", "heuristic over best", "changed"]
    job.table("tuned", "launch settings: the heuristic's and the best", columns, rows)
    job.say(f"The files are in `{job.out / 'tuned'}`; copied to `pallas_kernels/tuned`, they ship with the library.")
    if ratios and not job.smoke:
        job.reaches("tuned launch settings", f"1 to {max(ratios):.2f} times the heuristic's speed, by shape")


def save(folder: Path, kernel: str, device: str, entries: Sequence[tuning.Entry]) -> None:
    """Write the file of a kernel, and read it back as the library does."""
    file = folder / device / f"{kernel}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(tuning.write(entries, kernel, device), encoding="utf-8")
    assert set(tuning.read(file, kernel, device)) == set(entries)


def search(task: Task, *, repeats: int, workers: int = 1) -> Found:
    """The fastest settings of a task among those whose result is right.

    First the settings of one round each: structure with the heuristic's order of work, then other orders for the best
    structure. All that are right are timed a few times in turn, the best of them again with the heuristic's.

    Raises:
      ValueError: the heuristic's own result is wrong, so that there is nothing to compare with.
    """
    heuristic, *others = task.configs
    calls, wrong = _compiled(task, [heuristic], workers)
    if heuristic in wrong:
        raise ValueError(f"{task.kernel}, {task.label}: the heuristic's {heuristic} fails: {wrong[heuristic]}")
    errors = {heuristic: task.error(calls[heuristic]())}
    _out(errors, wrong, CLOSE)
    if heuristic in wrong:
        raise ValueError(f"{task.kernel}, {task.label}: the heuristic's result is wrong: {wrong[heuristic]}")
    bound = min(CLOSE, WORSE * errors[heuristic])

    def fastest(configs: Sequence[Any], repeats: int) -> list[Any]:
        """The heuristic's and the right ones among settings, the fastest first."""
        made, failed = _compiled(task, [config for config in configs if config not in calls], workers)
        wrong.update(failed)
        calls.update(made)
        errors.update({config: task.error(call()) for config, call in made.items()})
        _out(errors, wrong, bound)
        timed = [config for config in dict.fromkeys((heuristic, *configs)) if config not in wrong]
        right = {str(config): calls[config] for config in timed}
        what = f"{task.label}: within {bound:.1e} of float32"
        check = checked(what, lambda: all(errors[config] <= bound for config in timed))
        timings = interleaved(right, check=check, repeats=repeats).timings
        seconds.update({config: timings[str(config)].steady_s for config in timed})
        return sorted(timed, key=lambda config: seconds[config])

    seconds: dict[Any, float] = {}
    first = [config for config in others if _section(config) == _section(heuristic)]
    structure = fastest(first, QUICK)[0]
    second = [config for config in others if config not in first and _structure(config) == _structure(structure)]
    fastest(second, QUICK)
    ranked = sorted((config for config in seconds if config != heuristic), key=lambda config: seconds[config])
    best = fastest(ranked[:SCREENED], repeats)[0]
    if seconds[heuristic] < GAIN * seconds[best]:
        best = heuristic
    entry = tuning.Entry(task.key, best, seconds[best], seconds[heuristic], errors[best], jax.__version__)
    return Found(entry, len(seconds), wrong)


def _compiled(task: Task, configs: Sequence[Any], workers: int) -> tuple[dict[Any, Call], dict[Any, str]]:
    """Calls by settings, and for those that do not compile the reason."""
    return build_those_that_can({config: functools.partial(task.build, config) for config in configs}, workers)


def _out(errors: Mapping[Any, float], wrong: dict[Any, str], bound: float) -> None:
    """Add the settings whose result is wrong."""
    for config, error in errors.items():
        if not error <= bound:
            wrong[config] = f"its result is {error:.1e} away from float32, where {bound:.1e} is allowed"


def _section(config: Any) -> Any:
    return next((getattr(config, name) for name in SECTIONS if hasattr(config, name)), None)


def _structure(config: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in SECTIONS}


def _changes(config: Any, heuristic: Any) -> str:
    before, after = dataclasses.asdict(heuristic), dataclasses.asdict(config)
    return " ".join(f"{name}={after[name]}" for name in after if after[name] != before[name]) or "-"


def tasks(job: Job) -> list[Task]:
    """All shapes of all kernels that are asked for.

    Raises:
      ValueError: the family has no such kernel, or no case has the name.
    """
    found: list[Task] = []
    family = FAMILIES[job.args.family]
    training = tuple(case for case in attention_throughput.TRAINING if family.widest >= case.H)
    for name in dict.fromkeys(job.args.kernels or family.kernels):
        if name not in family.kernels:
            raise fail("kernels", f"some of {', '.join(family.kernels)} of the family {job.args.family}", repr(name))
        if name == "decode":
            shapes = ((1, 64, 1),) if job.smoke else DECODE
            found += [decode_task(job, *shape) for shape in shapes]
            continue
        for case in set(attention_throughput.TRAINING) - set(training) if name != "forward" and not job.smoke else ():
            job.say(f"left out: {name}, {case}: its kernel takes heads of {family.widest} at most")
        grid = attention_throughput.GRID if name == "forward" else training
        cases = attention_throughput.SMOKE["forward"] if job.smoke else grid
        found += [(forward_task if name == "forward" else backward_task)(job, case, name) for case in cases]
    found = [task for task in found if job.args.only in task.label]
    if not found:
        raise fail("only", "a text in the name of some case", repr(job.args.only))
    return found


def _attend(job: Job, settings: Any) -> Callable[..., jax.Array]:
    """The call with settings; the smoke run has no such kernel, and XLA in its place."""
    return ours(None if job.smoke else settings)


def _searched(job: Job, case: Case, name: str) -> tuple[str, tuning.TuningKey, tuple[Any, ...]]:
    """Kernel, key and candidates."""
    device, family = "NVIDIA H200" if job.smoke else None, FAMILIES[job.args.family]
    settings = family.settings(deterministic=name == "deterministic")
    request = plan_attention(*case.shapes[:3], **case.options, implementation=settings, device=device).request
    kernel = family.prefix + ("attention_forward" if name == "forward" else "attention_backward")
    key, configs = family.searches(request)[kernel]
    return kernel, key, configs[:2] if job.smoke else configs


def forward_task(job: Job, case: Case, name: str) -> Task:
    """The forward of a case."""
    kernel, key, configs = _searched(job, case, name)
    settings = FAMILIES[job.args.family].settings

    def build(config: Any) -> Call:
        return compile_call(forward(_attend(job, settings(forward=config)), case), *operands(case, job.seed, 3))

    return Task(kernel, str(case), key, configs, build, _Distance(job, case, forward, 3))


def backward_task(job: Job, case: Case, name: str) -> Task:
    """The backward of a case alone: what the forward saves is made before."""
    kernel, key, configs = _searched(job, case, name)
    label, settings = str(case) + (" deterministic" if key.deterministic else ""), FAMILIES[job.args.family].settings

    def build(config: Any) -> Call:
        *arrays, cotangent = operands(case, job.seed, 4)
        attend = _attend(job, settings(backward=config, deterministic=key.deterministic))
        pull = jax.jit(lambda *x: jax.vjp(forward(attend, case), *x)[1])(*arrays)
        return compile_call(lambda pull, cotangent: pull(cotangent), pull, cotangent)

    return Task(kernel, label, key, configs, build, _Distance(job, case, gradients, 4))


def decode_task(job: Job, B: int, S: int, T: int) -> Task:
    """T new tokens over a full cache of S slots."""
    N, K, H = (4, 2, 64) if job.smoke else (32, 8, 128)
    shape = DecodeShape(B, T, S, N, K, H)
    configs = attention_decode_config.candidates(shape, multiprocessors(jax.devices()[0].device_kind))

    def arrays(dtype: Any = jnp.bfloat16) -> tuple[jax.Array, DenseView]:
        keys, sizes = jax.random.split(jax.random.key(job.seed), 3), ((B, T, N, H), (B, S, K, H), (B, S, K, H))
        query, key, value = (
            jax.random.normal(one, size, jnp.bfloat16).astype(dtype) for one, size in zip(keys, sizes, strict=True)
        )
        return query, DenseView(key, value, jnp.full((B,), S, jnp.int32))

    def build(config: Any) -> Call:
        implementation = "blockwise" if job.smoke else Hopper(decode=config)
        return compile_call(lambda *x: decode_attention(*x, implementation=implementation), *arrays())

    @functools.cache
    def want() -> jax.Array:
        return jax.jit(lambda *x: decode_attention(*x, implementation="blockwise"))(*arrays(jnp.float32))

    def error(result: Any) -> float:
        return distance([result], [want()])

    label = f"B{B} S{S} T{T} N{N} K{K} H{H}"
    return Task(
        "attention_decode",
        label,
        hopper_decode.tuning_key(shape, "bfloat16"),
        configs[: 2 if job.smoke else None],
        build,
        error,
    )


class _Distance:
    """How far a result is from float32 arithmetic on its last heads, and from the heuristic's on all of them."""

    def __init__(self, job: Job, case: Case, direction: Any, count: int) -> None:
        self.arrays = lambda: operands(case, job.seed, count)
        self.case, self.direction = case, direction
        self.first: list[Any] = []
        self.want: list[Any] = []

    def __call__(self, result: Any) -> float:
        got = jax.tree.leaves(result)
        if not self.want:
            self.first, self.want = got, oracle(self.case, self.direction, self.arrays())
        return max(distance(part(self.case, got), self.want), distance(got, self.first))
