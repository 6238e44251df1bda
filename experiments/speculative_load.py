"""Plain and speculative decoding as a service: a queue, a batch whose slots are given away again, and tail times."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import load_workloads
from experiments.compilation import build_all
from experiments.greedy_check import ROUNDING, check_greedy
from experiments.harness import Job
from experiments.load_workloads import Workload
from experiments.pairs import Pair
from experiments.request_queue import Server, Sizes, Trace
from experiments.ruled_models import accepted_as_set
from flashspec import models
from flashspec.checks import at_least, fail
from flashspec.measure import HOST, Checked, interleaved
from flashspec.sampling import SamplingParams

QUESTION = "From which batch on does speculation lose, and what does it do to waiting and tail times (exercise 33.13)?"
NEEDS = "nothing beyond the installation; with --large a GPU with 60 GB of memory"
TIME = "3 minutes on an H200, 4 minutes on 2 CPU cores, which serve 16 slots at most"

PLAIN, SPECULATIVE = "plain", "speculative"
WAYS = (PLAIN, SPECULATIVE)
QUANTILES = (0.5, 0.95, 0.99)
JUDGED = 8  # requests whose tokens are judged
NARROW = 2**-6  # rounding of logits in 16 bits, of the largest in magnitude


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch",
        type=int,
        action="append",
        help="slots; may be repeated (default: 1, 4, 16, 64, on a CPU up to 16, with --large 1, 16, 64)",
    )
    parser.add_argument("--draft-length", type=int, default=4, help="default: 4")
    parser.add_argument(
        "--requests", type=int, help="at each batch (default: 32, or 3 a slot where that is more; with --large 8, or 2)"
    )
    parser.add_argument(
        "--load", type=float, default=0.7, help="arrivals over what plain decoding serves, default: 0.7"
    )
    parser.add_argument("--longest-prompt", type=int, default=128, help="default: 128")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats in turn, after a first (default: 3)")
    parser.add_argument("--large", action="store_true", help="the shapes of --target and --draft with random weights")
    parser.add_argument("--target", choices=tuple(models.PRESETS), default="qwen3-8b", help="with --large")
    parser.add_argument("--draft", choices=tuple(models.PRESETS), default="qwen3-0.6b", help="with --large")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of a draft token with --large (default: 0.8)")


def run(job: Job) -> None:
    """Check, then serve the same requests both ways at each batch: all at once, and as a Poisson process."""
    args = job.args
    _check_arguments(job)
    if job.smoke:
        vars(args).update(batch=[2], requests=4, longest_prompt=12, max_new_tokens=6, repeats=1, draft_length=2)
    workload = load_workload(job)
    wide = workload.pair.dtype == jnp.float32 or args.large
    judge = workload.pair if wide else load_workload(job, jnp.float32).pair
    batches = sorted(set(args.batch or default_batches(args.large)))
    with job.console.status(f"compiling, for {', '.join(map(str, batches))} slots"):
        servers = build_all({(batch, way): server(job, workload, batch, way) for batch in batches for way in WAYS})
    found = {}
    for batch in batches:
        ways = {way: servers[batch, way] for way in WAYS}
        check = check_tokens(job, workload, ways, judge)
        if not job.claim(check.what, check.passed):
            return
        found[batch] = measure(job, workload, ways, check)
    report(job, found)


def default_batches(large: bool) -> tuple[int, ...]:
    """Slots that are served where the command line names none."""
    if large:
        return 1, 16, 64
    return (1, 4, 16) if jax.default_backend() == "cpu" else (1, 4, 16, 64)


def _check_arguments(job: Job) -> None:
    args = job.args
    for name in ("draft_length", "longest_prompt", "max_new_tokens", "repeats"):
        at_least(name.replace("_", "-"), getattr(args, name), 1)
    for name in ("batch", "requests"):
        for value in np.atleast_1d(getattr(args, name) or 1):
            at_least(name, int(value), 1)
    for name in ("load", "acceptance"):
        if not 0 < getattr(args, name) < 1:
            raise fail(name, "a number between 0 and 1", getattr(args, name))


def load_workload(job: Job, dtype: Any = None) -> Workload:
    """The models and the requests' prompts."""
    args, lengths = job.args, (job.args.longest_prompt, job.args.max_new_tokens)
    if job.smoke:
        return load_workloads.tiny(job.seed, *lengths)
    if args.large:
        return load_workloads.large(args.target, args.draft, args.acceptance, job.seed, *lengths)
    on_cpu = jax.default_backend() == "cpu"
    return load_workloads.bundled(dtype or (jnp.float32 if on_cpu else jnp.bfloat16), *lengths)


def server(job: Job, workload: Workload, slots: int, way: str) -> Callable[[], Server]:
    """What compiles one way of decoding with so many slots."""
    # A CPU pays for every row of a prefill that stays empty; a GPU hardly notices.
    group = 1 if jax.default_backend() == "cpu" else min(slots, 8)
    drafts = job.args.draft_length if way == SPECULATIVE else 0
    sizes = Sizes(slots, workload.longest, workload.new_tokens, drafts, group, workload.filtered)
    return functools.partial(Server, workload.pair, sizes, job.seed)


def check_tokens(job: Job, workload: Workload, servers: Mapping[str, Server], judge: Pair) -> Checked:
    """Requests through these very servers, judged before any is timed.

    At temperature 0 each token has to be a maximum of the target's logits, as float32 has them, but for the rounding of
    the dtype that is served. The requests judged are the last, in slots that others had before. With --large the laws
    are set, and the acceptance has to be what was set.
    """
    slots = servers[PLAIN].sizes.slots
    if job.args.large and not job.smoke:
        trace = servers[SPECULATIVE].serve(workload.requests(slots + JUDGED, job.seed))
        accepted, tested = (
            sum(int(getattr(one, name).sum()) for one in trace.served) for name in ("accepted", "tested")
        )
        as_set = accepted_as_set(accepted, tested, job.args.acceptance)
        return Checked(f"{slots} slots: drafts are accepted as often as was set", as_set)
    cold = dataclasses.replace(workload, settings=(SamplingParams(temperature=0.0),))
    requests, width = cold.requests(slots + JUDGED, job.seed), workload.longest + workload.new_tokens
    starts = np.array([len(request.prompt) for request in requests[-JUDGED:]])
    rows = {way: tokens_of(server.serve(requests), width) for way, server in servers.items()}
    gap, allowed = 0.0, 0.0
    for tokens, ends in rows.values():
        last = jnp.asarray(tokens[-JUDGED:])
        greedy = check_greedy(judge, last, last, starts, ends[-JUDGED:])
        gap = max(gap, greedy.max_logit_diff)
        allowed = greedy.tolerance * (1 if workload.pair.dtype == jnp.float32 else NARROW / ROUNDING)
    what = f"{slots} slots: greedy requests that come and go get maxima of the target's own logits"
    return Checked(f"{what} (largest gap {gap:.2g}, {allowed:.2g} allowed)", gap <= allowed)


def tokens_of(trace: Trace, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [requests, width] and their lengths, in the order of the requests' numbers."""
    rows, lengths = np.zeros((len(trace.served), width), np.int32), np.zeros(len(trace.served), np.int64)
    for one in trace.served:
        rows[one.request.number, : len(one.tokens)], lengths[one.request.number] = one.tokens, len(one.tokens)
    return rows, lengths


@dataclasses.dataclass(frozen=True)
class Found:
    """One way of decoding at one batch.

    Attributes:
      s_per_token: of all programs when nobody waits to arrive: the ratio of sums, median of the repeats.
      decode_s_per_token: without prefills.
      tokens_per_round: of a row.
      rows: that took part in a round, on average.
      request_s: p50, p95, p99 of the time from arrival to the last token, under the Poisson load.
      wait_s: mean and p95 of the time in the queue.
      busy: share of the time in which the device had a program to run.
      served: requests that the tail times are of.
    """

    s_per_token: float
    decode_s_per_token: float
    tokens_per_round: float
    rows: float
    request_s: tuple[float, ...]
    wait_s: tuple[float, float]
    busy: float
    served: int


def measure(job: Job, workload: Workload, servers: Mapping[str, Server], check: Checked) -> dict[str, Found]:
    """Both ways at one batch."""
    args, batch = job.args, servers[PLAIN].sizes.slots
    count = args.requests or (max(8, 2 * batch) if args.large else max(32, 3 * batch))
    full = serve_in_turn(job, servers, workload, check, count, None)
    rate = args.load * count / float(np.median([trace.span_s for trace in full[PLAIN]]))
    queued = serve_in_turn(job, servers, workload, check, count, rate)
    for way in WAYS:
        claim_protocol(job, f"{way}, {batch} slots", [*full[way], *queued[way]])
    found = {way: summarise(full[way], queued[way]) for way in WAYS}
    for way, one in found.items():
        values = {key: value for key, value in dataclasses.asdict(one).items() if key != "wait_s"}
        job.record(
            way,
            settings={"batch": batch, "draft_length": servers[way].sizes.draft_length, "requests": count, "rate": rate},
            clock=HOST,
            queueing_s=one.wait_s[0],
            check=check.what,
            values=values | {"wait_p95_s": one.wait_s[1]},
        )
    return found


def serve_in_turn(
    job: Job, servers: Mapping[str, Server], workload: Workload, check: Checked, count: int, rate: float | None
) -> dict[str, list[Trace]]:
    """Traces of the repeats, the first left out; every repeat has its own requests, the same for both ways."""
    traces: dict[str, list[Trace]] = {way: [] for way in servers}

    def serving(way: str) -> Any:
        def serve() -> None:
            requests = workload.requests(count, job.seed + len(traces[way]), rate)
            traces[way].append(servers[way].serve(requests))

        return serve

    interleaved({way: serving(way) for way in servers}, check=check, repeats=job.args.repeats, clock=HOST)
    return {way: each[1:] for way, each in traces.items()}


def claim_protocol(job: Job, who: str, traces: Sequence[Trace]) -> None:
    """Every request got what it asked for."""
    served = [one for trace in traces for one in trace.served]
    whole = all(one.stopped or one.new_tokens == one.request.new_tokens for one in served)
    mine = all(np.array_equal(one.tokens[: len(one.request.prompt)], one.request.prompt) for one in served)
    job.claim(
        f"{who}: all {len(served)} requests got their budget or a stop token, after their own prompt", whole and mine
    )


def summarise(full: Sequence[Trace], queued: Sequence[Trace]) -> Found:
    """What the traces say."""
    served = [one for trace in queued for one in trace.served]
    rounds = sum(one.rounds for trace in full for one in trace.served)
    waits = [one.wait_s for one in served]
    return Found(
        s_per_token=float(np.median([trace.s_per_token for trace in full])),
        decode_s_per_token=float(np.median([trace.decode_s_per_token for trace in full])),
        tokens_per_round=sum(one.new_tokens for trace in full for one in trace.served) / rounds,
        rows=float(np.mean([trace.mean_rows for trace in full])),
        request_s=tuple(percentile([one.request_s for one in served], q) for q in QUANTILES),
        wait_s=(float(np.mean(waits)), percentile(waits, 0.95)),
        busy=float(np.mean([trace.busy_share for trace in queued])),
        served=len(served),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return float(np.quantile(np.asarray(values), share, method="inverted_cdf"))


def loses_from(speedups: Mapping[int, float]) -> int | None:
    """The smallest batch such that speculation is slower there and at every larger one; None without one."""
    losing = None
    for batch in sorted(speedups, reverse=True):
        if speedups[batch] >= 1:
            break
        losing = batch
    return losing


def report(job: Job, found: Mapping[int, Mapping[str, Found]]) -> None:
    """Tables, plots, and the batch from which speculation loses."""
    speedups = {batch: ways[PLAIN].s_per_token / ways[SPECULATIVE].s_per_token for batch, ways in found.items()}
    decoding = {
        batch: ways[PLAIN].decode_s_per_token / ways[SPECULATIVE].decode_s_per_token for batch, ways in found.items()
    }
    shape = f"D = {job.args.draft_length}"
    times, tails = [], []
    for batch, ways in found.items():
        for way, one in ways.items():
            gain = (speedups[batch], decoding[batch]) if way == SPECULATIVE else (None, None)
            each = (1e3 * one.s_per_token, 1e3 * one.decode_s_per_token, one.tokens_per_round, one.rows)
            times.append([batch, way, *each, *gain])
            seconds = (*one.request_s, *one.wait_s)
            tails.append([batch, way, *(1e3 * each for each in seconds), f"{one.busy:.0%}", one.served])
    columns = ["slots", "", "ms a token", "without prefill", "tokens a round", "rows", "speed-up", "without prefill"]
    job.table("tokens", f"All requests at once, {shape}; sums of times over sums of tokens", columns, times)
    columns = ["slots", "", "p50, ms", "p95, ms", "p99, ms", "wait, ms", "wait p95, ms", "busy", "requests"]
    job.table(
        "tails", f"A Poisson process of {job.args.load:.0%} of what plain decoding serves, {shape}", columns, tails
    )
    losing, most = loses_from(speedups), max(found)
    verdict = _verdict(losing, most)
    job.say(f"Speculation loses {verdict}; without prefills {_verdict(loses_from(decoding), most)}.")
    job.report["loses_from"] = losing
    first = min(found)
    job.reaches(
        "speculation under load",
        f"{speedups[first]:.2f} times plain decoding's speed in {first} slots, {speedups[most]:.2f} in {most}; "
        f"it loses {verdict}",
    )
    draw(job, found)


def _verdict(losing: int | None, most: int) -> str:
    return f"at no batch up to {most}" if losing is None else f"from {losing} slots on"


def draw(job: Job, found: Mapping[int, Mapping[str, Found]]) -> None:
    """Time a token, tail times, and the device's share of work, by batch."""
    batches = sorted(found)
    with job.figure("tokens", "Time a token when requests always wait") as axes:
        for way in WAYS:
            axes.plot(batches, [1e3 * found[batch][way].s_per_token for batch in batches], "o-", label=way)
        axes.set_yscale("log")
        _batches(axes, batches, "ms a token")
    with job.figure("tails", f"Request times at {job.args.load:.0%} of plain decoding's capacity") as axes:
        for way, style in zip(WAYS, ("-", "--"), strict=True):
            for number, share in enumerate(QUANTILES):
                seconds = [found[batch][way].request_s[number] for batch in batches]
                axes.plot(batches, seconds, f"C{number}o{style}", label=f"{way}, p{100 * share:.0f}")
        axes.set_yscale("log")
        _batches(axes, batches, "s from arrival to the last token")
    with job.figure("busy", "Share of the time in which the device works, the same arrivals") as axes:
        for way in WAYS:
            axes.plot(batches, [found[batch][way].busy for batch in batches], "o-", label=way)
        axes.set_ylim(0, 1.05)
        _batches(axes, batches, "busy share")


def _batches(axes: Any, batches: Sequence[int], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("slots")
    axes.set_ylabel(what)
    axes.legend()
