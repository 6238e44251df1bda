"""The bound on what a sliding window changes, eq. 33.16, beside what it really changes, row by row."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import Job
from experiments.pairs import Pair, bundled_prompts, load_pair
from flashspec import costs, models
from flashspec.attention import dot_product_attention

QUESTION = "Does 2 delta M bound what a sliding window changes, and does it say anything of the tokens?"
NEEDS = "a CPU or a GPU"
TIME = "1 minute on 2 CPU cores"

WINDOWS = (0, 1, 3, 7, 15, 31, 63, 127)
SCALES = (0.3, 1.0, 3.0)  # of random scores: from nearly uniform to nearly one-hot attention
ROUNDING = 1e-9  # of the values' norm, in float64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=192, help="tokens of each text")
    parser.add_argument("--texts", type=int, default=4)


class Heads(NamedTuple):
    """Operands of one attention call: [B,T,N,H], [B,S,K,H], [B,S,K,H]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


class Rows(NamedTuple):
    """Facts of every row [B,N,T]: dropped mass, bound and error, both in units of the row's largest value norm M."""

    mass: np.ndarray
    bound: np.ndarray
    error: np.ndarray


def run(job: Job) -> None:
    """Bound and error over windows for random inputs and for every layer of the bundled model, then the tokens."""
    length, texts = (48, 1) if job.smoke else (job.args.length, job.args.texts)
    windows = [left for left in (WINDOWS[::3] if job.smoke else WINDOWS) if left < length - 1]
    pair = load_pair(layers=3 if job.smoke else None)
    tokens = prompts(pair, texts, length)
    logits, heads = forward(pair, tokens, None)
    sources: dict[str, list[Heads]] = {
        f"random, scores of deviation {scale}": [random_heads(job.seed, scale, texts, length)] for scale in SCALES
    }
    sources["bundled model"] = heads
    facts = {
        (name, left): measure_rows(several, left)
        for name, several in job.track(sources.items(), "bounding")
        for left in windows
    }
    show(job, facts)
    judge(job, facts)
    judge_tokens(job, pair, tokens, logits, {left: facts["bundled model", left] for left in windows})


def prompts(pair: Pair, count: int, length: int) -> np.ndarray:
    """The beginnings [B,T] of held-out texts that are long enough."""
    ids, lengths = pair.tokenizer.encode(bundled_prompts())
    return ids[lengths >= length][:count, :length]


def random_heads(seed: int, scale: float, batch: int, length: int) -> Heads:
    """Normal operands whose scores have about this standard deviation."""
    rng = np.random.default_rng(seed)
    query, key, value = rng.normal(size=(3, batch, length, 4, 16))
    return Heads(scale * query, key, value)


def forward(pair: Pair, tokens: np.ndarray, left: int | None) -> tuple[np.ndarray, list[Heads]]:
    """Logits [B,T,V] of the bundled model, in every layer with a window or without, and each layer's operands."""

    def run_model(params: Any, tokens: jax.Array) -> tuple[jax.Array, list[Heads]]:
        seen: list[Any] = []

        def attention(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
            seen.append(Heads(query, key, value))  # type: ignore[arg-type]
            return dot_product_attention(query, key, value, window=None if left is None else (left, 0), **options)

        return models.merge(pair.config, params)(tokens, attention=attention), seen

    logits, seen = jax.jit(run_model)(pair.target_params, jnp.asarray(tokens))
    return np.asarray(logits), [Heads(*(np.asarray(x, np.float64) for x in heads)) for heads in seen]


def measure_rows(several: Sequence[Heads], left: int) -> Rows:
    """Every row of several attention calls, side by side on a leading axis [calls,B,N,T]."""
    return Rows(*(np.stack(parts) for parts in zip(*(rows_of(heads, left) for heads in several), strict=True)))


def rows_of(heads: Heads, left: int) -> Rows:
    """Mass and bound by the definition in numpy, the error between two calls of the library's attention, in float64."""
    group = heads.query.shape[2] // heads.key.shape[2]
    key, value = (np.repeat(x, group, axis=2) for x in (heads.key, heads.value))
    scores = np.einsum("btnh,bsnh->bnts", heads.query, key) / np.sqrt(heads.query.shape[-1])
    ago = np.arange(scores.shape[2])[:, None] - np.arange(scores.shape[3])[None, :]
    scores = np.where(ago >= 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mass = costs.dropped_mass(weights, ago <= left)
    norms = np.linalg.norm(value, axis=-1).transpose(0, 2, 1)  # [B,N,S]
    largest = np.maximum.accumulate(norms, axis=-1)  # over the keys that the row sees
    with jax.enable_x64(True):
        full, windowed = (
            np.asarray(dot_product_attention(*heads, is_causal=True, window=window)) for window in (None, (left, 0))
        )
    error = np.linalg.norm(full - windowed, axis=-1).transpose(0, 2, 1)
    claimed = mass < 1  # at 1, to rounding, the equation claims nothing
    bound = costs.window_error_bound(np.where(claimed, mass, 0), largest) / largest
    return Rows(mass, np.where(claimed, bound, np.inf), error / largest)


def holds(rows: Rows, factor: float = 2.0) -> bool:
    """Whether factor * delta * M bounds the error of every row."""
    return bool(np.all(rows.error <= factor / 2 * rows.bound + ROUNDING))


def tight_case() -> Rows:
    """Kept value 1, dropped value -1, dropped mass 1/4: the error is the bound."""
    key = np.array([0.0, np.log(3.0)]).reshape(1, 2, 1, 1)
    return rows_of(Heads(np.ones((1, 2, 1, 1)), key, np.array([-1.0, 1.0]).reshape(1, 2, 1, 1)), left=0)


def show(job: Job, facts: Mapping[tuple[str, int], Rows]) -> None:
    """The table, the plot and the records."""
    columns = ["inputs", "window (left)", "rows", "median delta", "largest delta", "median error / M", "error / bound"]
    table = []
    for (name, left), rows in facts.items():
        tightest = float(np.max(rows.error / np.maximum(rows.bound, 1e-6)))
        table.append(
            [name, left, rows.mass.size, float(np.median(rows.mass)), float(rows.mass.max()),
             float(np.median(rows.error)), tightest]
        )  # fmt: skip
        values = {"rows": rows.mass.size, "largest_mass": float(rows.mass.max()), "largest_share": tightest}
        job.record(name, settings={"left": left}, values=values)
    title = "Errors in units of the largest value norm M that a row sees, and their largest share of the bound"
    job.table("bounds", title, columns, table)
    with job.figure("bounds", "Error of rows against the bound, bundled model") as axes:
        for left in sorted({left for _, left in facts})[::2]:
            rows = facts["bundled model", left]
            axes.plot(rows.bound.ravel()[::7], rows.error.ravel()[::7], ".", markersize=2, label=f"left = {left}")
        axes.plot([1e-4, 2], [1e-4, 2], "k-", label="bound")
        axes.set(xscale="log", yscale="log", xlabel="2 delta", ylabel="||o - o'|| / M")
        axes.set(xlim=(1e-4, 2.5), ylim=(1e-6, 2.5))
        axes.legend(markerscale=5)


def judge(job: Job, facts: Mapping[tuple[str, int], Rows]) -> None:
    """The bound holds everywhere, is reached, and half of it does not hold."""
    rows, silent = (sum(int(n) for n in counts) for counts in zip(*map(sizes, facts.values()), strict=True))
    job.claim(
        f"2 delta M bounds the error of every one of {rows} rows ({silent} of them at mass 1, where it claims nothing)",
        all(map(holds, facts.values())),
    )
    tight = [float(part[0, 0, 1]) for part in tight_case()]
    job.claim(
        "it is reached: kept value 1, dropped value -1, mass 1/4, error 1/2",
        bool(np.allclose(tight, [0.25, 0.5, 0.5], rtol=1e-9)),
    )
    job.claim("half of it, as a control, fails there", not holds(tight_case(), factor=1.0))
    widest = max(left for _, left in facts)
    most = float(facts["bundled model", widest].mass.max())
    job.say(
        f"Far away does not mean little mass: with the nearest {widest + 1} positions kept, some row of the bundled "
        f"model still loses {most:.0%} of its attention."
    )


def sizes(rows: Rows) -> tuple[int, int]:
    """Rows, and how many of them the equation makes no claim about."""
    return rows.mass.size, int(np.isinf(rows.bound).sum())


def judge_tokens(job: Job, pair: Pair, tokens: np.ndarray, full: np.ndarray, facts: Mapping[int, Rows]) -> None:
    """Windows in all layers at once: what happens to greedy tokens and likelihood, which no row's bound promises."""
    table = []
    changed_within, kept_beyond = [], []
    for left, rows in facts.items():
        logits, _ = forward(pair, tokens, left)
        changed = logits.argmax(-1) != full.argmax(-1)  # [B,T]
        worst = rows.bound.max(axis=(0, 2))  # over layers and heads, [B,T]
        changed_within += worst[changed].tolist()
        kept_beyond += worst[~changed].tolist()
        lost = loss(logits, tokens) - loss(full, tokens)
        table.append([left, float(np.median(worst)), float(np.median(rows.bound)), f"{changed.mean():.1%}", lost])
    columns = ["window (left)", "worst bound of a position, median", "bound of a row, median", "greedy tokens changed",
               "nats a token lost"]  # fmt: skip
    job.table("tokens", "The bundled model with the window in every layer", columns, table)
    least, most = min(changed_within, default=np.inf), max(kept_beyond, default=0.0)
    job.claim(
        f"the bound guarantees no token: a greedy token changes where the worst bound of all layers and heads is "
        f"{least:.3g} M, and another stays where it is {most:.3g} M",
        least < most,
    )
    count = sum(sizes(rows)[0] for rows in facts.values())
    job.reaches(
        "sliding windows",
        f"eq. 33.16 bounds the error of all {count} rows of the bundled model; "
        f"no token: one changes at a worst bound of {least:.3g} M, another stays at {most:.3g} M",
    )


def loss(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Mean negative log-likelihood of the next token, in nats."""
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return float(-np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1).mean())
