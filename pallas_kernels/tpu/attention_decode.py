"""Attention of a few new tokens over a cache on TPUs: statistics of each row, its keys read once.

The slots of a cache are copied block by block into one of two buffers while the other is computed on, also across rows:
each step of the grid starts the next step's copies before it waits for its own. A block holds all key/value heads as
they lie in the cache: [slots, K, H], of which a head is read with a stride; or where that fills no tile, as with one
head, [K, slots, H]. The query heads of a group and the new tokens of a row share the sublanes. Blocks that no new token
sees are neither copied nor computed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.launch import cdiv, round_up, varying_alike
from pallas_kernels.tpu import attention_schedule
from pallas_kernels.tpu.attention_config import HIGHEST, LANES, LOG2_E, AttentionCall
from pallas_kernels.tpu.attention_decode_config import ROWS, AttentionDecodeConfig, heads_lie_apart
from pallas_kernels.tpu.attention_launch import VMEM_LIMIT
from pallas_kernels.tpu.attention_tile import BY_ROWS, PLAIN, Refs, cleaned, lanes, log2_scores, product

SUBLANES = 8
# New tokens that the bits of an int32 can name.
MAX_TOKENS = 31


class DecodeRows(NamedTuple):
    """What each row's new tokens see: int32 arrays.

    A key at position p < start is seen by tokens with first <= p; the new token j, which lies at position start + j, by
    those with bit j set. Nobody sees positions from `length` on.
    """

    start: Array  # [B], position of the first new token
    length: Array  # [B]
    first: Array  # [B, T]
    ancestors: Array  # [B, T]


class Cache(NamedTuple):
    """A cache as it lies in memory: dense, paged (`pages` given) or a ring (`positions` given)."""

    key: Array  # [B, S, K, H], or [pages, page, K, H]
    value: Array  # [B, S, K, Hv], or [pages, page, K, Hv]
    pages: Array | None = None  # int32 [B, pages of a row], all in range
    positions: Array | None = None  # int32 [B, S], -1 where a slot holds none

    @property
    def slots(self) -> int:
        """Slots of one row."""
        return self.key.shape[1] * (1 if self.pages is None else self.pages.shape[1])


def attention_decode(
    query: Array,
    cache: Cache,
    rows: DecodeRows,
    *,
    call: AttentionCall,
    config: AttentionDecodeConfig,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """Statistics of new tokens over the keys of a cache (eq. 33.3), one set for each split.

    Args:
      query: [B, T, N, H], bfloat16 or float32.
      cache: the cache, in the query's dtype. Where `heads_lie_apart`, slots and pages are multiples of `ROWS`.
      rows: what each token sees.
      call: what is static; only `scale` and `soft_cap` are used.
      config: launch configuration.
      interpret: as in `pl.pallas_call`.

    Returns:
      m [splits, B, T, N], l likewise, u [splits, B, T, N, Hv], in float32; `merge` them over the first axis.
    """
    (B, T, N, H), (K, Hv) = query.shape, cache.value.shape[2:]
    R = round_up(N // K * T, SUBLANES)
    begins = _begins(cache, config.block_kv)
    apart = heads_lie_apart(K)
    memory = {"key_memory": cache.key, "value_memory": cache.value}
    if apart:  # as they lie
        memory = {name: x.swapaxes(1, 2) for name, x in memory.items()}
    scalars = {"words": _words(cache, rows, config, begins), "begins": begins}
    scalars["bounds"] = jnp.stack([rows.start, rows.length], axis=-1)
    if cache.pages is not None:
        scalars["pages"] = cache.pages
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    operands = {
        "query": (_packed(query, K, R), _row_block(K, R, H)),
        "rules": (_rules(rows, N // K, R), _row_block(R, 2)),
        **{name: (x, in_memory) for name, x in memory.items()},
    }
    if cache.positions is not None:
        positions = _in_blocks(cache.positions, begins, config.block_kv)
        operands["positions"] = positions, pl.BlockSpec((1, 1, 1, config.block_kv), _ring_index)
    arrays = varying_alike([*scalars.values(), *(array for array, _ in operands.values())])
    varying = jax.typeof(arrays[0]).manual_axis_type
    outputs = {"m": (K * R, LANES), "l": (K * R, LANES), "u": (K * R, Hv)}
    scratch = {
        "keys": pltpu.VMEM(_buffers(config.block_kv, K, H, apart), query.dtype),
        "values": pltpu.VMEM(_buffers(config.block_kv, K, Hv, apart), query.dtype),
        "arrived": pltpu.SemaphoreType.DMA((2, 2)),
    }
    names = [*scalars, *operands, *outputs, *scratch]
    strided = not isinstance(interpret, pltpu.InterpretParams)
    m, l, u = pl.pallas_call(
        lambda *refs: _kernel(call, config, cache.slots, strided, dict(zip(names, refs, strict=True))),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=scalars["words"].shape,
            in_specs=[spec for _, spec in operands.values()],
            out_specs=[_split_block(*shape) for shape in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((config.splits, B, *shape), jnp.float32, manual_axis_type=varying)
            for shape in outputs.values()
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="flashspec_attention_decode",
        interpret=interpret,
    )(*arrays)
    m, l, u = (_unpacked(x, T, N // K, K) for x in (m[..., :1], l[..., :1], u))
    return m[..., 0] / LOG2_E, l[..., 0], u


# Operands.


def _packed(query: Array, K: int, R: int) -> Array:
    """[B, T, N, H] as [B, K, R, H]: a group's heads, and for each the new tokens, filled up to R rows."""
    B, T, N, H = query.shape
    rows = query.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, R - rows.shape[2]), (0, 0)))


def _unpacked(x: Array, T: int, G: int, K: int) -> Array:
    """[splits, B, K R, n] as [splits, B, T, N, n]."""
    splits, B, _, n = x.shape
    rows = x.reshape(splits, B, K, -1, n)[:, :, :, : G * T].reshape(splits, B, K, G, T, n)
    return rows.transpose(0, 1, 4, 2, 3, 5).reshape(splits, B, T, K * G, n)


def _rules(rows: DecodeRows, G: int, R: int) -> Array:
    """`first` and `ancestors` of each packed row: int32 [B, R, 2]."""
    rules = jnp.tile(jnp.stack([rows.first, rows.ancestors], axis=-1), (1, G, 1))
    return jnp.pad(rules, ((0, 0), (0, R - rules.shape[1]), (0, 0)))


def _begins(cache: Cache, block: int) -> Array:
    """The first slot of each block: the last block of a dense cache is moved back inside it."""
    begins = np.arange(cdiv(cache.slots, block)) * block
    last = begins[-1] if cache.pages is not None else max(cache.slots - block, 0)
    return jnp.asarray(np.minimum(begins, last), jnp.int32)


def _in_blocks(positions: Array, begins: Array, block: int) -> Array:
    """Positions of each block's slots, int32 [B, blocks, 1, block]: -1 where an earlier block has the slot."""
    slots = begins[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
    own = slots >= (jnp.arange(begins.shape[0], dtype=jnp.int32) * block)[:, None]
    return jnp.where(own[None], positions[:, slots], -1)[:, :, None]


def _words(cache: Cache, rows: DecodeRows, config: AttentionDecodeConfig, begins: Array) -> Array:
    """The steps of each split: row outside, block of slots inside; int32 [splits, steps]."""
    block, count = config.block_kv, begins.shape[0]
    start, length = rows.start[:, None], jnp.minimum(rows.length, rows.start + MAX_TOKENS)[:, None]
    first, sees_new = jnp.min(rows.first, 1, keepdims=True), jnp.any(rows.ancestors != 0, 1, keepdims=True)
    if cache.positions is None:
        low = (jnp.arange(count, dtype=jnp.int32) * block)[None]
        high = jnp.minimum(low + block, cache.slots) - 1
    else:
        held = _in_blocks(cache.positions, begins, block)[:, :, 0]
        low = jnp.min(jnp.where(held < 0, HIGHEST, held), axis=-1)
        high = jnp.max(held, axis=-1)
    visible = ((high >= first) & (low < start)) | (sees_new & (high >= start) & (low < length))
    full = (low >= jnp.max(rows.first, 1, keepdims=True)) & (high < start) & (begins % block == 0)[None]
    if cache.positions is not None:
        full &= jnp.all(held >= 0, axis=-1)
    share = np.arange(count) * config.splits // count == np.arange(config.splits)[:, None]
    return attention_schedule.packed_steps(visible[None] & share[:, None], full[None])


def _buffers(block: int, K: int, size: int, apart: bool) -> tuple[int, ...]:
    """Two blocks of slots; heads that are read with a stride lie there in parts of 128 lanes."""
    if apart:
        return 2, K, block, size
    return 2, cdiv(size, LANES), block, K, min(size, LANES)


def _row_block(*shape: int) -> pl.BlockSpec:
    """The part of an operand that belongs to a step's row."""
    return pl.BlockSpec((1, *shape), lambda s, t, words, *_: (_row(words, s, t), *[0] * len(shape)))


def _split_block(*shape: int) -> pl.BlockSpec:
    """The part of a result that belongs to a step's split and row."""
    return pl.BlockSpec((1, 1, *shape), lambda s, t, words, *_: (s, _row(words, s, t), *[0] * len(shape)))


def _row(words: Any, s: Array, t: Array) -> Array:
    return attention_schedule.outer_block(words[s, t])


def _ring_index(s: Array, t: Array, words: Any, *_: Any) -> tuple[Any, ...]:
    return _row(words, s, t), attention_schedule.inner_block(words[s, t]), 0, 0


# The kernel.


class _At(NamedTuple):
    """A step's place: its row, its block of slots, and the buffer that holds them."""

    row: Array
    block: Array
    buffer: Array


def _kernel(call: AttentionCall, config: AttentionDecodeConfig, slots: int, strided: bool, refs: Refs) -> None:
    split, t = pl.program_id(0), pl.program_id(1)
    block, step = config.block_kv, attention_schedule.unpack(refs["words"][split, t])
    here = _At(step.outer, step.inner, lax.rem(t, jnp.int32(2)))

    @pl.when((t == 0) & (step.full | step.partial))
    def copy_first() -> None:
        _for_each_copy(refs, here, block, slots, lambda copy: copy.start())

    @pl.when(t + 1 < pl.num_programs(1))
    def copy_next() -> None:
        following = attention_schedule.unpack(refs["words"][split, t + 1])

        @pl.when(following.full | following.partial)
        def start() -> None:
            there = _At(following.outer, following.inner, 1 - here.buffer)
            _for_each_copy(refs, there, block, slots, lambda copy: copy.start())

    @pl.when(step.first)
    def start_row() -> None:
        refs["m"][...] = jnp.full(refs["m"].shape, -jnp.inf, jnp.float32)
        for name in ("l", "u"):
            refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

    @pl.when(step.full | step.partial)
    def wait() -> None:
        _for_each_copy(refs, here, block, slots, lambda copy: copy.wait())

    @pl.when(step.full)
    def all_slots() -> None:
        _fold_block(call, config, strided, refs, here, masked=False)

    @pl.when(step.partial)
    def some_slots() -> None:
        _fold_block(call, config, strided, refs, here, masked=True)


def _for_each_copy(refs: Refs, at: _At, block: int, slots: int, act: Any) -> None:
    """`act` on the copies of a step: one of keys and one of values, or one for each page that holds a live slot."""
    page = None if "pages" not in refs else refs["key_memory"].shape[2 if _apart(refs) else 1]
    if page is None:
        begin = refs["begins"][at.block]
        where = pl.ds(pl.multiple_of(begin, ROWS) if _apart(refs) else begin, block)
        _copy(refs, at, (at.row, where), pl.ds(0, block), act)
        return
    live = jnp.minimum(refs["bounds"][at.row, 1], slots) - at.block * block

    def one(p: Array, _: None) -> None:
        entry = refs["pages"][at.row, at.block * (block // page) + p]
        _copy(refs, at, (entry, slice(None)), pl.ds(p * page, page), act)

    lax.fori_loop(0, jnp.minimum(lax.div(live + (page - 1), jnp.int32(page)), block // page), one, None)


def _apart(refs: Refs) -> bool:
    return heads_lie_apart(refs["query"].shape[1])


def _copy(refs: Refs, at: _At, source: tuple[Any, Any], slots: Any, act: Any) -> None:
    """`act` on the copies of some slots, (row or page, where in it), to their place in the buffered block."""
    for i, (memory, name) in enumerate((("key_memory", "keys"), ("value_memory", "values"))):
        row, where = source
        if _apart(refs):
            ends = [(refs[memory].at[row, :, where], refs[name].at[at.buffer, :, slots])]
        else:
            parts, size = refs[name].shape[1], refs[name].shape[-1]
            ends = [
                (refs[memory].at[row, where, :, pl.ds(part * size, size)], refs[name].at[at.buffer, part, slots])
                for part in range(parts)
            ]
        for end in ends:
            act(pltpu.make_async_copy(*end, refs["arrived"].at[i, at.buffer]))


def _fold_block(
    call: AttentionCall, config: AttentionDecodeConfig, strided: bool, refs: Refs, at: _At, masked: bool
) -> None:
    """Fold a block into the statistics of its row, chunk by chunk."""

    def chunk(c: Array, _: None) -> None:
        first = pl.multiple_of(c * config.chunk_kv, config.chunk_kv)
        visible = _visible(refs, at, first, config) if masked else None
        for k in range(0, refs["query"].shape[1], config.heads):
            _fold(call, strided, refs, at.buffer, pl.ds(first, config.chunk_kv), range(k, k + config.heads), visible)

    lax.fori_loop(0, config.block_kv // config.chunk_kv, chunk, None)


def _visible(refs: Refs, at: _At, first_slot: Array, config: AttentionDecodeConfig) -> Array:
    """Which slots of a chunk each packed row of one head sees: bool [R, chunk]."""
    start, length = refs["bounds"][at.row, 0], refs["bounds"][at.row, 1]
    first, ancestors = refs["rules"][0, :, 0:1], refs["rules"][0, :, 1:2]
    if "positions" in refs:
        position = refs["positions"][0, 0, :, pl.ds(first_slot, config.chunk_kv)]
    else:
        slot = lax.broadcasted_iota(jnp.int32, (1, config.chunk_kv), 1) + (refs["begins"][at.block] + first_slot)
        position = jnp.where(slot >= at.block * config.block_kv, slot, -1)
    token = position - start
    bit = lax.shift_right_logical(*jnp.broadcast_arrays(ancestors, jnp.clip(token, 0, MAX_TOKENS - 1))) & 1
    of_token = (token >= 0) & (token < MAX_TOKENS) & (position < length) & (bit == 1)
    return (position >= 0) & (((position >= first) & (token < 0)) | of_token)


def _fold(
    call: AttentionCall, strided: bool, refs: Refs, buffer: Array, slots: Any, heads: range, visible: Array | None
) -> None:
    """Fold a chunk into the statistics of some heads (eq. 33.4 and 33.5), their rows in one tile of scores."""
    R = refs["query"].shape[2]
    rows = pl.ds(heads.start * R, len(heads) * R)
    keys = (_head(refs, "keys", buffer, slots, k, strided) for k in heads)
    products = [product(refs["query"][0, k], key, BY_ROWS) for k, key in zip(heads, keys, strict=True)]
    scores, _ = log2_scores(call, jnp.concatenate(products, axis=0))
    if visible is not None:
        scores = jnp.where(jnp.tile(visible, (len(heads), 1)), scores, -jnp.inf)
    before = refs["m"][0, 0, rows]
    m = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    shift = m if visible is None else jnp.where(m == -jnp.inf, 0.0, m)
    weights, decay = jnp.exp2(scores - lanes(shift, scores.shape[1])), jnp.exp2(before - shift)
    refs["m"][0, 0, rows] = m
    refs["l"][0, 0, rows] = decay * refs["l"][0, 0, rows] + jnp.sum(weights, axis=1, keepdims=True)
    weights = weights.astype(refs["values"].dtype)
    sums = []
    for i, k in enumerate(heads):
        value = _head(refs, "values", buffer, slots, k, strided)
        if visible is not None:
            value = cleaned(value, visible, axis=1)
        sums.append(product(weights[i * R : (i + 1) * R], value, PLAIN))
    u = refs["u"][0, 0, rows]
    refs["u"][0, 0, rows] = lanes(decay, u.shape[1]) * u + jnp.concatenate(sums, axis=0)


def _head(refs: Refs, name: str, buffer: Array, slots: Any, k: int, strided: bool) -> Array:
    """Head k of some slots of a buffered block: a part of [K, slots, size]; or of [slots, K, 128] by 128 lanes.

    Two bfloat16 heads share the 32-bit rows that a strided load reads. The interpreter that simulates memory knows no
    reshaped references: without `strided` a head is indexed, which compiles to far more.
    """
    if _apart(refs):
        return refs[name][buffer, k, slots]
    parts = [_part(refs[name].at[buffer, part], slots, k, strided) for part in range(refs[name].shape[1])]
    return jnp.concatenate(parts, axis=1)


def _part(block: Any, slots: Any, k: int, strided: bool) -> Array:
    """Rows of head k, of a block [slots, K, lanes]."""
    _, K, lanes_ = block.shape
    if not strided:
        return block[slots, k]
    rows = block.at[slots].reshape(slots.size * K, lanes_)
    if block.dtype == jnp.float32:
        return rows[pl.ds(k, slots.size, stride=K)]
    pair = rows.bitcast(jnp.int32)[pl.ds(k // 2, slots.size, stride=K // 2)]
    bits = pair & -(2**16) if k % 2 else pair << 16  # the upper half of a float32 is a bfloat16
    return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)
