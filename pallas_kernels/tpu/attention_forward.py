"""Attention on TPUs, forward: algorithm 33.1 with the score matrix in blocks, of which hidden ones are never visited.

Each step of the grid folds one block of keys into the statistics (m, l, u) of one block of queries (eq. 33.3 to 33.5),
which stay in VMEM until the last block. Scores are kept in units of log 2. The products run on the matrix unit in the
dtype of the inputs and accumulate in float32; chunks of a block are software-pipelined, the scores of the next one
being issued before the softmax of the last. The sum l is kept in 128 parts, one a lane, which are added up at the end.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.launch import round_up
from pallas_kernels.tpu import attention_schedule
from pallas_kernels.tpu.attention_config import LANES, LOG2_E, AttentionCall, AttentionStructure
from pallas_kernels.tpu.attention_forward_config import AttentionForwardConfig
from pallas_kernels.tpu.attention_launch import (
    KEY,
    QUERY,
    Grid,
    Operand,
    launch,
    structure_operands,
    structure_scalars,
    where,
)
from pallas_kernels.tpu.attention_tile import (
    BY_ROWS,
    PLAIN,
    Refs,
    Tile,
    bias_of,
    cleaned,
    kept_pairs,
    lanes,
    log2_scores,
    product,
    visible_pairs,
)


def attention_forward(
    query: Array,
    key: Array,
    value: Array,
    structure: AttentionStructure,
    *,
    call: AttentionCall,
    config: AttentionForwardConfig,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """Attention output and log-normaliser (eq. 33.2), or statistics (eq. 33.3).

    Args:
      query: [B, N, T, H], bfloat16 or float32; key: [B, K, S, H]; value: [B, K, S, Hv]. N is a multiple of K.
      structure: arrays that say which pairs count.
      call: what is static.
      config: launch configuration.
      interpret: False to compile for a TPU, or what `pl.pallas_call` takes to run elsewhere.

    Returns:
      output [B, N, T, Hv] in the dtype of the query and lse [B, N, T] in float32; a row without a visible key or sink
      has output 0 and lse -inf. For statistics, m and l [B, N, T] and u [B, N, T, Hv], all in float32.
    """
    (B, N, T, _), (_, K, S, Hv) = query.shape, value.shape
    blocks = config.block_q, config.block_kv
    words = attention_schedule.steps_by_query(call, structure, (T, S), blocks)
    padded = round_up(T, config.block_q)
    # The rows of a head are written back together: one window less to look after in every step.
    row = Operand(jax.ShapeDtypeStruct((B, N, 1, padded), jnp.float32), ("batch", "head", None, None))
    wide = jax.ShapeDtypeStruct((B, N, padded, Hv), jnp.float32 if call.statistics else query.dtype)
    results = launch(
        functools.partial(_kernel, call, config, structure.hides_keys, S),
        Grid(B, N, N // K, blocks, words, query_outside=True),
        scalars=structure_scalars(structure),
        operands={
            "query": Operand(query, QUERY),
            "key": Operand(key, KEY),
            "value": Operand(value, KEY),
            **structure_operands(structure, blocks, key_axis=1),
        },
        outputs={"output": Operand(wide, QUERY), "lse": row, **({"l": row} if call.statistics else {})},
        scratch={
            "m": pltpu.VMEM((config.block_q, LANES), jnp.float32),
            "sum": pltpu.VMEM((config.block_q, LANES), jnp.float32),
            "u": pltpu.VMEM((config.block_q, Hv), jnp.float32),
        },
        name="flashspec_attention_forward",
        interpret=interpret,
    )
    output, *rows = (results["output"][:, :, :T], *(results[name][:, :, 0, :T] for name in results if name != "output"))
    return (*rows, output) if call.statistics else (output, *rows)


def _kernel(call: AttentionCall, config: AttentionForwardConfig, hides_keys: bool, keys: int, refs: Refs) -> None:
    batch, head, step = where(refs)

    @pl.when(step.first)
    def start() -> None:
        m: Any = -jnp.inf
        l: Any = 0.0
        if "sinks" in refs:
            m = refs["sinks"][head] * LOG2_E
            l = jnp.where(m == -jnp.inf, 0.0, 1.0)
        refs["m"][...] = jnp.full(refs["m"].shape, m, jnp.float32)
        lane = lax.broadcasted_iota(jnp.int32, refs["sum"].shape, 1)
        refs["sum"][...] = jnp.where(lane == 0, l, 0.0)
        refs["u"][...] = jnp.zeros(refs["u"].shape, jnp.float32)

    def tile(q: int, k: int) -> Tile:
        block = step.outer * config.block_q, step.inner * config.block_kv
        return Tile(*block, q, k, config.chunk_q, config.chunk_kv, key_axis=1, keys=keys)

    def fold(tile: Tile, products: Array, masked: bool) -> None:
        _fold(call, refs, tile, products, masked, hides_keys, batch, head)

    chunks = [
        tile(q, k) for q in range(0, config.block_q, config.chunk_q) for k in range(0, config.block_kv, config.chunk_kv)
    ]

    @pl.when(step.full)
    def all_pairs() -> None:
        if "bias" in refs:
            return  # a bias may hide any pair, so that no block is known to be full
        ahead = [_products(refs, chunks[0])]
        for this, following in zip(chunks, [*chunks[1:], None], strict=True):
            if following is not None:
                ahead.append(_products(refs, following))
            fold(this, ahead.pop(0), masked=False)

    @pl.when(step.partial)
    def some_pairs() -> None:
        for this in chunks:

            @pl.when(this.may_hold_a_pair(call))
            def chunk(this: Tile = this) -> None:
                fold(this, _products(refs, this), masked=True)

    @pl.when(step.last)
    def finish() -> None:
        m, u = refs["m"][...], refs["u"][...]
        l = jnp.broadcast_to(jnp.sum(refs["sum"][...], axis=1, keepdims=True), m.shape)
        rows = pl.ds(pl.multiple_of(step.outer * config.block_q, config.block_q), config.block_q)
        if call.statistics:
            refs["lse"][0, 0, :, rows], refs["l"][0, 0, :, rows] = (m / LOG2_E).T[:1], l.T[:1]
        else:
            u = jnp.where(lanes(l, u.shape[1]) == 0, 0.0, u / lanes(jnp.where(l == 0, 1.0, l), u.shape[1]))
            refs["lse"][0, 0, :, rows] = ((m + jnp.log2(l)) / LOG2_E).T[:1]
        refs["output"][0, 0] = u.astype(refs["output"].dtype)


def _products(refs: Refs, tile: Tile) -> Array:
    return product(refs["query"][0, 0, tile.q_slice], refs["key"][0, 0, tile.k_slice], BY_ROWS)


def _fold(
    call: AttentionCall,
    refs: Refs,
    tile: Tile,
    products: Array,
    masked: bool,
    hides_keys: bool,
    batch: Array,
    head: Array,
) -> None:
    """Fold one tile into the statistics of its queries (eq. 33.4 and 33.5)."""
    scores, _ = log2_scores(call, products, bias_of(refs, tile))
    value = refs["value"][0, 0, tile.k_slice]
    if masked:
        visible = visible_pairs(call, refs, tile)
        scores = jnp.where(visible, scores, -jnp.inf)
        if hides_keys:
            value = cleaned(value, visible, axis=1)
    rows = tile.q_slice
    before = refs["m"][rows]
    m = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    shift = jnp.where(m == -jnp.inf, 0.0, m) if masked else m  # any finite shift serves a row without a key
    weights = jnp.exp2(scores - lanes(shift, tile.k_size))
    decay = jnp.exp2(before - shift)
    refs["m"][rows] = m
    parts = [weights[:, i : i + LANES] for i in range(0, tile.k_size, LANES)]
    refs["sum"][rows] = decay * refs["sum"][rows] + functools.reduce(jnp.add, parts)
    if call.dropout_rate:
        weights = jnp.where(kept_pairs(call, refs, tile, batch, head), weights * call.kept_scale, 0.0)
    u = refs["u"][rows]
    refs["u"][rows] = lanes(decay, u.shape[1]) * u + product(weights.astype(value.dtype), value, PLAIN)
