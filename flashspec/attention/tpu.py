"""Attention by our TPU kernels: from the mask's structure to what the kernels read, and their derivative.

The kernels are passed in, so that tests run the very same code in an interpreter. Forward and backward are one
differentiable function of query, key, value, bias and sinks: the derivative is taken through output and log-normaliser,
or through (l, u) with m held constant, by one backward kernel (eq. 33.6 to 33.8).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flashspec.attention.dropout import Dropout
from flashspec.attention.kernel_operands import narrow_segments, without_pairs
from flashspec.attention.lifting import lift, placed, uneven_groups
from flashspec.attention.request import AttentionOperands, AttentionRequest
from flashspec.masks import Mask
from flashspec.online_softmax import SoftmaxStats, empty_stats
from flashspec.selection import Placement
from pallas_kernels.launch import cdiv, round_up, varying_alike
from pallas_kernels.tpu import attention_backward_config, attention_forward_config
from pallas_kernels.tpu.attention_config import HIGHEST, LOWEST, MAX_BLOCKS, AttentionCall, AttentionStructure

LARGEST_HEAD = 512
# Generations with matrix units of 256 x 256 (Google Cloud TPU documentation, the version's page); before, 128 x 128.
LARGE_MATRIX_UNITS = ("TPU v6", "TPU7x")
# The query gradient of one head stays in VMEM, beside all else; the step words of a call lie in scalar memory.
LARGEST_QUERY_GRADIENT = 32 * 2**20
LARGEST_SCHEDULE = 2**17


class Kernels(NamedTuple):
    """The kernels of `pallas_kernels.tpu`, or stand-ins with their signatures."""

    forward: Callable[..., tuple[Array, ...]]
    backward: Callable[..., Any]
    interpret: Any = False


class Tensors(NamedTuple):
    """What is differentiated; also the form of its gradients. Heads come before rows, as the kernels read them."""

    query: Array  # [B, N, T, H]
    key: Array  # [B, K, S, H]
    value: Array  # [B, K, S, Hv]
    bias: Array | None  # [B|1, N|1, T|1, S|1], bfloat16 or float32
    sinks: Array | None  # float32 [N]


@dataclasses.dataclass(frozen=True)
class _Program:
    """What is static about a call: hashable, so that it can stand beside differentiated arguments."""

    kernels: Kernels
    call: AttentionCall
    forward: attention_forward_config.AttentionForwardConfig
    backward: attention_backward_config.AttentionBackwardConfig
    placement: Placement | None


def refusals(request: AttentionRequest) -> tuple[str, ...]:
    """Why the TPU kernels cannot run a call, forward and backward; empty when they can."""
    platform = () if request.platform == "tpu" else (f"runs on TPUs only, not on {request.platform}",)
    return platform + kernel_refusals(request)


def kernel_refusals(request: AttentionRequest) -> tuple[str, ...]:
    """`refusals` but for the platform: what the kernels cannot do wherever they run."""
    gradient = attention_backward_config.query_gradient_bytes(request.T, _padded_head(request.H))
    configs = _forward_config(request), _backward_config(request)
    blocks = [(cdiv(request.T, config.block_q), cdiv(request.S, config.block_kv)) for config in configs]
    steps = max(queries * keys for queries, keys in blocks)
    rules = (
        (request.dtype not in (jnp.bfloat16, np.float32), f"computes in bfloat16 or float32, not in {request.dtype}"),
        (max(request.H, request.Hv) > LARGEST_HEAD, f"takes head sizes up to {LARGEST_HEAD}"),
        uneven_groups(request),
        (
            gradient > LARGEST_QUERY_GRADIENT,
            f"has a backward that keeps one head's query gradient in VMEM: {gradient} bytes of at most "
            f"{LARGEST_QUERY_GRADIENT}",
        ),
        (
            steps * (request.B if _has_data(request) else 1) > LARGEST_SCHEDULE,
            f"lists at most {LARGEST_SCHEDULE} blocks of scores",
        ),
        (max(map(max, blocks)) > MAX_BLOCKS, f"lists at most {MAX_BLOCKS} blocks of queries or keys"),
    )
    return unseen_splits(request) + tuple(reason for refused, reason in rules if refused)


def unseen_splits(request: AttentionRequest) -> tuple[str, ...]:
    """Why a call does not reach a kernel that has to be told how its operands are split."""
    if request.placement is None or request.placement.spec is not None:
        return ()
    advice = (
        "call it in `jax.shard_map`, or with explicit axes (`jax.make_mesh` makes them, `jax.sharding.explicit_axes`)"
    )
    return (f"lies on a mesh in automatic mode, where tracing does not show how operands are split: {advice}",)


def launch_config(request: AttentionRequest) -> Mapping[str, int]:
    """Block sizes of forward and backward, for the plan."""
    forward, backward = _forward_config(request), _backward_config(request)
    return {
        "block_q": forward.block_q,
        "block_kv": forward.block_kv,
        "backward_block_q": backward.block_q,
        "backward_block_kv": backward.block_kv,
    }


def tpu_attention(kernels: Kernels, request: AttentionRequest, operands: AttentionOperands) -> tuple[Array, Array]:
    """Attention output [B, T, N, Hv] and log-normaliser [B, T, N], differentiable.

    Args:
      kernels: the kernels, or stand-ins.
      request: static facts of the call, one that `kernel_refusals` has nothing against.
      operands: its arrays.
    """
    if 0 in (request.B, request.T, request.S):
        return without_pairs(request, operands)
    output, lse = _attend(*_prepare(kernels, request, operands))
    return jnp.swapaxes(output[..., : request.Hv], 1, 2), jnp.swapaxes(lse, 1, 2)


def tpu_stats(kernels: Kernels, request: AttentionRequest, operands: AttentionOperands) -> SoftmaxStats:
    """Statistics (m, l, u) of the call's keys, rows [B, T, N]; arguments as in `tpu_attention`."""
    if 0 in (request.B, request.T, request.S):
        return empty_stats((request.B, request.T, request.N), request.Hv, request.stats_dtype)
    m, l, u = (jnp.swapaxes(x, 1, 2) for x in _attend(*_prepare(kernels, request, operands)))
    m = lax.stop_gradient(m)
    return SoftmaxStats(m, l, u[..., : request.Hv], m != -jnp.inf)


def _prepare(
    kernels: Kernels, request: AttentionRequest, operands: AttentionOperands
) -> tuple[_Program, Tensors, AttentionStructure]:
    """The call as the kernels take it."""
    static = _sits_at_indices(operands.mask)
    call = AttentionCall(
        scale=request.scale,
        soft_cap=request.logits_soft_cap,
        limits=operands.mask.limits if static else (None, None),
        dropout_rate=request.dropout_rate,
        shared_dropout=("query" in request.dropout_broadcast, "key" in request.dropout_broadcast),
        statistics=request.statistics,
    )
    heads_first = (_pad_head(jnp.swapaxes(x, 1, 2)) for x in (operands.query, operands.key, operands.value))
    bias = operands.bias
    if bias is not None and bias.dtype not in (jnp.bfloat16, np.float32):
        bias = bias.astype(jnp.float32)
    words, offsets = _dropout(operands.dropout, request)
    queries, keys = (None, None) if static else _rules(operands.mask)
    structure = AttentionStructure(queries, keys, operands.mask.explicit, dropout_words=words, dropout_offsets=offsets)
    query, key, value = heads_first
    tensors, structure = varying_alike((Tensors(query, key, value, bias, operands.sinks), structure))
    program = _Program(kernels, call, _forward_config(request), _backward_config(request), request.placement)
    return program, tensors, structure


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(program: _Program, tensors: Tensors, structure: AttentionStructure) -> tuple[Array, ...]:
    """(output, lse), or (m, l, u) for statistics, rows [B, N, T]."""

    def kernel(query: Array, key: Array, value: Array, *rest: Array) -> tuple[Array, ...]:
        return program.kernels.forward(
            query,
            key,
            value,
            AttentionStructure(**dict(zip(names, rest, strict=True))),
            call=program.call,
            config=program.forward,
            interpret=program.kernels.interpret,
        )

    names, arrays, axes = _present(structure._replace(bias=tensors.bias, sinks=tensors.sinks), tensors.query)
    results = ("B N T", "B N T", "B N T V") if program.call.statistics else ("B N T V", "B N T")
    call = lift(kernel, (*_AXES, *axes), results, placed(program.placement))
    return tuple(call(*tensors[:3], *arrays))


def _attend_forward(program: _Program, tensors: Tensors, structure: AttentionStructure) -> tuple[Any, Any]:
    results = _attend(program, tensors, structure)
    return results, (tensors, structure, results[:2])


def _attend_backward(program: _Program, saved: Any, cotangents: tuple[Array, ...]) -> tuple[Tensors, None]:
    tensors, structure, rows = saved
    if program.call.statistics:
        m, l = rows
        _, g_l, g_u = cotangents
        lse = m + jnp.log(l)
        output_gradient, row_term = l[..., None] * g_u, l * g_l
    else:
        output, lse = rows
        output_gradient, g_lse = cotangents
        row_sum = jnp.sum(output_gradient.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
        row_term = jnp.where(lse == -jnp.inf, 0, g_lse) - row_sum
    lse = jnp.where(lse == -jnp.inf, 0, lse)

    def kernel(query: Array, key: Array, value: Array, *rest: Array) -> tuple[Array, ...]:
        *rows, gradient = rest[:3]
        found = program.kernels.backward(
            query,
            key,
            value,
            AttentionStructure(**dict(zip(names, rest[3:], strict=True))),
            gradient,
            *rows,
            call=program.call,
            config=program.backward,
            interpret=program.kernels.interpret,
        )
        return tuple(x for x in found if x is not None)

    names, arrays, axes = _present(structure._replace(bias=tensors.bias), tensors.query)
    operands = (*_AXES, "B N T", "B N T", "B N T V", *axes)
    results = (*_AXES, "B N T S") if "bias" in names else _AXES
    rows = lse, row_term, output_gradient.astype(tensors.value.dtype)
    call = lift(kernel, operands, results, placed(program.placement))
    g_query, g_key, g_value, *g_bias = call(*tensors[:3], *rows, *arrays)
    bias = sinks = None
    if tensors.bias is not None:
        bias = _sum_to(g_bias[0], tensors.bias.shape).astype(tensors.bias.dtype)
    if tensors.sinks is not None:
        sinks = jnp.sum(jnp.exp(tensors.sinks[None, :, None] - lse) * row_term, axis=(0, 2))
    return Tensors(g_query, g_key, g_value, bias, sinks), None


_attend.defvjp(_attend_forward, _attend_backward)

# Axes of query, key and value, as `lift` has them; and those of `AttentionStructure` that one entry may serve.
_AXES = ("B N T H", "B K S H", "B K S V")
_STRUCTURE_AXES = {
    "queries": "B T C",
    "keys": "B S C",
    "mask": "B N T S",
    "bias": "B N T S",
    "sinks": "N",
    "dropout_words": "B N C",
    "dropout_offsets": "C",
}


def _present(structure: AttentionStructure, query: Array) -> tuple[tuple[str, ...], list[Array], list[str]]:
    """Names, arrays and axes of the structure's arrays that a call has; an axis of one entry for all is not split."""
    present = {name: array for name, array in structure._asdict().items() if array is not None}
    sizes = {"B": query.shape[0], "N": query.shape[1]}

    def axes(name: str) -> str:
        pairs = zip(_STRUCTURE_AXES[name].split(), present[name].shape, strict=True)
        return " ".join(letter if sizes.get(letter, size) == size else "one" for letter, size in pairs)

    return tuple(present), list(present.values()), [axes(name) for name in present]


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` summed over the axes along which an array of `shape` was broadcast to it."""
    axes = tuple(axis for axis, (got, want) in enumerate(zip(x.shape, shape, strict=True)) if got != want)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


def _forward_config(request: AttentionRequest) -> attention_forward_config.AttentionForwardConfig:
    sizes = request.T, request.S, _padded_head(request.H), _padded_head(request.Hv), request.dtype.itemsize
    facts = {"bias_bytes": _pair_bytes(request), "matrix_unit": _matrix_unit(request)}
    return attention_forward_config.heuristic(*sizes, **facts)


def _matrix_unit(request: AttentionRequest) -> int:
    """Rows and columns of the matrix units of the device; of the smaller kind where it is not known."""
    return 256 if (request.device_kind or "").startswith(LARGE_MATRIX_UNITS) else 128


def _backward_config(request: AttentionRequest) -> attention_backward_config.AttentionBackwardConfig:
    sizes = request.T, request.S, _padded_head(request.H), _padded_head(request.Hv), request.dtype.itemsize
    gradient = 8 if "bias" in request.options else 0
    return attention_backward_config.heuristic(*sizes, bias_bytes=_pair_bytes(request) + gradient)


def _pair_bytes(request: AttentionRequest) -> int:
    """Bytes of bias and mask for each pair, at most."""
    return 4 * ("bias" in request.options) + ("mask" in request.options)


def _has_data(request: AttentionRequest) -> bool:
    """Whether arrays decide which blocks are visited, so that every row has a list of its own."""
    return bool(request.options - {"bias", "sinks"})


def _padded_head(size: int) -> int:
    return round_up(size, 64)


def _pad_head(x: Array) -> Array:
    """The last axis filled up with zeros to a size that the matrix unit's tiles hold evenly."""
    missing = _padded_head(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


# The mask's structure.


def _sits_at_indices(mask: Mask) -> bool:
    """Whether static limits on array indices say all that positions, lengths and segments do."""
    arrays = (mask.q_positions, mask.kv_positions, mask.q_lengths, mask.kv_lengths, mask.q_segment_ids)
    return all(array is None for array in arrays)


def _rules(mask: Mask) -> tuple[Array, Array]:
    """Positions, windows, lengths and segments as the kernels read them: `AttentionStructure.queries` and `.keys`."""
    _, _, T, S = mask.shape
    first, last, position = _position_bounds(mask)
    q_index, k_index = jnp.arange(T, dtype=jnp.int32)[None], jnp.arange(S, dtype=jnp.int32)[None]
    if mask.q_lengths is not None:
        real = q_index < mask.q_lengths[:, None]
        first, last = jnp.where(real, first, HIGHEST), jnp.where(real, last, LOWEST)
    if mask.kv_lengths is not None:
        position = jnp.where(k_index < mask.kv_lengths[:, None], position, LOWEST)
    q_segments, k_segments = jnp.zeros_like(q_index), jnp.zeros_like(k_index)
    if mask.q_segment_ids is not None and mask.kv_segment_ids is not None:
        q_segments, k_segments = narrow_segments(mask.q_segment_ids, mask.kv_segment_ids)
    return _stack(first, last, q_segments), _stack(position, k_segments)


def _stack(*vectors: Array) -> Array:
    """[B|1, n] vectors as the last axis of one array."""
    shape = np.broadcast_shapes(*(x.shape for x in vectors))
    return jnp.stack([jnp.broadcast_to(x, shape) for x in vectors], axis=-1)


def _position_bounds(mask: Mask) -> tuple[Array, Array, Array]:
    """The first and the last position that each query sees [B|1, T], and the position of each key [B|1, S]: int32."""
    q, k = mask.positions()
    low, high = np.iinfo(k.dtype).min + 1, np.iinfo(k.dtype).max
    left, right = (None if limit is None else min(limit, int(high)) for limit in mask.limits)
    first = jnp.full_like(q, low) if left is None else jnp.maximum(q, low + left) - left
    last = jnp.full_like(q, high) if right is None else jnp.minimum(q, high - right) + right
    k = jnp.maximum(k, low)  # below it is nobody's position
    return (first, last, k) if k.dtype == np.int32 else _ranked(first, last, k)


def _ranked(first: Array, last: Array, k: Array) -> tuple[Array, Array, Array]:
    """The same comparisons on int32: ranks among the row's sorted key positions stand for 64-bit positions."""
    rows = max(first.shape[0], k.shape[0])
    first, last, k = (jnp.broadcast_to(x, (rows, x.shape[1])) for x in (first, last, k))
    ordered = jnp.sort(k, axis=1)

    def rank(x: Array, side: str) -> Array:
        return jax.vmap(lambda row, x: jnp.searchsorted(row, x, side=side))(ordered, x).astype(jnp.int32)

    return rank(first, "left"), rank(last, "right") - 1, rank(k, "left")


def _dropout(dropout: Dropout | None, request: AttentionRequest) -> tuple[Array | None, Array | None]:
    """The key of each head, uint32 [B|1, N|1, 2], and the offsets of query and key indices."""
    if dropout is None:
        return None, None
    words = dropout.head_words(request.B, request.N)
    return jnp.stack(words, axis=-1)[:, :, 0, 0], dropout.offsets[2:]
