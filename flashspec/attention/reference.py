"""The oracle: attention as the chapter writes it, with the whole [T, S] score matrix in memory.

    score = soft_cap(scale q.k + bias), hidden where the mask says so
    o = sum_j e^(score_j) v_j / sum_j e^(score_j)                                      (eq. 33.2)

Differentiated by JAX itself, in both modes and to any order. Everything is computed in the dtype of the statistics,
with the highest matmul precision, and rounded to the dtype of the inputs once, at the end.
"""

import jax
import jax.numpy as jnp
from jax import lax

from flashspec.attention.request import AttentionOperands, AttentionRequest
from flashspec.online_softmax import SoftmaxStats, finalize, shifted_weights

HIGHEST = lax.Precision.HIGHEST


def reference_attention(request: AttentionRequest, operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
    """Attention output [B, T, N, Hv] in the dtype of the inputs, and lse [B, T, N] (eq. 33.2)."""
    return finalize(reference_stats(request, operands), sinks=operands.sinks, dtype=request.dtype)


def reference_stats(request: AttentionRequest, operands: AttentionOperands) -> SoftmaxStats:
    """(m, l, u) of every query over all keys (eq. 33.3); rows [B, T, N]. Dropout acts on u, never on l."""
    visible, bias = _visible(request, operands)
    query, key, value = _cleaned(request, operands, visible)
    score = request.scale * jnp.einsum("btkgh,bskh->bkgts", query, key, precision=HIGHEST)
    score = _join_heads(score) if bias is None else _join_heads(score) + bias
    if request.logits_soft_cap is not None:
        score = request.logits_soft_cap * jnp.tanh(score / request.logits_soft_cap)
    m, weights, nonempty = shifted_weights(score, visible)  # [B, N, T], [B, N, T, S], [B, N, T]
    l = jnp.sum(weights, axis=-1)
    if operands.dropout is not None:
        keep = operands.dropout.tile(request.B, request.N, 0, request.T, 0, request.S)
        weights = jnp.where(keep, operands.dropout.scale * weights, 0)
    u = jnp.einsum("bkgts,bskh->btkgh", _split_heads(weights, request), value, precision=HIGHEST)
    u = u.reshape(request.B, request.T, request.N, request.Hv)
    m, l, nonempty = (jnp.swapaxes(x, 1, 2) for x in (m, l, nonempty))
    return SoftmaxStats(m, l, u, nonempty)


def _visible(request: AttentionRequest, operands: AttentionOperands) -> tuple[jax.Array, jax.Array | None]:
    """The mask at full size, and the bias with 0 where it is hidden. A bias of -inf is the same as False."""
    shape = (request.B, request.N, request.T, request.S)
    visible = jnp.broadcast_to(operands.mask.full(), shape)
    if operands.bias is None:
        return visible, None
    bias = jnp.broadcast_to(operands.bias.astype(request.stats_dtype), shape)
    visible = visible & (bias != -jnp.inf)
    return visible, jnp.where(visible, bias, 0)


def _cleaned(
    request: AttentionRequest, operands: AttentionOperands, visible: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Operands with heads in groups, [B, T, K, G, H]; what takes part in no visible pair is 0.

    A hidden NaN would survive a weight of 0, forward in u and backward in the gradients of its partners.
    """
    used = _split_heads(visible, request)  # [B, K, G, T, S]
    seen = jnp.moveaxis(jnp.any(used, axis=(2, 3)), 1, 2)[..., None]  # [B, S, K, 1]
    sees = jnp.moveaxis(jnp.any(used, axis=4), 3, 1)[..., None]  # [B, T, K, G, 1]
    query = operands.query.reshape(request.B, request.T, request.K, request.G, request.H)
    pairs = ((sees, query), (seen, operands.key), (seen, operands.value))
    query, key, value = (jnp.where(used, x, 0).astype(request.stats_dtype) for used, x in pairs)
    return query, key, value


def _split_heads(x: jax.Array, request: AttentionRequest) -> jax.Array:
    """[B, N, T, S] -> [B, K, G, T, S]: query head n reads key/value head n // G."""
    return x.reshape(x.shape[0], request.K, request.G, *x.shape[2:])


def _join_heads(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
