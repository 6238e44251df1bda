"""Losses that train the pair, and the measures by which it is judged."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.models import DecoderConfig, merge

type Attention = Callable[..., jax.Array]

COMPUTE = jnp.bfloat16


def forward(
    config: DecoderConfig,
    params: Any,
    tokens: jax.Array,
    attention: Attention,
    dropout_key: jax.Array | None = None,
    dropout: float = 0.0,
) -> jax.Array:
    """Logits [B,T,V] in bfloat16 arithmetic, with dropout on what each branch adds if a key is given."""
    keys = iter(jax.random.split(dropout_key, 2 * config.num_layers)) if dropout_key is not None else iter(())

    def drop(x: jax.Array) -> jax.Array:
        if dropout_key is None or not dropout:
            return x
        keep = jax.random.bernoulli(next(keys), 1.0 - dropout, x.shape)
        return jnp.where(keep, x / (1.0 - dropout), 0.0)

    decoder = merge(config, jax.tree.map(lambda leaf: leaf.astype(COMPUTE), params))
    return decoder(tokens, attention=attention, drop=drop)


def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] at every position, in nats: [B,T]."""
    scores = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - scores


def target_loss(config: DecoderConfig, attention: Attention, dropout: float) -> Callable[..., jax.Array]:
    """Mean loss of the next token."""

    def loss(params: Any, _: Any, tokens: jax.Array, key: jax.Array, progress: jax.Array) -> jax.Array:
        del progress
        return token_losses(forward(config, params, tokens[:, :-1], attention, key, dropout), tokens[:, 1:]).mean()

    return loss


def draft_loss(
    config: DecoderConfig, teacher: DecoderConfig, attention: Attention, temperature: float
) -> Callable[..., jax.Array]:
    """Distance from the teacher's distribution at the temperature at which both will be sampled.

    KL(p || q) at first, whose gradient reaches every token; by and by total variation 1 - sum min(p, q), which is one
    minus the acceptance rate (eq. 33.11).
    """

    def loss(params: Any, teacher_params: Any, tokens: jax.Array, key: jax.Array, progress: jax.Array) -> jax.Array:
        del key
        inputs = tokens[:, :-1]
        teacher_logits = jax.lax.stop_gradient(forward(teacher, teacher_params, inputs, attention))
        log_p = jax.nn.log_softmax(teacher_logits / temperature)
        log_q = jax.nn.log_softmax(forward(config, params, inputs, attention) / temperature)
        p = jnp.exp(log_p)
        divergence = jnp.sum(p * (log_p - log_q), axis=-1).mean()
        variation = 0.5 * jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1).mean()
        return (1.0 - progress) * divergence + progress * variation

    return loss


class PairScores(NamedTuple):
    """Per position [B,T]: losses of the text's tokens, sum_x min(p, q), and min(1, q/p) of the text's own token."""

    target_loss: np.ndarray
    draft_loss: np.ndarray
    overlap: np.ndarray
    ratio: np.ndarray


def score_pair(
    target: DecoderConfig,
    target_params: Any,
    draft: DecoderConfig,
    draft_params: Any,
    windows: np.ndarray,
    attention: Attention,
    temperature: float,
    batch: int = 32,
) -> PairScores:
    """Score windows [rows, T + 1] of tokens with both models; losses at temperature 1, the rest at `temperature`."""

    @jax.jit
    def score(target_params: Any, draft_params: Any, tokens: jax.Array) -> tuple[jax.Array, ...]:
        inputs, wanted = tokens[:, :-1], tokens[:, 1:]
        p_logits = forward(target, target_params, inputs, attention)
        q_logits = forward(draft, draft_params, inputs, attention)
        losses = token_losses(p_logits, wanted), token_losses(q_logits, wanted)
        overlap = jnp.minimum(jax.nn.softmax(p_logits / temperature), jax.nn.softmax(q_logits / temperature)).sum(-1)
        log_ratio = token_losses(p_logits / temperature, wanted) - token_losses(q_logits / temperature, wanted)
        return *losses, overlap, jnp.exp(jnp.minimum(log_ratio, 0.0))

    parts = [score(target_params, draft_params, rows) for rows in _batches(windows, batch)]
    return PairScores(*(np.concatenate([np.asarray(part) for part in column]) for column in zip(*parts, strict=True)))


def mean_loss(
    config: DecoderConfig, windows: np.ndarray, attention: Attention, batch: int = 32
) -> Callable[[Any], float]:
    """A function from parameters to the mean loss over windows [rows, T + 1]."""
    held = [jnp.asarray(rows) for rows in _batches(windows, batch)]

    @jax.jit
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return token_losses(forward(config, params, tokens[:, :-1], attention), tokens[:, 1:]).mean()

    return lambda params: float(np.mean([float(loss(params, rows)) for rows in held]))


def windows_of(stream: np.ndarray, length: int, most: int) -> np.ndarray:
    """Up to `most` disjoint windows [rows, length] spread evenly over a token stream."""
    count = len(stream) // length
    rows = stream[: count * length].reshape(count, length)
    return rows[np.linspace(0, count - 1, min(count, most)).astype(int)]


def _batches(windows: np.ndarray, batch: int) -> list[np.ndarray]:
    size = min(batch, len(windows))
    return [windows[start : start + size] for start in range(0, len(windows) - size + 1, size)]


def survival(acceptance: np.ndarray, draft_length: int) -> list[float]:
    """P(the first k drafts are all accepted), k = 1..D, averaged over every starting position of [B,T] acceptances.

    With acceptance min(1, q/p) along text x drawn from p this is exact, since
    E_{x ~ p} prod_i min(1, q(x_i)/p(x_i)) = E_{x ~ q} prod_i min(1, p(x_i)/q(x_i)).
    """
    starts = acceptance.shape[1] - draft_length + 1
    product = np.ones((acceptance.shape[0], starts))
    result = []
    for k in range(draft_length):
        product = product * acceptance[:, k : k + starts]
        result.append(float(product.mean()))
    return result
