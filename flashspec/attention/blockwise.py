"""Exact attention one tile at a time: algorithm 33.1 as a scan, with a backward of the same shape.

The forward visits tiles of the score matrix and folds each into the statistics (m, l, u) of its queries (eq. 33.3 to
33.5). The backward visits the same tiles, recomputes their probabilities from the saved m and l, and adds each tile's
share of the gradients:

    P = exp(S - m) / l                                                        the probabilities, from the row normaliser
    G_V = P'^T G_O            G_P = G_O V^T                                                                 (eq. 33.6)
    G_S = P * [keep / (1 - r) * G_P - D]                                                                    (eq. 33.7)
    G_Q = G_S K * scale       G_K = G_S^T Q * scale       G_bias = G_S, summed over broadcast axes          (eq. 33.8)

with P' = P * keep / (1 - r) under dropout of rate r; a soft cap c multiplies G_S by 1 - (S / c)^2.

What differs from the chapter: the derivative is taken of (l, u) with m held constant, which shift invariance allows, so
the row sum of eq. 33.7 arrives as the cotangent of l (D = -l G_l, with G_O = l G_u), and sinks, the log-normaliser and
empty rows need no rule of their own.

Memory is linear in T + S, forward and backward: beside the operands there are accumulators of their size in float32,
and a few tiles. Forward-mode differentiation (`jax.jvp`, `jax.jacfwd`) is refused by JAX for functions with a custom
backward; reverse mode composes to any order, at the memory of a scan.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flashspec.attention import tiles
from flashspec.attention.request import AttentionOperands, AttentionRequest
from flashspec.attention.tiles import Call, Structure, Tensors, Tile
from flashspec.masks import Mask
from flashspec.online_softmax import SoftmaxStats, empty_stats, finalize, merge, stats_dtype
from pallas_kernels.launch import varying_alike


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How many queries and keys a tile has, at most."""

    query: int = 256
    key: int = 512


def blockwise_attention(
    request: AttentionRequest, operands: AttentionOperands, blocks: Blocks = Blocks()
) -> tuple[Array, Array]:
    """Attention output and log-normaliser by algorithm 33.1, differentiable (eq. 33.6 to 33.8).

    Args:
      request: static facts of the call.
      operands: its arrays.
      blocks: tile sizes; the result depends on them only by rounding.

    Returns:
      output [B, T, N, Hv] in the dtype of the query, and lse [B, T, N].
    """
    stats = blockwise_stats(request, operands, blocks)
    return finalize(stats, sinks=operands.sinks, dtype=operands.query.dtype)


def blockwise_stats(request: AttentionRequest, operands: AttentionOperands, blocks: Blocks = Blocks()) -> SoftmaxStats:
    """Statistics (m, l, u) of the call's keys without sinks, rows [B, T, N]; arguments as in `blockwise_attention`."""
    tensors = Tensors(operands.query, operands.key, operands.value, operands.bias)
    (B, T, N, _), (_, S, _, Hv) = tensors.query.shape, tensors.value.shape
    if 0 in (B, T, S):
        return empty_stats((B, T, N), Hv, stats_dtype(tensors.query.dtype))
    sizes = min(blocks.query, T), min(blocks.key, S)
    starts = _starts(operands.mask, sizes)
    call = Call(request.scale, request.logits_soft_cap, sizes, starts, _hides_by_data(operands.mask))
    return _stats(call, *varying_alike((tensors, Structure(operands.mask, operands.dropout))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(call: Call, tensors: Tensors, structure: Structure) -> SoftmaxStats:
    def fold(before: SoftmaxStats, tile: Tile) -> SoftmaxStats:
        return merge(before, tiles.tile_stats(call, tile, structure.kept_scale))

    rows = tensors.query.shape[:3]
    empty = empty_stats(rows, tensors.value.shape[-1], stats_dtype(tensors.query.dtype))
    spans = jax.tree.map(lambda _: tiles.QUERY_ROWS, empty)
    return _sweep(call, tensors, structure, empty, spans, fold)


def _stats_forward(call: Call, tensors: Tensors, structure: Structure) -> tuple[SoftmaxStats, Any]:
    stats = _stats(call, tensors, structure)
    return stats, (tensors, structure, stats.m, stats.l)


def _stats_backward(call: Call, saved: Any, cotangent: SoftmaxStats) -> tuple[Tensors, None]:
    tensors, structure, m, l = saved
    finite_m, finite_l = jnp.where(m == -jnp.inf, 0, m), jnp.where(l == 0, 1, l)
    output_gradient = (l[..., None] * cotangent.u).astype(tensors.value.dtype)
    rows = (finite_m, finite_l, l * cotangent.l, output_gradient)

    def fold(before: Tensors, tile: Tile) -> Tensors:
        own = (tiles.read(x, tile.start, tiles.QUERY_ROWS, call.sizes) for x in rows)
        share = tiles.tile_gradients(call, tile, structure.kept_scale, *own)
        return jax.tree.map(lambda x, y: x + tiles.sum_to(y, x.shape).astype(x.dtype), before, share)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, m.dtype), tensors)
    if tensors.bias is not None and tensors.bias.shape[2:] == structure.mask.shape[2:]:
        # Each element belongs to one tile, which sums it in full: no wider copy of a [T, S] array is needed.
        zeros = zeros._replace(bias=jnp.zeros_like(tensors.bias))
    total = _sweep(call, tensors, structure, zeros, tensors.spans, fold)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), total, tensors), None


_stats.defvjp(_stats_forward, _stats_backward)


def _sweep[Carry](
    call: Call,
    tensors: Tensors,
    structure: Structure,
    initial: Carry,
    spans: Carry,
    fold: Callable[[Carry, Tile], Carry],
) -> Carry:
    """Visit every tile, replacing the tile's part of the carry by `fold(part, tile)`.

    Args:
      call, tensors, structure: the call.
      initial: a pytree of arrays.
      spans: for each of them, the axes along which a tile reads and writes it.
      fold: from the part of the carry and the tile to the new part.

    Returns:
      The carry after all tiles.
    """

    def visit(carry: Carry, first: Array) -> tuple[Carry, None]:
        tile = tiles.read_tile(call, tensors, structure, first)
        part = jax.tree.map(lambda x, span: tiles.read(x, tile.start, span, call.sizes), carry, spans)
        if call.check_visible and len(call.starts) > 1:
            part = lax.cond(jnp.any(tile.visible), lambda: fold(part, tile), lambda: part)
        else:
            part = fold(part, tile)
        return jax.tree.map(lambda x, new, span: tiles.write(x, new, tile.start, span), carry, part, spans), None

    initial = varying_alike((initial, tensors, structure))[0]
    starts = jnp.asarray(np.array(call.starts, np.int32).reshape(-1, 2))
    if len(call.starts) == 1:
        return visit(initial, starts[0])[0]
    return lax.scan(visit, initial, starts)[0]


def _starts(mask: Mask, sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """First query and first key of each tile, without those that positions known at trace time hide entirely."""
    _, _, T, S = mask.shape
    left, right = mask.limits if _default_positions(mask) else (None, None)
    return tuple(
        (q, k)
        for q in range(0, T, sizes[0])
        for k in range(0, S, sizes[1])
        if (right is None or k <= min(q + sizes[0], T) - 1 + right)
        and (left is None or min(k + sizes[1], S) - 1 >= q - left)
    )


def _hides_by_data(mask: Mask) -> bool:
    """Whether arrays, and not only shapes, can hide a whole tile."""
    rules = (mask.q_lengths, mask.kv_lengths, mask.q_segment_ids, mask.explicit)
    positional = mask.is_positional and not _default_positions(mask)
    return positional or any(rule is not None for rule in rules)


def _default_positions(mask: Mask) -> bool:
    """Whether queries and keys both sit at 0, 1, ..., which a mask records as the absence of positions."""
    return mask.q_positions is None and mask.kv_positions is None
