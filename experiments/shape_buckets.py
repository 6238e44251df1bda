"""Functions of any length through programs for a few: how many shapes to compile for, and which."""

import argparse
import ast
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.corpus import Document, library_folder, read_documents
from experiments.harness import Job
from experiments.pairs import Pair, load_pair
from flashspec import models
from flashspec.attention import dot_product_attention
from flashspec.costs import break_even_calls
from flashspec.measure import HOST, Interleaved, checked, interleaved
from flashspec.specialize import (
    BucketEntry,
    ShapeBuckets,
    Specialized,
    bucket_tradeoff,
    expected_extra_area,
    expected_padding,
    optimal_buckets,
    should_precompile,
    specialize,
)

QUESTION = "How many shapes are worth compiling for, and which?"
NEEDS = "a CPU or a GPU, and the standard library's sources"
TIME = "3 minutes on 2 CPU cores, 5 on an H200"

LONGEST = 512  # positions that the bundled model was trained for
TILE = 8  # optimal bounds are multiples of this
TOLERANCE = 1e-3  # of a log-probability in float32, between programs of different shape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=60, help="functions that are served by every policy")
    parser.add_argument("--layers", type=int, default=4, help="of the bundled target")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A choice of buckets, and the function specialised for it."""

    name: str
    buckets: ShapeBuckets
    program: Specialized

    def serve(self, params: Any, requests: Sequence[np.ndarray]) -> list[Array]:
        """Log-probabilities of every request, one after another."""
        return [self.program(params, tokens) for tokens in requests]

    @property
    def compile_s(self) -> float:
        """Seconds spent on compiling, over all buckets."""
        return sum(entry.compile_s for entry in self.program.ledger.entries.values())


def run(job: Job) -> None:
    """Collect the lengths, choose buckets, serve a sample by each choice, and settle the accounts."""
    pair = load_pair(layers=1 if job.smoke else job.args.layers)
    tokens = encode(pair, list(library_functions(documents(job))))
    counts = Counter(len(ids) for ids in tokens if len(ids) <= LONGEST)
    requests = sample(tokens, 4 if job.smoke else job.args.requests, job.seed)
    job.say(
        f"{len(tokens)} functions, of which {counts.total() / len(tokens):.1%} have at most {LONGEST} tokens and are "
        f"served; {len(requests)} of them, drawn at random, are timed. Their lengths: {quantiles(counts)}."
    )
    policies = make_policies(pair, counts, requests, few=job.smoke)
    compare_padding(job, policies, counts)
    for policy in job.track(policies, "compiling"):
        policy.program.warm_up(pair.target_params, requests[0])
    times = measure(job, policies, pair, requests)
    compare_speed(job, policies, times, requests)
    by_name = {policy.name: policy for policy in policies}
    settle(job, by_name["optimal, linear"], pair, requests, counts)


def documents(job: Job) -> list[Document]:
    """The library's sources without its tests; a few of them for a smoke run."""
    found = list(read_documents(library_folder(), with_tests=False))
    return found[::40] if job.smoke else found


def library_functions(sources: Sequence[Document]) -> Iterator[str]:
    """The text of every function in the documents, inner ones too."""
    for document in sources:
        lines = document.text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(document.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def encode(pair: Pair, texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids [T] of each text."""
    return [np.array(encoding.ids, np.int32) for encoding in pair.tokenizer.backend.encode_batch(list(texts))]


def sample(tokens: Sequence[np.ndarray], count: int, seed: int) -> list[np.ndarray]:
    """Requests drawn without replacement from those that can be served."""
    served = [ids for ids in tokens if len(ids) <= LONGEST]
    chosen = np.random.default_rng(seed).choice(len(served), size=min(count, len(served)), replace=False)
    return [served[index] for index in chosen]


def quantiles(counts: Counter[int]) -> str:
    """The distribution of lengths in words."""
    values = np.repeat(list(counts), list(counts.values()))
    marks = {"10%": 0.1, "median": 0.5, "90%": 0.9}
    return ", ".join(f"{name} {np.quantile(values, share):.0f}" for name, share in marks.items())


def scorer(pair: Pair) -> Any:
    """(params, tokens [T], length) -> the log-probability of each token after the first, [T], 0 from `length` on."""

    def score(params: Any, tokens: Array, length: Array) -> Array:
        live = jnp.arange(tokens.shape[0], dtype=jnp.int32) < length
        ids = jnp.where(live, tokens, 0)
        logits = models.merge(pair.config, params)(ids[None, :], attention=dot_product_attention)[0]
        logprobs = jax.nn.log_softmax(logits[:-1].astype(jnp.float32))
        taken = jnp.take_along_axis(logprobs, ids[1:, None], axis=1)[:, 0]
        return jnp.where(live, jnp.concatenate([jnp.zeros(1, jnp.float32), taken]), 0.0)

    return score


def make_policies(pair: Pair, counts: Counter[int], requests: Sequence[np.ndarray], few: bool) -> list[Policy]:
    """One program for each length that is requested, powers of two, and the best bounds, as many and half as many."""
    last = (max(counts) - 1).bit_length()
    powers = ShapeBuckets(tuple(2**k for k in range(last - 1 if few else 3, last + 1)))
    number = len(powers.bounds)
    choices = {
        "no buckets": ShapeBuckets(tuple(sorted({len(ids) for ids in requests}))),
        "powers of two": powers,
        "optimal, linear": optimal_buckets(counts, number, "linear", multiple_of=TILE),
        "optimal, quadratic": optimal_buckets(counts, number, "quadratic", multiple_of=TILE),
        "optimal, half as many": optimal_buckets(counts, -(-number // 2), "linear", multiple_of=TILE),
    }
    axes = {"tokens": 0}
    programs = {
        name: specialize(scorer(pair), buckets, in_axes=axes, out_axes=0, length_arg="length", progress=False)
        for name, buckets in choices.items()
    }
    return [Policy(name, buckets, programs[name]) for name, buckets in choices.items()]


def compare_padding(job: Job, policies: Sequence[Policy], counts: Counter[int]) -> None:
    """Exact expectations over all lengths, and the curve of what one more bucket is worth."""
    bucketed = policies[1:]
    padding = {policy.name: expected_padding(counts, policy.buckets) for policy in bucketed}
    area = {policy.name: expected_extra_area(counts, policy.buckets) for policy in bucketed}
    mean = sum(length * count for length, count in counts.items()) / counts.total()
    rows = [
        [p.name, len(p.buckets.bounds), float(padding[p.name]), f"{float(padding[p.name]) / mean:.1%}",
         float(area[p.name]), " ".join(map(str, p.buckets.bounds))]
        for p in bucketed
    ]  # fmt: skip
    columns = ["policy", "buckets", "E[b - T]", "of E[T]", "E[b^2 - T^2]", "bounds"]
    job.table("padding", "Expected padding and extra area of a request, over all functions", columns, rows)
    job.claim(
        "optimal bounds pad no more than as many powers of two", padding["optimal, linear"] <= padding["powers of two"]
    )
    job.claim(
        "the bounds of least area have less area than those of least padding, which pad less",
        area["optimal, quadratic"] <= area["optimal, linear"]
        and padding["optimal, linear"] <= padding["optimal, quadratic"],
    )
    curve = bucket_tradeoff(counts, 4 if job.smoke else 16, multiple_of=TILE)
    with job.figure("tradeoff", "Expected padding against the number of buckets") as axes:
        axes.plot([number for number, _ in curve], [float(cost) for _, cost in curve], "-o", label="optimal")
        powers = policies[1]
        axes.plot([len(powers.buckets.bounds)], [float(padding[powers.name])], "s", label=powers.name)
        axes.set(xlabel="buckets (compilations)", ylabel="E[b(T) - T], tokens", yscale="log")
        axes.legend()


def measure(job: Job, policies: Sequence[Policy], pair: Pair, requests: Sequence[np.ndarray]) -> Interleaved:
    """Serve the sample by every policy in turn, beside the check that they give the same log-probabilities."""
    served = {policy.name: policy.serve(pair.target_params, requests) for policy in policies}

    def agree() -> bool:
        exact = served[policies[0].name]
        gaps = [
            np.abs(np.asarray(one) - np.asarray(other)).max(initial=0)
            for policy in policies[1:]
            for one, other in zip(served[policy.name], exact, strict=True)
        ]
        return bool(np.all(np.asarray(gaps) <= TOLERANCE))

    check = checked(f"log-probabilities within {TOLERANCE} of those of programs without padding", agree)
    job.claim(check.what, check.passed)
    for policy in policies[1:]:
        almost_full = np.resize(requests[0], policy.buckets.bounds[-1] - 1)
        policy.program.check_padding(pair.target_params, almost_full)
    job.say("NaN, infinities and extreme integers in the padding change no bit of a result.")
    calls = {p.name: (lambda p=p: p.serve(pair.target_params, requests)) for p in policies}
    return interleaved(calls, check=check, repeats=1 if job.smoke else 5, clock=HOST)


def compare_speed(job: Job, policies: Sequence[Policy], times: Interleaved, requests: Sequence[np.ndarray]) -> None:
    """What each policy costs once, and what it then takes; without buckets is the base of the ratios."""
    base, total = policies[0].name, sum(map(len, requests))
    rows: list[list[Any]] = []
    for policy in policies:
        timing, entries = times.timings[policy.name], policy.program.ledger.entries.values()
        share = sum(e.padding for e in entries) / max(1, sum(e.calls for e in entries) * total / len(requests))
        ratio = times.ratio(base, policy.name)
        rows.append(
            [policy.name, len(entries), policy.compile_s, timing.steady_s, total / timing.steady_s, f"{share:.1%}",
             ratio, policy.compile_s + timing.steady_s]
        )  # fmt: skip
        job.record(
            policy.name,
            settings={"requests": len(requests), "tokens": total, "bounds": list(policy.buckets.bounds)},
            check=times.check.what,
            values={"speed_ratio": ratio, "padding_share": share, "buckets": len(entries)},
            **timing.fields() | {"compile_s": policy.compile_s},
        )
        policy.program.ledger.write_json(job.out / f"{policy.name.replace(', ', '_').replace(' ', '_')}.json")
    columns = ["policy", "programs", "compile, s", "all requests, s", "tokens/s", "padding", f"speed over {base}",
               "compile + once, s"]  # fmt: skip
    job.table("speed", f"{len(requests)} requests, {total} tokens, one at a time", columns, rows)
    spent = {policy.name: row[-1] for policy, row in zip(policies, rows, strict=True)}
    if not job.smoke:
        job.claim(
            "with buckets the sample is served sooner, compilation included",
            min(spent, key=lambda name: spent[name]) != base,
        )
    best = policies[2]
    job.reaches(
        "shape buckets",
        f"{len(best.buckets.bounds)} optimal buckets serve {len(requests)} functions of the standard library in "
        f"{spent[best.name]:.3g} s, compilation included; a program for each length takes {spent[base]:.3g} s",
    )


def settle(job: Job, policy: Policy, pair: Pair, requests: Sequence[np.ndarray], counts: Counter[int]) -> None:
    """Eq. 33.9 for each bucket, against op by op and against the next larger bucket."""
    entries = list(policy.program.ledger.entries.values())
    for entry in job.track(entries, "timing op by op"):
        lengths = [ids for ids in requests if policy.buckets.bucket_of(len(ids)) == entry.bound]
        if lengths:
            policy.program.time_op_by_op(pair.target_params, lengths[0])
    job.say(f"```\n{policy.program.ledger}\n```")
    rows = [
        settle_one(entry, larger, policy, counts) for entry, larger in zip(entries, [*entries[1:], None], strict=True)
    ]
    columns = ["bucket", "C, s", "t_c, ms", "op by op, ms", "next bucket, ms", "calls to repay, op by op",
               "calls to repay, next bucket", "share of requests", "worth it for 1,000 requests"]  # fmt: skip
    title = "Break-even by eq. 33.9, optimal buckets (a padded call takes the bucket's time whatever its length)"
    job.table("settled", title, columns, rows)


def settle_one(entry: BucketEntry, larger: BucketEntry | None, policy: Policy, counts: Counter[int]) -> list[Any]:
    """One bucket's line; what was never called has no times."""
    calls = sum(count for length, count in counts.items() if policy.buckets.bucket_of(length) == entry.bound)
    share, after = calls / counts.total(), entry.time_after
    beside = None if larger is None else larger.time_after
    repay = [needed(entry, before) for before in (entry.op_by_op_s, beside)]
    before = beside if larger is not None else entry.op_by_op_s
    worth = None
    if before is not None and after is not None:
        decision = should_precompile(entry.compile_s, round(1000 * share), before, after)
        worth = f"{'yes' if decision else 'no'} ({float(decision.net_benefit):.3g} s)"
    times = [None if t is None else 1e3 * t for t in (after, entry.op_by_op_s, beside)]
    return [entry.bound, entry.compile_s, *times, *repay, f"{share:.1%}", worth]


def needed(entry: BucketEntry, before: float | None) -> float | int | None:
    """Calls from which the bucket's compilation pays."""
    if before is None or entry.time_after is None:
        return None
    return break_even_calls(entry.compile_s, before, entry.time_after)
