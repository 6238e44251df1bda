"""Reading a cache for 1 to 16 new tokens: bytes a second of our decode attention and of libraries that do the same."""

import argparse
import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.compilation import build_all
from experiments.harness import Job
from flashspec.attention import DenseView, PagedView, decode_attention
from flashspec.checks import at_least, fail
from flashspec.measure import Call, Checked, Interleaved, checked, compile_call, interleaved

QUESTION = "How fast is the cache read while 1 to 16 tokens are verified, beside cuDNN, FlashAttention-3 and XLA?"
NEEDS = "a Hopper GPU with 10 GB of memory; FlashAttention-3 takes part where flash-attn3-jax is installed"
TIME = "5 minutes on an H200 for the whole grid; --smoke runs XLA's programs alone on a CPU"

SHAPES = ((1, 32768), (1, 131072), (4, 16384), (16, 8192), (64, 4096))
RAGGED = (16, 100, 32768)  # rows, and the range of their lengths
HEADS = ((32, 8), (64, 8), (32, 32))
TOKENS = (1, 2, 4, 8, 16)
HEAD_SIZE, PAGE = 128, 64
SPLITS = (1, 8, 32)  # of FlashAttention-3, which leaves the choice to its caller
OURS, XLA, CUDNN = "ours", "XLA", "cuDNN"
UNMASKED = "unmasked"
LARGE, SMALL = 5e8, 1.28e8  # bytes of a cache from which the bars hold
LARGE_BAR, SMALL_BAR = 4000.0, 3700.0  # GB/s
FLOPS_A_BYTE = 64  # products of fewer have to run at the speed of memory
PEER_BAR, MEAN_BAR = 0.99, 1.25
TOLERANCE = 2e-2  # of the norm of the output, between programs that round to 16 bits in different places


@dataclasses.dataclass(frozen=True)
class Case:
    """One cache and how many new tokens read it.

    Attributes:
      name: of the layout: "dense", "ragged" or "paged".
      T, N, K: new tokens, query heads, key/value heads.
      lengths: of the rows.
      slots: of the cache, for each row.
    """

    name: str
    T: int
    N: int
    K: int
    lengths: tuple[int, ...]
    slots: int

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are live."""
        return sum(self.lengths) * self.K * HEAD_SIZE * 2 * 2

    @property
    def label(self) -> str:
        """What a table calls the cache."""
        rows = f"{len(self.lengths)} x {self.slots}"
        return rows if self.name == "dense" else f"{self.name} {rows}"


class Speed(NamedTuple):
    """Bytes of a cache read in a nanosecond, and the best peer's time over ours."""

    rate: float
    over_best: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="new tokens of a row")
    parser.add_argument("--heads", nargs="+", default=[f"{n}x{k}" for n, k in HEADS], help="query x key/value heads")


def run(job: Job) -> None:
    """Time every case, check first."""
    for name in ("repeats", "tokens"):
        for value in np.atleast_1d(getattr(job.args, name)):
            at_least(name, int(value), 1)
    every_head = [head_counts(text) for text in job.args.heads]
    columns = ["cache", "N", "K", "T", "K + V, MB", "ours, us", "GB/s", "best peer", "ours over it", "T over T = 1"]
    rows: list[list[Any]] = []
    speeds: dict[Case, Speed] = {}
    single: dict[tuple[Any, ...], float] = {}
    for same_cache in cases(job, every_head):
        builders = {case: programs(case, arrays, smoke=job.smoke) for case, arrays in same_cache}
        built = build_all({(case, name): each for case, named in builders.items() for name, each in named.items()})
        for case, named in builders.items():
            calls = {name: built[case, name] for name in named}
            without_mask = calls.pop(UNMASKED, None)
            what = f"{case.label}, N = {case.N}, K = {case.K}, T = {case.T}: all programs agree"
            check = checked(what, functools.partial(agree, calls, without_mask))
            times = interleaved(calls, check=check, repeats=1 if job.smoke else job.args.repeats)
            seconds = times.timings[OURS].steady_s
            peers = {name: timing.steady_s for name, timing in times.timings.items() if name != OURS}
            best = min(peers, key=lambda name: peers[name])
            one = single.setdefault((case.label, case.N, case.K), seconds if case.T == 1 else math.nan)
            peer = f"{best} {case.bytes / peers[best] / 1e9:.0f}"
            numbers = [case.bytes / 1e6, 1e6 * seconds, case.bytes / seconds / 1e9, peer, times.ratio(best, OURS)]
            rows.append([case.label, case.N, case.K, case.T, *numbers, seconds / one])
            speeds[case] = Speed(case.bytes / seconds / 1e9, times.ratio(best, OURS))
            record(job, case, times, check)
    job.table("bandwidth", "K and V bytes read a second (a ratio above 1 is ours being faster)", columns, rows)
    conclude(job, speeds)


def head_counts(text: str) -> tuple[int, int]:
    """N and K of a text such as 32x8."""
    N, by, K = text.partition("x")
    if not (by and N.isdecimal() and K.isdecimal() and int(K) and int(N) and int(N) % int(K) == 0):
        raise fail("heads", "NxK with N a multiple of K, such as 32x8", repr(text))
    return int(N), int(K)


def cases(job: Job, every_head: Sequence[tuple[int, int]]) -> Iterator[list[tuple[Case, Mapping[str, Array]]]]:
    """Every case of the grid, those that share a cache together."""
    if job.smoke:
        yield of_cache(job, "dense", 4, 2, (100, 64), 128, (1, 3))
        yield of_cache(job, "paged", 4, 2, (100, 64), 128, (1, 3))
        return
    rows, low, high = RAGGED
    ragged = tuple(int(x) for x in np.random.default_rng(job.seed).integers(low, high + 1, rows))
    for N, K in every_head:
        for B, S in SHAPES:
            yield of_cache(job, "dense", N, K, (S,) * B, S, job.args.tokens)
        yield of_cache(job, "ragged", N, K, ragged, high, job.args.tokens)
        yield of_cache(job, "paged", N, K, (8192,) * 16, 8192, job.args.tokens)


def of_cache(
    job: Job, name: str, N: int, K: int, lengths: tuple[int, ...], slots: int, tokens: Any
) -> list[tuple[Case, Mapping[str, Array]]]:
    """The cases of one cache."""
    keys = jax.random.split(jax.random.key(job.seed), 3)
    shape = len(lengths), slots, K, HEAD_SIZE
    key, value = (_normal(k, shape, jnp.bfloat16) for k in keys[:2])
    queries = {T: _normal(keys[2], (len(lengths), T, N, HEAD_SIZE), jnp.bfloat16) for T in tokens}
    return [
        (Case(name, T, N, K, lengths, slots), {"query": query, "key": key, "value": value})
        for T, query in queries.items()
    ]


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


def programs(case: Case, arrays: Mapping[str, Array], *, smoke: bool) -> dict[str, Callable[[], Call]]:
    """What compiles ours and the peers that are here, and what cuDNN's result is compared with."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    length = jnp.asarray(case.lengths, jnp.int32)
    dense = DenseView(key, value, length)
    view = paged(dense) if case.name == "paged" else dense
    wanted: dict[str, tuple[Callable[..., Array], tuple[Any, ...]]] = {OURS: (decode_attention, (query, view))}
    wanted[XLA] = functools.partial(decode_attention, implementation="blockwise"), (query, dense)
    if not smoke and jax.default_backend() == "gpu":
        wanted[CUDNN] = cudnn, (query, key, value, length)
        wanted[UNMASKED] = unmasked, (query, dense)
        splits = SPLITS if importlib.util.find_spec("flash_attn3_jax") else ()
        for count in splits:
            flash = functools.partial(flash_attention_3, count)
            wanted[f"FlashAttention-3, {count} splits"] = flash, (query, key, value, length)
    return {
        name: functools.partial(compile_call, function, *arguments) for name, (function, arguments) in wanted.items()
    }


def unmasked(query: Array, view: DenseView) -> Array:
    """What cuDNN computes: jax.nn has no mask that ends with each row, so that new tokens see each other there."""
    T = query.shape[1]
    return decode_attention(query, view, tree_mask=jnp.ones((T, T), bool), implementation="blockwise")


def paged(view: DenseView) -> PagedView:
    """The same cache in pages that lie in no order."""
    B, S, K, H = view.key.shape
    count = B * S // PAGE
    order = np.random.default_rng(0).permutation(count)
    key, value = (x.reshape(count, PAGE, K, H)[np.argsort(order)] for x in (view.key, view.value))
    return PagedView(key, value, jnp.asarray(order.reshape(B, -1), jnp.int32), view.length)


def cudnn(query: Array, key: Array, value: Array, length: Array) -> Array:
    """cuDNN through jax.nn, with the lengths of the rows."""
    queries = jnp.full_like(length, query.shape[1])
    return jax.nn.dot_product_attention(
        query, key, value, query_seq_lengths=queries, key_value_seq_lengths=length, implementation="cudnn"
    )


def flash_attention_3(splits: int, query: Array, key: Array, value: Array, length: Array) -> Array:
    """FlashAttention-3 with a number of splits, causal at the end of each row."""
    from flash_attn3_jax.kvcache import flash_mha_with_kvcache

    return flash_mha_with_kvcache(query, key, value, cache_seqlens=length, is_causal=True, num_splits=splits)


def agree(calls: Mapping[str, Callable[[], Any]], without_mask: Callable[[], Any] | None) -> bool:
    """Whether all programs return what XLA's does, within rounding; cuDNN's among tokens that see each other."""
    want = np.asarray(calls[XLA](), np.float32)
    wants = dict.fromkeys(calls, want)
    if without_mask is not None:
        wants[CUDNN] = np.asarray(without_mask(), np.float32)
    return all(close(np.asarray(call(), np.float32), wants[name]) for name, call in calls.items())


def close(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether two outputs differ by rounding to 16 bits alone; NaN does not pass."""
    return bool(np.linalg.norm(got - want) <= TOLERANCE * np.linalg.norm(want))


def record(job: Job, case: Case, times: Interleaved, check: Checked) -> None:
    """One measurement for each program."""
    settings = {"layout": case.name, "B": len(case.lengths), "S": case.slots, "T": case.T, "N": case.N, "K": case.K}
    for name, timing in times.timings.items():
        values = {"gigabytes_per_second": case.bytes / timing.steady_s / 1e9, "bytes": case.bytes}
        job.record(name, settings=settings, **timing.fields(), values=values)
    job.claim(check.what, check.passed)


def conclude(job: Job, speeds: Mapping[Case, Speed]) -> None:
    """What the speeds are held to."""
    low = min(speeds, key=lambda case: speeds[case].over_best)
    where = f"{low.label}, N = {low.N}, K = {low.K}, T = {low.T}"
    job.say(f"The lowest ratio to the best peer is {speeds[low].over_best:.2f} ({where}).")
    few = {case: speed.rate for case, speed in speeds.items() if case.T * case.N // case.K < FLOPS_A_BYTE}
    large = [rate for case, rate in few.items() if case.bytes >= LARGE]
    small = [rate for case, rate in few.items() if SMALL <= case.bytes < LARGE]
    many = [speed.over_best for case, speed in speeds.items() if case.T > 1]
    mean = math.exp(sum(map(math.log, many)) / len(many)) if many else math.nan
    if large:
        job.reaches(
            "decoding and verification",
            f"caches of 500 MB or more are read at {min(large) / 1e3:.2f} to {max(large) / 1e3:.2f} TB/s; "
            f"{mean:.2f} times the best peer's speed for T > 1 (geometric mean)",
        )
    if job.smoke:
        return
    for name, rates, bar in (("500 MB or more", large, LARGE_BAR), ("128 to 500 MB", small, SMALL_BAR)):
        if rates:
            text = f"caches of {name} are read at {min(rates):.0f} to {max(rates):.0f} GB/s, {bar:.0f} asked for"
            job.goal(text, min(rates) >= bar)
    least = speeds[low].over_best
    job.goal(f"every row at {PEER_BAR} of the best peer: {least:.2f} at least", least >= PEER_BAR)
    job.goal(
        f"T > 1: {mean:.2f} times the best peer's speed in the geometric mean, {MEAN_BAR} asked for", mean >= MEAN_BAR
    )
    by_name = {(case.label, case.N, case.K, case.T): speed.rate for case, speed in speeds.items()}
    for what, bar, twin in (
        ("T = 8 against T = 1", 1.05, lambda case: (case.label, 1) if case.T == 8 else None),
        (f"pages of {PAGE} against none", 1.05, lambda case: ("16 x 8192", case.T) if case.name == "paged" else None),
        # As many bytes in all, to a percent.
        ("unequal lengths against equal", 1.10, lambda case: ("64 x 4096", case.T) if case.name == "ragged" else None),
    ):
        times = []
        for case, speed in speeds.items():
            label, T = twin(case) or ("", 0)
            other = by_name.get((label, case.N, case.K, T))
            times += [] if other is None else [other / speed.rate]
        if times:
            job.goal(
                f"{what}: {max(times):.3f} of the time for as many bytes at most, {bar} allowed", max(times) <= bar
            )
