"""A matrix product with its tail: fused and step by step, and an intermediate for which fusing loses."""

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.compilation import build_all
from experiments.harness import Job
from flashspec.calibration import program_work
from flashspec.checks import at_least
from flashspec.fusion import ACTIVATIONS, EpiloguePlan, matmul_epilogue, plan_matmul_epilogue
from flashspec.measure import Call, Checked, Interleaved, checked, compile_call, interleaved

QUESTION = "What does fusing a matrix product with its tail save, and where does it lose?"
NEEDS = "a GPU for the rows of 4096 x 14336; smaller ones run on a CPU"
TIME = "1 minute on 2 CPU cores, 2 on an H200"

SIZES = {"gpu": ((16, 256, 8192), 4096, 14336), "cpu": ((16, 256, 1024), 512, 1792)}
SMOKE = ((8, 32), 128, 256)
TAILS: Mapping[str, dict[str, Any]] = {
    "bias + GELU (tanh)": {"activation": "gelu_tanh"},
    "bias + SiLU": {"activation": "silu"},
    "gated SiLU": {"activation": "silu", "gated": True},
}
KERNELS = ("hopper", "tpu")
DECODER = "gate and value in one array"  # as a decoder stores them
# With its own matrix products switched off, XLA calls cuBLASLt and gives it what tail that library has.
CUBLASLT = {"xla_gpu_enable_triton_gemm": False}
AT_LEAST = 0.99  # of the speed of XLA's best, in every row
OVER_AS_WRITTEN = 1.10  # times the speed of the chain as XLA fuses it, at the most rows with GELU
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # of the largest value of the result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=11)


@dataclasses.dataclass(frozen=True)
class Case:
    """One product with one tail.

    Attributes:
      tail: a key of `TAILS`.
      operands: by the names of `matmul_epilogue`: x, w, and bias or gate.
      activation: a name out of `ACTIVATIONS`.
    """

    tail: str
    operands: Mapping[str, Array]
    activation: str

    @property
    def rows(self) -> int:
        """Rows of x."""
        return self.operands["x"].shape[0]

    def plan(self) -> EpiloguePlan:
        """What the library would run."""
        operands: dict[str, Any] = dict(self.operands)
        return plan_matmul_epilogue(**operands, activation=self.activation)

    def kernel(self) -> str | None:
        """Our own kernel that can run it here, chosen by the library or not."""
        rejected = self.plan().rejected
        return next((name for name in KERNELS if name not in rejected), None)


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a kernel of ours stands against the best that XLA makes of the same thing.

    Attributes:
      form: the tail, and how its weights lie.
      rows: of x.
      kernel: ours.
      other: XLA's best program.
      ratio: how many times as fast as that ours is.
    """

    form: str
    rows: int
    kernel: str
    other: str
    ratio: float


def run(job: Job) -> None:
    """Every tail at every number of rows, then the intermediate with two uses."""
    at_least("repeats", job.args.repeats, 1)
    repeats = 1 if job.smoke else job.args.repeats
    rows: list[list[Any]] = []
    standings: list[Standing] = []
    for case in cases(job):
        lines, found = time_case(job, case, repeats)
        rows += lines
        standings += found
    columns = ["tail", "rows", "program", "MB by formula", "MB by the compiler", "ms", "clock",
               "speed over step by step", "tail in the library call"]  # fmt: skip
    job.table("fusion", "One product with its tail", columns, rows)
    job.reaches("fusion", "; ".join([*summary(standings), time_two_uses(job, repeats)]))


def summary(standings: Sequence[Standing]) -> list[str]:
    """The speeds of our kernel over that of XLA's best, by form and rows; nothing where there is no kernel."""
    forms: dict[str, list[str]] = {}
    for standing in standings:
        forms.setdefault(standing.form, []).append(f"{standing.ratio:.3f}")
    if not forms:
        return []
    rows = ", ".join(dict.fromkeys(str(standing.rows) for standing in standings))
    speeds = ", ".join(f"{form} {' / '.join(ratios)}" for form, ratios in forms.items())
    return [f"speed of {standings[0].kernel} over XLA's best at {rows} rows: {speeds}"]


def cases(job: Job) -> Iterator[Case]:
    """The sizes of this device, in its fast dtype, one case at a time."""
    backend = jax.default_backend()
    all_rows, inputs, outputs = SMOKE if job.smoke else SIZES.get(backend, SIZES["gpu"])
    dtype = jnp.float32 if backend == "cpu" else jnp.bfloat16
    for tail, options in TAILS.items():
        for rows in all_rows:
            yield Case(tail, random_operands(job.seed, rows, inputs, outputs, dtype, **options), options["activation"])


def random_operands(
    seed: int, rows: int, inputs: int, outputs: int, dtype: Any, *, gated: bool = False, activation: str = ""
) -> dict[str, Array]:
    """Operands of unit size, made on the device; a gate takes the place of the bias."""
    del activation
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes: dict[str, tuple[int, ...]] = {"x": (rows, inputs), "w": (inputs, outputs)}
    shapes |= {"gate": (inputs, outputs)} if gated else {"bias": (outputs,)}
    scales = {"x": 1.0, "w": inputs**-0.5, "gate": inputs**-0.5, "bias": 1.0}
    return {
        name: _normal(key, shape, dtype) * jnp.asarray(scales[name], dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


def step_by_step(activation: str, x: Array, w: Array, bias: Array | None = None, gate: Array | None = None) -> Array:
    """The chain as separate kernels: each writes its result to memory, the next reads it."""
    z = lax.optimization_barrier(product(x, w))
    if bias is not None:
        z = lax.optimization_barrier(z + bias[None, :])
    if gate is None:
        return ACTIVATIONS[activation](z)
    opened = lax.optimization_barrier(ACTIVATIONS[activation](lax.optimization_barrier(product(x, gate))))
    return opened * z


def chain(activation: str, x: Array, w: Array, bias: Array | None = None, gate: Array | None = None) -> Array:
    """The chain as one writes it, in the operands' own dtype; what is fused is up to the compiler."""
    z = product(x, w) if bias is None else product(x, w) + bias[None, :]
    return ACTIVATIONS[activation](z) if gate is None else ACTIVATIONS[activation](product(x, gate)) * z


def one_product(activation: str, x: Array, pair: Array) -> Array:
    """The gated chain as a decoder has it: gate and value [inputs, 2, outputs] in one product."""
    both = product(x, pair.reshape(pair.shape[0], -1)).reshape(x.shape[0], *pair.shape[1:])
    return ACTIVATIONS[activation](both[:, 0]) * both[:, 1]


def product(x: Array, w: Array) -> Array:
    """x @ w as a user gets it: 16-bit results of 16-bit operands, and all digits of float32."""
    return jnp.matmul(x, w, precision="highest" if x.dtype.itemsize > 2 else None)


def programs(case: Case) -> dict[str, Call]:
    """All ways to compute a case, compiled; the first is the chain step by step."""
    operands = dict(case.operands)

    def compiled(function: Callable[..., Array], **options: Any) -> Callable[[], Call]:
        run = functools.partial(_by_name, function)
        return functools.partial(compile_call, run, operands, compiler_options=options)

    def library(implementation: str) -> Callable[[], Call]:
        options: dict[str, Any] = {"activation": case.activation, "implementation": implementation}
        return compiled(functools.partial(matmul_epilogue, **options))

    builders = {
        "step by step": compiled(functools.partial(step_by_step, case.activation)),
        "XLA, as written": compiled(functools.partial(chain, case.activation)),
        "matmul_epilogue, xla": library("xla"),
    }
    if jax.default_backend() == "gpu":
        builders["XLA, cuBLASLt"] = compiled(functools.partial(chain, case.activation), **CUBLASLT)
    kernel = case.kernel()
    if kernel is not None:
        builders[f"matmul_epilogue, {kernel}"] = library(kernel)
    if "gate" in operands:
        pair = jnp.stack([operands["gate"], operands["w"]], axis=1)
        ours = functools.partial(matmul_epilogue, activation=case.activation, implementation=kernel or "xla")
        ways: dict[str, tuple[Callable[..., Array], Mapping[str, Any]]] = {
            "XLA": (functools.partial(one_product, case.activation), {}),
            kernel or "xla": (ours, {}),
        }
        if jax.default_backend() == "gpu":
            ways["XLA, cuBLASLt"] = (ways["XLA"][0], CUBLASLT)
        for name, (function, options) in ways.items():
            one = functools.partial(compile_call, function, operands["x"], pair, compiler_options=options)
            builders[f"{DECODER}, {name}"] = one
    return build_all(builders)


def _by_name(function: Callable[..., Array], operands: dict[str, Array]) -> Array:
    return function(**operands)


def agreement(case: Case, calls: Mapping[str, Call]) -> Checked:
    """Every program against the reference implementation, over some of the rows, in numpy."""
    some = slice(None, None, max(1, case.rows // 64))
    reference = {**case.operands, "x": case.operands["x"][some]}
    want = on_host(matmul_epilogue(**reference, activation=case.activation, implementation="reference"))
    limit = TOLERANCE[str(case.operands["x"].dtype)] * np.abs(want).max()

    def close() -> bool:
        return all(bool(np.all(np.abs(on_host(call()[some]) - want) <= limit)) for call in calls.values())

    return checked(f"{case.tail}, {case.rows} rows: every program agrees with the reference implementation", close)


def on_host(array: Array) -> np.ndarray:
    """The values in float32."""
    return np.asarray(array).astype(np.float32)


def library_tail(call: Call) -> str:
    """What tail the compiled program hands to cuBLASLt, by its text; nothing where it calls no library."""
    return ", ".join(sorted(set(re.findall(r'"epilogue":"(\w+)"', call.executable.as_text() or ""))))


def compiler_bytes(call: Call) -> float | None:
    """Bytes that the program's instructions read and write, in MB, where the platform counts them."""
    try:
        return program_work(call.executable).bytes_moved / 1e6
    except NotImplementedError:
        return None


def stand(case: Case, kernel: str, times: Interleaved) -> list[Standing]:
    """A kernel against XLA's best, with weights in arrays of their own and, of a gate, in one."""
    seconds = {name: timing.steady_s for name, timing in times.timings.items()}
    found = []
    for form, ours, is_other in (
        (case.tail, f"matmul_epilogue, {kernel}", lambda name: name.startswith(("XLA", "matmul_epilogue, xla"))),
        (f"{case.tail}, {DECODER}", f"{DECODER}, {kernel}", lambda name: name.startswith(f"{DECODER}, XLA")),
    ):
        if ours in seconds:
            other = min(filter(is_other, seconds), key=seconds.__getitem__)
            found.append(Standing(form, case.rows, kernel, other, times.ratio(other, ours)))
    return found


def time_case(job: Job, case: Case, repeats: int) -> tuple[list[list[Any]], list[Standing]]:
    """The lines of one case in the table, and how our kernel stands in it."""
    calls, plan = programs(case), case.plan()
    check = agreement(case, calls)
    job.claim(check.what, check.passed)
    bare = compile_call(product, case.operands["x"], case.operands["w"])
    times = interleaved({**calls, "one product alone": bare}, check=check, repeats=repeats)
    rows = []
    for name, timing in times.timings.items():
        call = calls.get(name, bare)
        by_formula = {"step by step": plan.unfused_bytes, "one product alone": None}.get(name, plan.bytes)
        ratio = times.ratio("step by step", name) if name in calls else None
        rows.append(
            [case.tail, case.rows, name, None if by_formula is None else by_formula / 1e6, compiler_bytes(call),
             1e3 * timing.steady_s, timing.clock.split(" ")[0], ratio, library_tail(call)]
        )  # fmt: skip
        values = {} if ratio is None else {"speed_ratio": ratio, "bytes": by_formula}
        settings = {"tail": case.tail, "rows": case.rows, "program": name}
        job.record("epilogue", settings=settings, check=check.what, values=values, **timing.fields())
    return rows, judge_case(job, case, calls, times)


def judge_case(job: Job, case: Case, calls: Mapping[str, Call], times: Interleaved) -> list[Standing]:
    """Fusing moves less; and a kernel of our own is to keep up with the best that XLA makes."""
    counted = {name: compiler_bytes(calls[name]) for name in ("step by step", "XLA, as written")}
    separate, fused = counted.values()
    if separate is not None and fused is not None:
        what = f"{case.tail}, {case.rows} rows: fused, the compiler moves {fused:.4g} of {separate:.4g} MB"
        job.claim(what, fused < separate)
    kernel = case.kernel()
    if kernel is None or job.smoke:
        return []
    standings = stand(case, kernel, times)
    bars = [(standing, AT_LEAST) for standing in standings]
    if case.rows == max(SIZES["gpu"][0]) and case.activation == "gelu_tanh":
        ratio = times.ratio("XLA, as written", f"matmul_epilogue, {kernel}")
        bars.append((Standing(case.tail, case.rows, kernel, "XLA, as written", ratio), OVER_AS_WRITTEN))
    for standing, bar in bars:
        what = f"{standing.form}, {case.rows} rows: {kernel} is {standing.ratio:.3f} times as fast as {standing.other}"
        job.goal(f"{what}, at least {bar:.2f}", standing.ratio >= bar)
    return standings


def time_two_uses(job: Job, repeats: int) -> str:
    """h = gelu(x W + b) feeds two products: kept in memory it is computed once, fused into both uses twice.

    Returns what came of it, in a line.
    """
    backend = jax.default_backend()
    all_rows, inputs, outputs = SMOKE if job.smoke else SIZES.get(backend, SIZES["gpu"])
    rows, narrow = all_rows[-1], inputs // 8
    dtype = jnp.float32 if backend == "cpu" else jnp.bfloat16
    made = random_operands(job.seed, rows, inputs, outputs, dtype)
    uses = [random_operands(seed, 1, outputs, narrow, dtype)["w"] for seed in (1, 2)]

    def hidden(x: Array) -> Array:
        return matmul_epilogue(x, made["w"], made["bias"], activation="gelu_tanh")

    def kept(x: Array, again: Array, first: Array, second: Array) -> tuple[Array, Array]:
        del again
        h = lax.optimization_barrier(hidden(x))
        return product(h, first), product(h, second)

    def recomputed(x: Array, again: Array, first: Array, second: Array) -> tuple[Array, Array]:
        # A second operand with the same values, or the compiler would compute the hidden layer once.
        return product(hidden(x), first), product(hidden(again), second)

    operands = (made["x"], made["x"] + jnp.zeros((), dtype), *uses)
    calls = {name: compile_call(f, *operands) for name, f in (("kept", kept), ("recomputed", recomputed))}
    results = [[on_host(part) for part in call()] for call in calls.values()]
    limit = TOLERANCE[str(made["x"].dtype)]
    check = checked(
        "both give the same two products",
        lambda: all(bool(np.all(np.abs(a - b) <= limit * np.abs(a).max())) for a, b in zip(*results, strict=True)),
    )
    job.claim(check.what, check.passed)
    times = interleaved(calls, check=check, repeats=repeats)
    ratio, spread = times.ratio("recomputed", "kept"), times.ratio_spread("recomputed", "kept")
    size = rows * outputs * np.dtype(dtype).itemsize
    table = [
        ["kept", 3 * size / 1e6, 0.0, 1e3 * times.timings["kept"].steady_s, ratio],
        ["recomputed", 0.0, 2 * rows * inputs * outputs / 1e9, 1e3 * times.timings["recomputed"].steady_s, 1.0],
    ]
    columns = ["intermediate", "extra MB", "extra GFLOP", "ms", "speed over recomputing"]
    job.table("two_uses", f"An intermediate [{rows}, {outputs}] with two uses", columns, table)
    values = {"speed_ratio": ratio, "spread": list(spread)}
    job.record("two uses", settings={"rows": rows}, check=check.what, values=values, **times.timings["kept"].fields())
    if not job.smoke:  # there it takes microseconds, which a busy machine can turn around
        job.claim(
            f"fusing an intermediate into both of its uses loses: keeping it is {ratio:.3g} times as fast", ratio > 1
        )
    return f"an intermediate with two uses: keeping it is {ratio:.3g} times as fast as fusing it into both"
