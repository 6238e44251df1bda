"""Reading a prefix that many rows share once instead of once a row: from which length and batch it pays."""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.harness import Job
from flashspec.attention import DenseView, cascade_attention, decode_attention
from flashspec.measure import checked, compile_call, interleaved

QUESTION = "From which length and batch does it pay to read a shared prefix once for all rows?"
NEEDS = "a GPU with 40 GB of memory for the whole grid; smaller ones run on a CPU"
TIME = "3 minutes on an H200, 2 on 2 CPU cores"

PREFIXES = {"gpu": (128, 512, 2048, 8192, 32768), "cpu": (128, 512, 2048)}
BATCHES = {"gpu": (1, 2, 4, 16, 64), "cpu": (1, 2, 8)}
HEADS, KV_HEADS, HEAD_SIZE, OWN = 32, 8, 128, 512
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # of the norm of the output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1, help="new tokens of a row")
    parser.add_argument("--repeats", type=int, default=7)


def run(job: Job) -> None:
    """Time both ways at every prefix and batch; the first prefix that pays, by batch."""
    backend = "gpu" if jax.default_backend() == "gpu" else "cpu"
    prefixes = (64, 256) if job.smoke else PREFIXES[backend]
    batches = (1, 4) if job.smoke else BATCHES[backend]
    dtype = jnp.bfloat16 if backend == "gpu" else jnp.float32
    speeds = {(B, P): time_pair(job, B, P, dtype) for B in batches for P in prefixes}
    rows = [
        [B, *(speeds[B, P] for P in prefixes), first_that_pays([(P, speeds[B, P]) for P in prefixes])] for B in batches
    ]
    title = f"Time of one cache a row over time with the prefix read once; each row has {OWN} positions of its own"
    job.table("speed", title, ["rows", *(f"prefix {P}" for P in prefixes), "pays from"], rows)
    with job.figure("speed", "Speed of reading the prefix once, over reading it once a row") as axes:
        for B in batches:
            axes.plot(prefixes, [speeds[B, P] for P in prefixes], "-o", label=f"{B} rows")
        axes.axhline(1, color="black", linewidth=0.5)
        axes.set(xscale="log", yscale="log", xlabel="length of the prefix", ylabel="speed")
        axes.legend()


def first_that_pays(speeds: Sequence[tuple[int, float]]) -> str:
    """The shortest prefix from which on reading it once is faster, out of (length, speed)."""
    losing = [length for length, speed in speeds if speed <= 1]
    paying = [length for length, _ in speeds if not losing or length > max(losing)]
    return str(min(paying)) if paying else "no length here"


def time_pair(job: Job, B: int, P: int, dtype: Any) -> float:
    """How many times faster the cascade is, beside the check that both return the same."""
    query, shared, own, both = operands(job.seed, B, P, job.args.tokens, dtype)
    calls = {
        "one cache a row": compile_call(decode_attention, query, both),
        "prefix once": compile_call(cascade_attention, query, *shared, own),
    }

    def same() -> bool:
        want, got = (np.asarray(call(), np.float32) for call in calls.values())
        return bool(np.linalg.norm(got - want) <= TOLERANCE[np.dtype(dtype).name] * np.linalg.norm(want))

    check = checked(f"{B} rows, prefix {P}: both ways return the same", same)
    times = interleaved(calls, check=check, repeats=1 if job.smoke else job.args.repeats)
    settings = {"B": B, "P": P, "T": job.args.tokens, "N": HEADS, "K": KV_HEADS, "own": OWN}
    for name, timing in times.timings.items():
        job.record(name, settings=settings, **timing.fields())
    job.claim(check.what, check.passed)
    return times.ratio("one cache a row", "prefix once")


def operands(seed: int, B: int, P: int, T: int, dtype: Any) -> tuple[Array, tuple[Array, Array], DenseView, DenseView]:
    """Queries, the prefix, each row's own cache, and one cache a row that holds both."""
    keys = jax.random.split(jax.random.key(seed), 5)
    draw = functools.partial(_normal, dtype=dtype)
    query = draw(keys[0], (B, T, HEADS, HEAD_SIZE))
    shared = draw(keys[1], (P, KV_HEADS, HEAD_SIZE)), draw(keys[2], (P, KV_HEADS, HEAD_SIZE))
    k, v = (draw(key, (B, OWN, KV_HEADS, HEAD_SIZE)) for key in keys[3:])
    own, length = DenseView(k, v, jnp.full(B, OWN, jnp.int32)), jnp.full(B, OWN + P, jnp.int32)
    key, value = (
        jnp.concatenate([jnp.broadcast_to(x, (B, *x.shape)), y], axis=1) for x, y in zip(shared, (k, v), strict=True)
    )
    return query, shared, own, DenseView(key, value, length)


@functools.partial(jax.jit, static_argnums=1, static_argnames="dtype")
def _normal(key: Array, shape: tuple[int, ...], *, dtype: Any) -> Array:
    return jax.random.normal(key, shape, dtype)
