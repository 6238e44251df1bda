"""A training loop that keeps data and steps on the device and ends on time."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

type Loss = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]

WARMUP_STEPS = 100
FINAL_RATE = 0.02
POINTS = 40


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train: sequences of `context` + 1 tokens, AdamW, a cosine from `rate` down to a fiftieth of it.

    Attributes:
      batch: sequences a step.
      context: tokens that are predicted in each.
      rate: peak learning rate.
      weight_decay: on matrices, not on norms.
      max_steps: steps, or fewer where time runs out.
      minutes: limit on the time of training, compilation included.
      steps_per_call: steps in one dispatch.
    """

    batch: int
    context: int
    rate: float
    weight_decay: float
    max_steps: int
    minutes: float
    steps_per_call: int = 50


class Point(NamedTuple):
    """One point of a training curve: steps done, mean loss of the steps since the last, loss on validation text."""

    step: int
    train: float
    validation: float


class TrainState(NamedTuple):
    """What a step carries: float32 parameters, the optimiser's moments, a key and the number of steps done."""

    params: Any
    moments: Any
    key: jax.Array
    step: jax.Array


def _optimizer(weight_decay: float) -> optax.GradientTransformation:
    def is_matrix(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(weight_decay, mask=is_matrix),
    )


def learning_rate(recipe: Recipe, step: jax.Array, total: jax.Array) -> jax.Array:
    """Linear warm-up, then a cosine to `FINAL_RATE` of the peak at step `total`, which may be revised on the way."""
    step = step.astype(jnp.float32)
    progress = jnp.clip(step / total, 0.0, 1.0)
    cosine = FINAL_RATE + (1.0 - FINAL_RATE) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    return recipe.rate * jnp.minimum((step + 1.0) / WARMUP_STEPS, 1.0) * cosine


def sample_windows(key: jax.Array, stream: jax.Array, batch: int, length: int) -> jax.Array:
    """Windows [batch, length] at uniform places of a token stream."""
    starts = jax.random.randint(key, (batch, 1), 0, stream.shape[0] - length + 1)
    return jnp.take(stream, starts + jnp.arange(length, dtype=starts.dtype)[None, :], axis=0).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("loss", "recipe"), donate_argnums=0)
def _run_steps(
    state: TrainState, context: Any, stream: jax.Array, total: jax.Array, *, loss: Loss, recipe: Recipe
) -> tuple[TrainState, jax.Array]:
    optimizer = _optimizer(recipe.weight_decay)

    def one_step(state: TrainState, _: None) -> tuple[TrainState, jax.Array]:
        key, data_key, drop_key = jax.random.split(state.key, 3)
        tokens = sample_windows(data_key, stream, recipe.batch, recipe.context + 1)
        progress = state.step.astype(jnp.float32) / total
        value, gradients = jax.value_and_grad(loss)(state.params, context, tokens, drop_key, progress)
        updates, moments = optimizer.update(gradients, state.moments, state.params)
        rate = learning_rate(recipe, state.step, total)
        params = jax.tree.map(lambda leaf, update: leaf - rate * update, state.params, updates)
        return TrainState(params, moments, key, state.step + 1), value

    return jax.lax.scan(one_step, state, None, length=recipe.steps_per_call)


def train(
    loss: Loss,
    params: Any,
    context: Any,
    stream: jax.Array,
    recipe: Recipe,
    key: jax.Array,
    *,
    validate: Callable[[Any], float],
    report: Callable[[str], None],
) -> tuple[Any, list[Point]]:
    """Minimise `loss` over windows of a token stream.

    The number of steps is what fits in the time that is left, by the speed seen so far, so the schedule always ends.

    Args:
      loss: (params, context, tokens [batch, context + 1], dropout key, progress in [0, 1]) -> scalar; the same function
        object for one compilation.
      params: float32 parameters; donated.
      context: further arrays that the loss reads, such as a teacher's parameters.
      stream: [tokens] integers, on the device.
      recipe: sizes and limits.
      key: a typed key.
      validate: the loss of given parameters on validation text.
      report: called with a line of progress after some calls.

    Returns:
      (params, curve).
    """
    started = time.monotonic()
    deadline = started + recipe.minutes * 60
    state = TrainState(params, _optimizer(recipe.weight_decay).init(params), key, jnp.zeros((), jnp.int32))
    total, done, curve, recent = recipe.max_steps, 0, [], []
    first_done = started
    while done < total:
        state, losses = _run_steps(state, context, stream, jnp.float32(total), loss=loss, recipe=recipe)
        recent.append(float(losses.mean()))
        done += recipe.steps_per_call
        now = time.monotonic()
        if done == recipe.steps_per_call:
            first_done = now
            report(f"compiled and ran {done} steps in {now - started:.1f} s")
        else:
            pace = (now - first_done) / (done - recipe.steps_per_call)
            total = max(min(recipe.max_steps, done + int((deadline - now) / pace)), done)
        if now > deadline:
            total = done
        if done >= total or len(recent) * recipe.steps_per_call >= total / POINTS:
            curve.append(Point(done, sum(recent) / len(recent), validate(state.params)))
            recent = []
            speed = done * recipe.batch * recipe.context / (now - started) / 1e6
            report(
                f"step {done} of {total}: loss {curve[-1].train:.4f}, on validation text {curve[-1].validation:.4f}; "
                f"{speed:.2f} M tokens/s, {now - started:.0f} s"
            )
    return state.params, curve
