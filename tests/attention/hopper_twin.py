"""The Hopper kernels' signatures over plain array code: what adaptors are tested with where there is no such GPU."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.attention import hopper
from flashspec.attention.backends import BACKENDS
from pallas_kernels.gpu.hopper.attention_backward_config import BackwardShape
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, Bounds, SegmentIds


def visible_pairs(query: Array, key: Array, bounds: Array | None, segments: Any, mask: AttentionMask) -> Array:
    """bool [B, 1, T, S], by the kernels' own rule for a tile."""
    B, T, S = query.shape[0], query.shape[1], key.shape[1]
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (B, T, S), axis) for axis in (1, 2))
    rows = mask.bounds or Bounds(*(jnp.broadcast_to(x[:, None, None], (B, T, S)) for x in bounds.T))  # type: ignore[union-attr]
    visible = mask.tile(rows, i, j)
    if segments is not None:
        visible &= segments.q[:, : i.shape[1], None] == segments.kv[:, None, :]
    return visible[:, None]


def scores_of(query: Array, key: Array, scale: float, soft_cap: float | None) -> Array:
    """float32 [B, N, T, S]."""
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * scale
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def forward(
    query: Array,
    key: Array,
    value: Array,
    bounds: Array | None = None,
    segments: SegmentIds | None = None,
    sinks: Array | None = None,
    *,
    mask: AttentionMask,
    scale: float,
    soft_cap: float | None = None,
    statistics: bool = False,
    config: Any,
) -> tuple[Array, ...]:
    """As `pallas_kernels.gpu.hopper.attention_forward.attention_forward`, padding of rows included."""
    visible = visible_pairs(query, key, bounds, _padded(segments, query, key), mask)
    scores = jnp.where(visible, scores_of(query, key, scale, soft_cap), -jnp.inf)
    m = scores.max(axis=-1)
    if sinks is not None:
        m = jnp.maximum(m, sinks[:, :, None])
    weights = jnp.exp(scores - jnp.where(m == -jnp.inf, 0, m)[..., None])
    l = weights.sum(axis=-1) + (0 if sinks is None else jnp.exp(sinks[:, :, None] - m))
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    u = jnp.einsum("bnts,bsnv->btnv", weights, value, preferred_element_type=jnp.float32)
    m, l = (jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % config.tile_q))) for x in (m, l))
    if statistics:
        return u, m, l
    total = jnp.swapaxes(l[:, :, : u.shape[1]], 1, 2)[..., None]
    return (u / jnp.where(total == 0, 1, total)).astype(query.dtype), m + jnp.log(l)


def backward(
    query: Array,
    key: Array,
    value: Array,
    output_gradient: Array,
    lse: Array,
    delta: Array,
    bounds: Array | None = None,
    segments: SegmentIds | None = None,
    *,
    mask: AttentionMask,
    scale: float,
    soft_cap: float | None = None,
    deterministic: bool = False,
    dq: Array | None = None,
    config: Any,
) -> tuple[Array, Array, Array]:
    """As `pallas_kernels.gpu.hopper.attention_backward.attention_backward`."""
    assert dq is None or dq.shape == BackwardShape.of(query, key, value).dq_tiles
    groups = query.shape[2] // key.shape[2]
    visible = visible_pairs(query, key, bounds, _padded(segments, query, key), mask)
    scores = scores_of(query, key, scale, soft_cap)
    lse = lse[:, :, : query.shape[1]]
    weights = jnp.where(visible, jnp.exp(scores - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None]), 0)
    keys, values = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    pull = jnp.einsum("btnv,bsnv->bnts", output_gradient, values, preferred_element_type=jnp.float32)
    pull = weights * (pull - delta[:, :, : query.shape[1], None])
    if soft_cap is not None:
        pull = pull * (1 - (scores / soft_cap) ** 2)
    dq = scale * jnp.einsum("bnts,bsnh->btnh", pull, keys)
    dk = scale * jnp.einsum("bnts,btnh->bsnh", pull, query)
    dv = jnp.einsum("bnts,btnv->bsnv", weights, output_gradient)
    dk, dv = (x.reshape(*x.shape[:2], key.shape[2], groups, x.shape[3]).sum(axis=3) for x in (dk, dv))
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)


def delta_and_zeros(output: Array, output_gradient: Array, *, head_size: int) -> tuple[Array, Array]:
    """As `pallas_kernels.gpu.hopper.attention_backward_delta.delta_and_zeros`."""
    B, T, N, Hv = output.shape
    tiles = BackwardShape(B, T, T, N, N, head_size, Hv).dq_tiles
    delta = jnp.einsum("btnv,btnv->bnt", output, output_gradient, preferred_element_type=jnp.float32)
    return jnp.pad(delta, ((0, 0), (0, 0), (0, -T % 128))), jnp.zeros(tiles, jnp.float32)


def _padded(segments: SegmentIds | None, query: Array, key: Array) -> SegmentIds | None:
    """Ids of the padding that the adaptor adds: any will do, since no length reaches it."""
    if segments is None:
        return None
    pairs = zip(segments, (query.shape[1], key.shape[1]), strict=True)
    return SegmentIds(*(jnp.pad(ids, ((0, 0), (0, size - ids.shape[1]))) for ids, size in pairs))


@contextlib.contextmanager
def hopper_by_twin(forward: Any = forward, backward: Any = backward, delta: Any = delta_and_zeros) -> Iterator[None]:
    """Within it, "hopper" runs on any platform and in float32, its kernels replaced by these."""
    kernels = hopper.Kernels(forward, backward, delta)

    def supports(request: Any) -> tuple[str, ...]:
        return hopper.kernel_refusals(dataclasses.replace(request, dtype=jnp.dtype(jnp.bfloat16)))

    compiled = BACKENDS["hopper"]
    BACKENDS["hopper"] = dataclasses.replace(  # type: ignore[index]
        compiled,
        supports=supports,
        attend=functools.partial(hopper.hopper_attention, kernels),
        stats=functools.partial(hopper.hopper_stats, kernels),
    )
    try:
        yield
    finally:
        BACKENDS["hopper"] = compiled  # type: ignore[index]
