"""What the attention kernels are worth to a whole Flax model: its training step and its prefill."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.attention_cases import CLOSE, Case, distance, forward, gradients, operands, oracle, ours, part
from experiments.harness import Job
from flashspec import costs, flax_attention
from flashspec.measure import Interleaved, checked, compile_call, interleaved

QUESTION = "How much faster is a Flax model's training step and prefill, and does eq. 33.1 predict it?"
NEEDS = "a GPU with 80 GB of memory; the smoke run anywhere"
TIME = "1 minute on an H200"

OURS, XLA = "flashspec", "XLA"
VOCABULARY = 32768
APART = 3e-2  # relative distance of two models' logits, or losses, whose attention rounds to bfloat16 elsewhere
PREDICTED = 0.1  # by which share the prediction of eq. 33.1 may miss


@dataclasses.dataclass(frozen=True)
class Size:
    """A model: layers of width `heads` times `head_size`, and a feed-forward of four times that."""

    layers: int
    heads: int
    head_size: int

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.heads * self.head_size


LARGE, SMALL = Size(12, 16, 128), Size(2, 2, 16)
WORK = (("training step", 2, 4096), ("prefill", 2, 4096), ("prefill", 1, 16384))  # name, B, T
SMOKE = (("training step", 1, 64), ("prefill", 1, 64))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each, in turn")


class Layer(nnx.Module):
    """Attention, then the feed-forward, each after a norm and added to the stream."""

    def __init__(self, size: Size, attention: Callable[..., jax.Array], rngs: nnx.Rngs):
        kind: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "use_bias": False, "rngs": rngs}
        norm: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.norms = nnx.List([nnx.RMSNorm(size.width, **norm) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(size.heads, size.width, decode=False, attention_fn=attention, **kind)
        self.up = nnx.Linear(size.width, 4 * size.width, **kind)
        self.down = nnx.Linear(4 * size.width, size.width, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The stream [B, T, width] after this layer."""
        x = x + self.attention(self.norms[0](x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """Embeddings, layers, and the embeddings again as a head."""

    def __init__(self, size: Size, attention: Callable[..., jax.Array], rngs: nnx.Rngs):
        kind: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.tokens = nnx.Embed(VOCABULARY, size.width, **kind)
        self.layers = nnx.List([Layer(size, attention, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, **kind)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The stream [B, T, width] before the head."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def xla_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool, **others: Any) -> jax.Array:
    """Attention by XLA through `jax.nn`, as an `attention_fn` of Flax; the layers here pass nothing else of use."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation="xla")


ATTENTION: dict[str, Callable[..., jax.Array]] = {XLA: xla_attention, OURS: flax_attention.attention_fn}


def run(job: Job) -> None:
    """Time each part of the work, whole and attention alone; put the two together by eq. 33.1."""
    size = SMALL if job.smoke else LARGE
    repeats = 1 if job.smoke else job.args.repeats
    models = {name: _split(size, attention, job.seed) for name, attention in ATTENTION.items()}
    weights = sum(x.size for x in jax.tree.leaves(models[OURS][1]))
    model = f"{size.layers} layers of width {size.width}, {size.heads} heads of {size.head_size}"
    job.say(f"{model}, {weights / 1e6:.0f} M weights in bfloat16")
    rows, gains = [], {}
    for name, B, T in job.track(SMOKE if job.smoke else WORK, "attention end to end"):
        case = Case(B, T, size.heads, size.heads, size.head_size, True)
        whole = _whole(job, models, name, case, repeats)
        alone = _alone(job, name, case, repeats)
        share = size.layers * alone.timings[XLA].steady_s / whole.timings[XLA].steady_s
        kernel, measured = alone.ratio(XLA, OURS), whole.ratio(XLA, OURS)
        predicted = costs.amdahl_speedup(min(share, 1.0), kernel)
        gains[f"{name} at T = {T}"] = (measured, predicted)
        times = [1e3 * timing.steady_s for timing in (whole.timings[XLA], whole.timings[OURS])]
        rows.append([f"{name}, B{B} T{T}", *times, share, kernel, predicted, measured, measured / predicted])
        for one, timing in whole.timings.items():
            job.record(f"{name}/T{T}/{one}", settings=dataclasses.asdict(size), **timing.fields())
    columns = [
        "work",
        "XLA, ms",
        "flashspec, ms",
        "share f",
        "kernel s",
        "predicted (33.1)",
        "measured",
        "measured over predicted",
    ]
    job.table("steps", "a Flax model with XLA's attention and with this library's", columns, rows)
    if job.smoke:
        return
    for what, (measured, predicted) in gains.items():
        near = abs(measured / predicted - 1) <= PREDICTED
        job.goal(f"{what}: {measured:.2f} times as fast, within {PREDICTED:.0%} of the predicted {predicted:.2f}", near)
    text = ", ".join(f"{what} {measured:.2f} ({predicted:.2f})" for what, (measured, predicted) in gains.items())
    job.reaches("attention in a Flax model", f"times as fast as with XLA's, by eq. 33.1 in brackets: {text}")


def _split(size: Size, attention: Callable[..., jax.Array], seed: int) -> tuple[Any, Any]:
    """Structure and weights of a model; the same weights whatever the attention."""
    return nnx.split(nnx.jit(lambda: Transformer(size, attention, nnx.Rngs(seed)))())


def prefill(structure: Any, weights: Any, tokens: jax.Array) -> jax.Array:
    """Logits of the last position, float32 [B, V]."""
    model = nnx.merge(structure, weights)
    return model.tokens.attend(model(tokens)[:, -1]).astype(jnp.float32)


def training_step(structure: Any, weights: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Mean cross-entropy in nats, and the weights after a step of gradient descent."""

    def loss(weights: Any) -> jax.Array:
        model = nnx.merge(structure, weights)
        logits = model.tokens.attend(model(tokens[:, :-1])).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, slope = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda x, g: x - jnp.asarray(1e-3, x.dtype) * g, weights, slope)


def _whole(job: Job, models: dict[str, tuple[Any, Any]], name: str, case: Case, repeats: int) -> Interleaved:
    """The model with either attention, after a check that both say the same."""
    train = name == "training step"
    tokens = jax.random.randint(jax.random.key(job.seed), (case.B, case.T + train), 0, VOCABULARY, jnp.int32)
    calls = {}
    for one, (structure, weights) in models.items():
        step = training_step if train else prefill
        calls[one] = compile_call(lambda w, t, step=step, structure=structure: step(structure, w, t), weights, tokens)
    said = {one: jax.tree.leaves(call())[0] for one, call in calls.items()}
    apart = distance([said[OURS]], [said[XLA]])
    check = checked(f"{name}: both models say the same, {apart:.1e} apart", lambda: apart <= APART)
    return interleaved(calls, check=check, repeats=repeats)


def _alone(job: Job, name: str, case: Case, repeats: int) -> Interleaved:
    """The attention of one layer, after a check of each."""
    direction, count = (gradients, 4) if name == "training step" else (forward, 3)
    arrays = operands(case, job.seed, count)
    attends: dict[str, Callable[..., jax.Array]] = {
        XLA: lambda query, key, value, case: xla_attention(query, key, value, is_causal=case.is_causal),
        OURS: ours(),
    }
    calls = {one: compile_call(direction(attend, case), *arrays) for one, attend in attends.items()}
    want = oracle(case, direction, arrays)
    apart = max(distance(part(case, jax.tree.leaves(call())), want) for call in calls.values())
    check = checked(f"attention of {case} is {apart:.1e} from float32", lambda: apart <= CLOSE)
    return interleaved(calls, check=check, repeats=repeats)
