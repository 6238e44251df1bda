"""A small Flax model, trained with Flax's attention and with this library's, and one that changes over in one line."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.harness import Job
from flashspec import flax_attention

QUESTION = "Does a Flax model learn the same with this library's attention in its layers?"
NEEDS = "nothing beyond the installation"
TIME = "1 minute on 2 CPU cores"

VOCABULARY, PERIOD = 32, 12
CLOSE = 1e-3  # in nats, between two runs that differ in rounding alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--batch", type=int, default=32, help="rows in a batch (default: 32)")


class Transformer(nnx.Module):
    """A model as a user of Flax writes it: embeddings, layers of `nnx.MultiHeadAttention`, a head."""

    def __init__(self, attention: Callable[..., jax.Array], rngs: nnx.Rngs, width: int = 64, layers: int = 2):
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(4 * PERIOD, width, rngs=rngs)
        self.attention = nnx.List(
            [nnx.MultiHeadAttention(4, width, decode=False, attention_fn=attention, rngs=rngs) for _ in range(layers)]
        )
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [B,T,V] of tokens [B,T]."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x), is_causal=True)
        return self.head(x)


def batches(seed: int, steps: int, batch: int) -> np.ndarray:
    """Rows that repeat a random beginning: [steps, batch, 3 * PERIOD]; what follows can be looked up, not guessed."""
    beginnings = np.random.default_rng(seed).integers(0, VOCABULARY, (steps, batch, PERIOD))
    return np.tile(beginnings, (1, 1, 3)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model and its loss at every step, in nats a token."""

    model: Transformer
    losses: np.ndarray


def train(attention: Callable[..., jax.Array], data: np.ndarray, seed: int) -> Trained:
    """Train a model from the same start on the same batches, whatever its attention."""
    model = Transformer(attention, nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Transformer, optimizer: Any, tokens: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    return Trained(model, np.array([float(step(model, optimizer, jnp.asarray(tokens))) for tokens in data]))


def loss_of(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each token after the first period, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return losses[:, PERIOD - 1 :].mean()


def run(job: Job) -> None:
    """Train twice, compare; then change a trained model over in one line, and compare its logits."""
    steps = 8 if job.smoke else job.args.steps
    data = batches(job.seed, steps, job.args.batch)
    names: dict[str, Callable[..., jax.Array]] = {
        "Flax's": nnx.dot_product_attention,
        "this library's": flax_attention.attention_fn,
    }
    runs = {name: train(attention, data, job.seed) for name, attention in job.track(names.items(), "training")}
    flax_s, ours = (runs[name].losses for name in names)
    early = slice(0, min(steps, 20))
    apart = float(np.abs(flax_s - ours)[early].max())
    job.claim(f"the losses of the first {len(ours[early])} steps are within {CLOSE} nats: {apart:.1e}", apart < CLOSE)
    job.claim(f"the loss falls: {ours[0]:.2f} to {ours[-1]:.2f} nats", bool(ours[-1] < ours[0]))
    job.record("losses", values={name: trained.losses[-1] for name, trained in runs.items()})
    with job.figure("losses", "Loss by step") as axes:
        for name, trained in runs.items():
            axes.plot(trained.losses, label=f"{name} attention")
        axes.set(xlabel="step", ylabel="nats a token")
        axes.legend()
    swap(job, runs["Flax's"].model, jnp.asarray(data[0]))


def swap(job: Job, model: Transformer, tokens: jax.Array) -> None:
    """Let a model that was trained with Flax's attention go on with this library's."""
    before = np.asarray(model(tokens))
    layers = flax_attention.replace_attention(model)  # the one line
    difference = float(np.abs(np.asarray(model(tokens)) - before).max())
    bound = 1e-4 * float(np.abs(before).max())
    job.claim(f"{layers} layers changed over: logits differ by {difference:.1e} at most", difference < bound)
