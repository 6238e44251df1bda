"""The mask's structure as the Hopper kernels read it, and operands blanked where no visible pair touches them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from flashspec.attention.kernel_operands import narrow_segments
from flashspec.attention.request import AttentionOperands, AttentionRequest
from flashspec.masks import Contiguous, Mask, saturating_add, shift
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, Bounds


class Structure(NamedTuple):
    """What hides pairs, as far as it is not static."""

    bounds: Array | None  # int32 [B, 4]
    q_ids: Array | None  # int32 [B, T]
    kv_ids: Array | None  # int32 [B, S]


def kernel_structure(mask: Mask) -> tuple[AttentionMask, Structure]:
    """The mask as the kernels read it; what is known before tracing is static."""
    B, _, T, S = mask.shape
    left, right = mask.limits
    ids: tuple[Array | None, Array | None] = (None, None)
    if mask.q_segment_ids is not None and mask.kv_segment_ids is not None:
        both = narrow_segments(mask.q_segment_ids, mask.kv_segment_ids)
        ids = (jnp.broadcast_to(both[0], (B, T)), jnp.broadcast_to(both[1], (B, S)))
    static: Bounds | None = Bounds(*_limits(0, left, right, T, S), T, S)
    bounds: Array | None = None
    if any(x is not None for x in (mask.q_positions, mask.kv_positions, mask.q_lengths, mask.kv_lengths)):
        first, last = _limits(_offset(mask), left, right, T, S)
        lengths = (T if mask.q_lengths is None else mask.q_lengths, S if mask.kv_lengths is None else mask.kv_lengths)
        columns = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B,)) for x in (first, last, *lengths))
        static, bounds = None, jnp.stack(list(columns), axis=1)
    kernel_mask = AttentionMask(left is not None, right is not None, ids[0] is not None, static)
    return kernel_mask, Structure(bounds, *ids)


def _offset(mask: Mask) -> Array:
    """Position of query 0 less that of key 0, [B or 1], held at the ends of its range."""
    q, k = (
        jnp.asarray(x.start) if isinstance(x, Contiguous) else jnp.zeros(1, jnp.int32)
        for x in (mask.q_positions, mask.kv_positions)
    )
    dtype = max(q.dtype, k.dtype, key=lambda dtype: dtype.itemsize)
    return shift(saturating_add(q.astype(dtype), ~k.astype(dtype)), 1)  # q - k = q + ~k + 1


def _limits(offset: Any, left: int | None, right: int | None, T: int, S: int) -> tuple[Any, Any]:
    """How far from its own index the first and the last key lie that a query sees; past [-T - 1, S] nothing changes."""
    steps = (-(left or 0), right or 0)
    first: Any
    last: Any
    if isinstance(offset, int):
        first, last = (min(max(offset + step, -T - 1), S) for step in steps)
    else:
        first, last = (jnp.clip(shift(offset, step), -T - 1, S).astype(jnp.int32) for step in steps)
    return first, last


def may_hide(request: AttentionRequest) -> bool:
    """Whether some row may touch no visible pair; otherwise every query sees all keys, or the one at its own index."""
    return bool(request.options - {"sinks"})


def hide(request: AttentionRequest, operands: AttentionOperands, structure: Structure) -> tuple[Array, Array, Array]:
    """Query, key and value with zeros wherever no visible pair touches a row: a weight of 0 would not hide its NaN."""
    query, key, value = operands.query, operands.key, operands.value
    if not may_hide(request):
        return query, key, value
    sees, seen = _touched(operands.mask, structure)
    return (
        jnp.where(sees[:, :, None, None], query, 0),
        jnp.where(seen[:, :, None, None], key, 0),
        jnp.where(seen[:, :, None, None], value, 0),
    )


def _touched(mask: Mask, structure: Structure) -> tuple[Array, Array]:
    """Which queries see a key, [B, T], and which keys a query sees, [B, S]."""
    B, _, T, S = mask.shape
    if structure.bounds is None or structure.q_ids is not None:
        visible = jnp.broadcast_to(mask.full(), (B, 1, T, S))[:, 0]
        return visible.any(axis=2), visible.any(axis=1)
    first, last, q_length, kv_length = (x[:, None] for x in structure.bounds.T)
    left, right = (limit is not None for limit in mask.limits)
    i, j = jnp.arange(T, dtype=jnp.int32)[None], jnp.arange(S, dtype=jnp.int32)[None]
    from_key = jnp.maximum(i + first, 0) if left else 0
    to_key = jnp.minimum(i + last, kv_length - 1) if right else kv_length - 1
    from_query = jnp.maximum(j - last, 0) if right else 0
    to_query = jnp.minimum(j - first, q_length - 1) if left else q_length - 1
    return (i < q_length) & (from_key <= to_key), (j < kv_length) & (from_query <= to_query)
