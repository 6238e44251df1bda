"""Attention on TPUs, backward: all gradients in one pass over the blocks of the score matrix, five products a block.

    P = exp(S - lse)          G_V = P'^T G_O          G_P = keep / (1 - r) G_O V^T                      (eq. 33.6)
    G_S = P * (G_P + row term)      G_Q = scale G_S K      G_K = scale G_S^T Q                          (eq. 33.7, 33.8)

The row term is the cotangent of lse less the row sum of eq. 33.7. Blocks of keys are outside: the gradients of keys and
values stay in VMEM while their queries pass by; those of the queries of one head stay there for all of its blocks, so
that nothing is computed twice. Tiles lie as [keys, queries]: two of the three gradients are then plain products, and a
row's numbers lie along the lanes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.launch import round_up
from pallas_kernels.tpu import attention_schedule
from pallas_kernels.tpu.attention_backward_config import AttentionBackwardConfig
from pallas_kernels.tpu.attention_config import LOG2_E, AttentionCall, AttentionStructure
from pallas_kernels.tpu.attention_launch import (
    KEY,
    PAIRS,
    QUERY,
    VECTOR,
    Grid,
    Operand,
    launch,
    structure_operands,
    structure_scalars,
    where,
)
from pallas_kernels.tpu.attention_tile import (
    BY_COLUMNS,
    BY_ROWS,
    PLAIN,
    Refs,
    Tile,
    bias_of,
    cleaned,
    kept_pairs,
    log2_scores,
    product,
    visible_pairs,
)


class Gradients(NamedTuple):
    """What the backward returns; the bias gradient is None where none is asked for."""

    query: Array  # [B, N, T, H]
    key: Array  # [B, K, S, H]
    value: Array  # [B, K, S, Hv]
    bias: Array | None  # float32 [B, N, T, S]


def attention_backward(
    query: Array,
    key: Array,
    value: Array,
    structure: AttentionStructure,
    output_gradient: Array,
    lse: Array,
    row_term: Array,
    *,
    call: AttentionCall,
    config: AttentionBackwardConfig,
    interpret: Any = False,
) -> Gradients:
    """Gradients of attention (eq. 33.6 to 33.8).

    Args:
      query, key, value, structure, call, interpret: as in the forward.
      output_gradient: [B, N, T, Hv] in the dtype of the values, G_O.
      lse: float32 [B, N, T], finite: any finite number serves a row without a key.
      row_term: float32 [B, N, T], what is added to G_P in eq. 33.7.
      config: launch configuration.

    Returns:
      `Gradients`.
    """
    (B, N, T, H), (_, K, S, Hv) = query.shape, value.shape
    blocks = config.block_q, config.block_kv
    words = attention_schedule.steps_by_key(call, structure, (T, S), blocks)
    rows, columns = round_up(T, config.block_q), round_up(S, config.block_kv)
    shared = jnp.float32 if N > K else key.dtype  # gradients of heads that share a key are summed before they round
    by_head = ("batch", "head", "key", None)
    operands = {
        "query": Operand(query, QUERY),
        "key": Operand(key, KEY),
        "value": Operand(value, KEY),
        "output_gradient": Operand(output_gradient, QUERY),
        "shift": Operand(lse[:, :, None] * LOG2_E, VECTOR),
        "row_term": Operand(row_term[:, :, None], VECTOR),
        **structure_operands(structure, blocks, key_axis=0),
    }
    outputs = {
        "g_query": Operand(jax.ShapeDtypeStruct((B, N, rows, H), jnp.float32), ("batch", "head", None, None)),
        "g_key": Operand(jax.ShapeDtypeStruct((B, N, columns, H), shared), by_head),
        "g_value": Operand(jax.ShapeDtypeStruct((B, N, columns, Hv), shared), by_head),
    }
    aliases = {}
    if structure.bias is not None:  # blocks that are never visited keep these zeros
        operands["zeros"] = Operand(jnp.zeros((B, N, rows, columns), jnp.float32), PAIRS)
        outputs["g_bias"] = Operand(jax.ShapeDtypeStruct((B, N, rows, columns), jnp.float32), PAIRS)
        aliases = {"g_bias": "zeros"}
    results = launch(
        functools.partial(_kernel, call, config, structure.hides_keys, S),
        Grid(B, N, N // K, blocks, words, query_outside=False),
        scalars=structure_scalars(structure),
        operands=operands,
        outputs=outputs,
        scratch={
            "key_sum": pltpu.VMEM((config.block_kv, H), jnp.float32),
            "value_sum": pltpu.VMEM((config.block_kv, Hv), jnp.float32),
        },
        aliases=aliases,
        name="flashspec_attention_backward",
        interpret=interpret,
    )
    g_query = (results["g_query"][:, :, :T] * call.scale).astype(query.dtype)
    g_key, g_value = (_sum_groups(results[name][:, :, :S], K).astype(key.dtype) for name in ("g_key", "g_value"))
    return Gradients(g_query, g_key, g_value, results["g_bias"][:, :, :T, :S] if aliases else None)


def _sum_groups(x: Array, K: int) -> Array:
    """[B, N, S, H] summed over the query heads that share a key/value head."""
    return x if x.shape[1] == K else jnp.sum(x.reshape(x.shape[0], K, -1, *x.shape[2:]), axis=2)


def _kernel(call: AttentionCall, config: AttentionBackwardConfig, hides_keys: bool, keys: int, refs: Refs) -> None:
    batch, head, step = where(refs)
    q_block, k_block = step.inner * config.block_q, step.outer * config.block_kv

    @pl.when(pl.program_id(2) == 0)
    def start_head() -> None:
        refs["g_query"][...] = jnp.zeros(refs["g_query"].shape, jnp.float32)

    @pl.when(step.first)
    def start() -> None:
        for name in ("key_sum", "value_sum", "g_bias"):
            if name in refs:  # a step whose keys nobody sees writes its block of the bias gradient all the same
                refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

    def add(tile: Tile, products: tuple[Array, Array], masked: bool) -> None:
        _add(call, refs, tile, products, masked, hides_keys, batch, head)

    chunks = [
        Tile(q_block, k_block, q, k, config.chunk_q, config.chunk_kv, key_axis=0, keys=keys)
        for k in range(0, config.block_kv, config.chunk_kv)
        for q in range(0, config.block_q, config.chunk_q)
    ]

    @pl.when(step.full)
    def all_pairs() -> None:
        if "bias" in refs:
            return  # a bias may hide any pair, so that no block is known to be full
        for this in chunks:
            add(this, _products(refs, this), masked=False)

    @pl.when(step.partial)
    def some_pairs() -> None:
        if "g_bias" in refs:
            refs["g_bias"][...] = jnp.zeros(refs["g_bias"].shape, jnp.float32)
        for this in chunks:

            @pl.when(this.may_hold_a_pair(call))
            def chunk(this: Tile = this) -> None:
                add(this, _products(refs, this), masked=True)

    @pl.when(step.last)
    def finish() -> None:
        refs["g_key"][0, 0] = (refs["key_sum"][...] * call.scale).astype(refs["g_key"].dtype)
        refs["g_value"][0, 0] = refs["value_sum"][...].astype(refs["g_value"].dtype)


def _products(refs: Refs, tile: Tile) -> tuple[Array, Array]:
    """K Q^T and V G_O^T of a tile."""
    pairs = (("key", "query"), ("value", "output_gradient"))
    return tuple(product(refs[k][0, 0, tile.k_slice], refs[q][0, 0, tile.q_slice], BY_ROWS) for k, q in pairs)  # type: ignore[return-value]


def _add(
    call: AttentionCall,
    refs: Refs,
    tile: Tile,
    products: tuple[Array, Array],
    masked: bool,
    hides_keys: bool,
    batch: Array,
    head: Array,
) -> None:
    """Add the shares of one tile to all gradients."""
    scores, squashed = log2_scores(call, products[0], bias_of(refs, tile))
    P, G_P = jnp.exp2(scores - refs["shift"][0, 0, :, tile.q_slice]), products[1]
    query, key = refs["query"][0, 0, tile.q_slice], refs["key"][0, 0, tile.k_slice]
    kept = P
    if call.dropout_rate:
        keep = kept_pairs(call, refs, tile, batch, head)
        kept, G_P = (jnp.where(keep, x * call.kept_scale, 0.0) for x in (P, G_P))
    G_S = P * (G_P + refs["row_term"][0, 0, :, tile.q_slice])
    if squashed is not None:
        G_S = G_S * (1.0 - squashed * squashed)
    if masked:
        visible = visible_pairs(call, refs, tile)
        kept, G_S = jnp.where(visible, kept, 0.0), jnp.where(visible, G_S, 0.0)
        if hides_keys:
            key, query = cleaned(key, visible, axis=0), cleaned(query, visible, axis=1)
    refs["value_sum"][tile.k_slice] += product(
        kept.astype(key.dtype), refs["output_gradient"][0, 0, tile.q_slice], PLAIN
    )
    if "g_bias" in refs:
        refs["g_bias"][0, 0, tile.q_slice, tile.k_slice] = G_S.T
    narrow = G_S.astype(key.dtype)
    refs["key_sum"][tile.k_slice] += product(narrow, query, PLAIN)
    rows = pl.ds(pl.multiple_of(tile.q_block + tile.q, tile.q_size), tile.q_size)
    refs["g_query"][0, 0, rows] += product(narrow, key, BY_COLUMNS)
