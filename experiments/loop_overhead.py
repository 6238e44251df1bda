"""How much of a speculative round is spent outside of the two models, each part timed as its own compiled loop."""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import Job
from experiments.pairs import load_pair
from experiments.round_costs import Costs, Shape, measure_costs
from experiments.ruled_models import random_params
from flashspec import models
from flashspec.language_model import LanguageModel, Params
from flashspec.measure import HOST
from flashspec.sampling import SamplingParams
from flashspec.speculative import ModelDrafter

QUESTION = "How much of a speculative round is spent outside of the two models?"
NEEDS = "a GPU for the large pair (35 GB of memory); the bundled pair runs anywhere"
TIME = "3 minutes on an H200; 2 minutes on 2 CPU cores, where the large pair is left out"

LARGE = ("llama-3-8b", "llama-3-1b-shape")
BAR = 0.10


@dataclasses.dataclass(frozen=True)
class Case:
    """A pair of models and the batch that it decodes."""

    name: str
    target: LanguageModel
    params: Params
    drafter: ModelDrafter
    batch: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=512, help="positions in the caches")
    parser.add_argument("--large", action="store_true", help="time the 8B and 1B shapes on a CPU too")


def run(job: Job) -> None:
    """Time every case and state the overhead."""
    args, sampling = job.args, SamplingParams(temperature=0.8, top_k=None, top_p=None)
    rows = []
    for case in cases(job):
        steps = {"steps": 2, "repeats": 1} if job.smoke else {}
        shape = Shape(case.batch, 64 if job.smoke else args.capacity, **steps)
        parts = measure_costs(case.target, case.params, case.drafter, args.draft_length, sampling, shape)
        rows.append(row_of(case, parts, args.draft_length))
        job.record(
            case.name,
            settings={"batch": case.batch, "draft_length": args.draft_length, **dataclasses.asdict(shape)},
            clock=HOST,
            steady_s=parts.round,
            repeats=shape.repeats,
            values={**dataclasses.asdict(parts), "overhead": parts.overhead(args.draft_length)},
        )
        if case.name.startswith(LARGE[0]):
            job.claim(f"{case.name}: the overhead is under {BAR:.0%}", parts.overhead(args.draft_length) < BAR)
    shares = ", ".join(f"{name} at B = {batch} {overhead}" for name, batch, *_, overhead in rows)
    job.reaches("the compiled loop", f"share of a round outside of the models at D = {args.draft_length}: {shares}")
    columns = ["pair", "B", "c_d, ms", "c_v, ms", "c_m of free models, ms", "round, ms", "predicates", "overhead"]
    job.table("overhead", f"(round - (D + 1) c_d - c_v) / round at D = {args.draft_length}", columns, rows)


def row_of(case: Case, parts: Costs, draft_length: int) -> list[Any]:
    """One line of the table."""
    times = (parts.draft_step, parts.verify, parts.management, parts.round)
    return [
        case.name,
        case.batch,
        *(1e3 * seconds for seconds in times),
        parts.predicates,
        f"{parts.overhead(draft_length):.1%}",
    ]


def cases(job: Job) -> Iterator[Case]:
    """The bundled pair at two batches, then the large one; made one after another, to hold one pair at a time."""
    on_cpu = jax.default_backend() == "cpu"
    pair = load_pair(dtype=jnp.float32 if on_cpu else jnp.bfloat16)
    for batch in (1,) if job.smoke else (1, 32):
        yield Case("bundled", pair.target, pair.target_params, pair.drafter, batch)
    if (job.args.large or not on_cpu) and not job.smoke:
        target, draft = (random_model(name, job.seed) for name in LARGE)
        yield Case(f"{LARGE[0]} with {LARGE[1]}", *target, ModelDrafter(*draft), 1)


def random_model(preset: str, seed: int) -> tuple[LanguageModel, Params]:
    """A model of a preset's shape with random bfloat16 weights."""
    config = models.PRESETS[preset]
    return models.as_language_model(config, jnp.bfloat16), random_params(config, seed)
