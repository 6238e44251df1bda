"""What the adaptors of kernels share: segment ids as kernels read them, and calls that leave a kernel nothing to do."""

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.attention.request import AttentionOperands, AttentionRequest


def without_pairs(request: AttentionRequest, operands: AttentionOperands) -> tuple[Array, Array]:
    """Output and log-normaliser of rows without any key."""
    rows = (request.B, request.T, request.N)
    lse = jnp.full(rows, -jnp.inf, request.stats_dtype)
    if operands.sinks is not None:
        lse = jnp.broadcast_to(operands.sinks, rows)
    return jnp.zeros((*rows, request.Hv), request.dtype), lse


def narrow_segments(q: Array, k: Array) -> tuple[Array, Array]:
    """Segment ids as int32; 64-bit ones by their ranks, since only equality counts."""
    if q.dtype.itemsize <= 4:
        return q.astype(jnp.int32), k.astype(jnp.int32)
    rows = max(q.shape[0], k.shape[0])
    q, k = (jnp.broadcast_to(x, (rows, x.shape[1])) for x in (q, k))
    ordered = jnp.sort(jnp.concatenate([q, k], axis=1), axis=1)
    ranks = [jax.vmap(jnp.searchsorted)(ordered, x).astype(jnp.int32) for x in (q, k)]
    return ranks[0], ranks[1]
