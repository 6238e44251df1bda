"""How fast attention runs for prefill and training, against the other implementations that are installed."""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import attention_peers
from experiments.harness import Job
from flashspec.attention import dot_product_attention, plan_attention
from flashspec.measure import Interleaved, checked, compile_call, interleaved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUESTION = "How fast is attention forward and backward, against the best of its peers on this device?"
NEEDS = "a GPU or a TPU; the peers are optional (extra `peers`)"
TIME = "5 minutes on an H200; the smoke run anywhere"

OURS = "flashspec"
FORWARD_BAR, FORWARD_MEAN = 0.99, 1.03
TRAINING_BAR, TRAINING_MEAN = 0.99, 1.02
CLOSE = 1e-2  # relative distance of a result in bfloat16 from one in float32


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes (see `flashspec.dims`), and what hides pairs."""

    B: int
    T: int
    N: int
    K: int
    H: int
    is_causal: bool = False
    window: tuple[int, int] | None = None

    def __str__(self) -> str:
        heads = f"N{self.N}" if self.N == self.K else f"N{self.N} K{self.K}"
        rule = "causal" if self.is_causal else "full"
        return f"B{self.B} T{self.T} {heads} H{self.H} {rule}" + (f" window {self.window}" if self.window else "")

    @property
    def options(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "window": self.window}


GRID = (
    *(Case(16, 1024, 16, 16, 128, causal) for causal in (False, True)),
    *(Case(4, 4096, 16, 16, 128, causal) for causal in (False, True)),
    *(Case(1, 16384, 16, 16, 128, causal) for causal in (False, True)),
    *(Case(4, 4096, 32, 8, 128, causal) for causal in (False, True)),
    Case(4, 4096, 32, 32, 64, True),
    Case(4, 4096, 8, 8, 256, True),
    Case(1, 16384, 16, 16, 128, True, (1023, 0)),
)
TRAINING = tuple(case for case in GRID if case.T > 1024 and case.window is None)
SMOKE = (Case(1, 32, 2, 1, 16, True),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each implementation, in turn")
    parser.add_argument("--passes", choices=("forward", "training", "both"), default="both")


def run(job: Job) -> None:
    """Time both directions over the grid."""
    if job.args.passes != "training":
        _table(job, "forward", SMOKE if job.smoke else GRID, forward, 1.0, (FORWARD_BAR, FORWARD_MEAN))
    if job.args.passes != "forward":
        _table(job, "training", SMOKE if job.smoke else TRAINING, gradients, 3.5, (TRAINING_BAR, TRAINING_MEAN))


def forward(attend: Callable[..., jax.Array], case: Case) -> Callable[..., Any]:
    """The call itself."""
    return lambda query, key, value: attend(query, key, value, **case.options)


def gradients(attend: Callable[..., jax.Array], case: Case) -> Callable[..., Any]:
    """Forward and backward: the gradients of query, key and value for random cotangents."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        _, pull = jax.vjp(forward(attend, case), query, key, value)
        return pull(cotangent)

    return call


def _table(
    job: Job, name: str, cases: tuple[Case, ...], direction: Any, work: float, bars: tuple[float, float]
) -> None:
    rows, ratios, speeds = [], [], {}
    for case in job.track(cases, name):
        timed = measure(job, case, direction, job.args.repeats if not job.smoke else 1)
        rates = {one: work * flops(case) / timing.steady_s / 1e12 for one, timing in timed.timings.items()}
        speeds[str(case)] = rates
        peers = {one: rate for one, rate in rates.items() if one != OURS}
        ratio = rates[OURS] / max(peers.values()) if peers else None
        shape = jax.ShapeDtypeStruct((case.B, case.T, case.N, case.H), jnp.bfloat16)
        other = jax.ShapeDtypeStruct((case.B, case.T, case.K, case.H), jnp.bfloat16)
        plan = plan_attention(shape, other, other, **case.options)
        ran = plan.forward if name == "forward" else plan.backward
        columns = [_cell(peers.get(peer)) for peer in attention_peers.PEERS]
        rows.append([str(case), ran.implementation, f"{rates[OURS]:.0f}", *columns, _cell(ratio, 3)])
        if ratio is not None:
            ratios.append(ratio)
        for one, timing in timed.timings.items():
            job.record(f"{name}/{case}/{one}", settings=dataclasses.asdict(case), **timing.fields())
    columns = ["case", "kernel", OURS, *attention_peers.PEERS, "ratio to the best"]
    job.table(name, f"{name}, TFLOP/s (a causal mask counts half, training 3.5 times)", columns, rows)
    with job.figure(name, f"Attention, {name}") as axes:
        draw(axes, speeds)
    if ratios:
        mean = math.prod(ratios) ** (1 / len(ratios))
        job.say(f"{name}: geometric mean of our ratio to the best peer of each row: {mean:.3f}")
        job.goal(f"{name}: at least {bars[0]} of the best peer in every row", min(ratios) >= bars[0])
        job.goal(f"{name}: geometric mean of at least {bars[1]}", mean >= bars[1])
        job.reaches(f"attention, {name}", f"{min(ratios):.2f} to {max(ratios):.2f} of the best peer, mean {mean:.2f}")


def draw(axes: "Axes", speeds: Mapping[str, Mapping[str, float]]) -> None:
    """TFLOP/s of every implementation on every case, ours in front."""
    names = [OURS, *attention_peers.PEERS]
    for number, name in enumerate(names):
        places = [row + (number - 1.5) / 5 for row, rates in enumerate(speeds.values()) if name in rates]
        axes.barh(places, [rates[name] for rates in speeds.values() if name in rates], height=0.2, label=name)
    axes.set_yticks(range(len(speeds)), list(speeds), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    axes.legend(fontsize=7, ncols=len(names), loc="upper center", bbox_to_anchor=(0.35, -0.12))


def measure(job: Job, case: Case, direction: Any, repeats: int) -> Interleaved:
    """Every implementation in turn, after a check of each: a peer whose result is wrong is named and not timed."""
    operands = _operands(case, job.seed, 4 if direction is gradients else 3)
    calls = {OURS: compile_call(direction(dot_product_attention, case), *operands)}
    for name, attend in attention_peers.installed(case.H).items():
        try:
            calls[name] = compile_call(direction(attend, case), *operands)
        except (NotImplementedError, ValueError) as refusal:
            job.say(f"{name} does not take {case}: {refusal}")
    want = _oracle(case, direction, operands)
    right = {name: _close(_part(case, jax.tree.leaves(call())), want) for name, call in calls.items()}
    for name in [name for name, passed in right.items() if not passed and name != OURS]:
        job.say(f"{name} is not timed on {case}: its result failed the check")
        del calls[name]
    check = checked(f"the last heads of {case} agree with float32 arithmetic", lambda: right[OURS])
    return interleaved(calls, check=check, repeats=repeats)


def _oracle(case: Case, direction: Any, operands: list[jax.Array]) -> list[Any]:
    """Results for the last row's last group of heads, computed blockwise in float32."""
    attend = functools.partial(dot_product_attention, implementation="blockwise")
    part = [x.astype(jnp.float32) for x in _part(case, operands)]
    return jax.tree.leaves(jax.jit(direction(attend, case))(*part))


def _part(case: Case, arrays: list[Any]) -> list[Any]:
    """The last batch row and last key/value head of arrays [B, length, heads, size], with the heads that read it."""
    return [x[-1:, :, -max(1, x.shape[2] // case.K) :] for x in arrays]


def _operands(case: Case, seed: int, count: int) -> list[jax.Array]:
    heads = (case.N, case.K, case.K, case.N)[:count]
    keys = jax.random.split(jax.random.key(seed), count)
    shapes = [(case.B, case.T, n, case.H) for n in heads]
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def _close(got: Any, want: Any) -> bool:
    pairs = [(np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in zip(got, want, strict=True)]
    return all(bool(np.linalg.norm(x - y) <= CLOSE * np.linalg.norm(y)) for x, y in pairs)


def flops(case: Case) -> float:
    """Multiplications and additions of the forward's two products, over the pairs that are visible."""
    pairs = case.T * case.T / (2 if case.is_causal else 1)
    if case.window is not None:
        pairs = case.T * (case.window[0] + 1)
    return 4 * case.B * case.N * pairs * case.H


def _cell(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
