"""Attention of a few new tokens over a long cache on Hopper: the cache is read once, at the speed of memory.

Every program takes an equal share of the blocks of the cache (`attention_decode_work`). Where a whole row lies in one
share, its program finishes it. The statistics m, l and u (base 2, float32) of all other parts go to memory, and a
second, small kernel merges them (`attention_decode_merge`). What a program does with a part is in
`attention_decode_part`.

Clusters, which the heuristic's settings have for short caches, need no second kernel (`attention_decode_cluster`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_decode_cluster import decode_by_clusters
from pallas_kernels.gpu.hopper.attention_decode_config import TILE, DecodeCall, DecodeOperands
from pallas_kernels.gpu.hopper.attention_decode_merge import finish, merge_parts
from pallas_kernels.gpu.hopper.attention_decode_part import Copies, Rows, Scratch, across, attend, inputs, scratch_of
from pallas_kernels.gpu.hopper.attention_decode_work import Place, Work, parts_of_a_head, programs_of_a_head


def decode(call: DecodeCall, operands: DecodeOperands) -> tuple[Array, ...]:
    """Attention of the new tokens, or its statistics.

    Args:
      call: what is static about it, legal by `attention_decode_config.refusals` and `config_refusals`.
      operands: its arrays.

    Returns:
      output [B, T, N, H] in the query's dtype and lse [B, T, N] float32, natural log; or with `call.statistics` m, l
      [B, T, N] and u [B, T, N, H], float32, natural log. A row without a key has output 0 and lse -inf.
    """
    if call.config.cluster > 1:
        return decode_by_clusters(call, operands)
    shape, given = call.shape, inputs(call, operands)
    if not call.finishes:
        given.pop("sinks", None)
    rows = shape.tiles * TILE
    parts, pairs = shape.K * parts_of_a_head(call), shape.B * shape.K
    statistics_and_outputs = plgpu.kernel(
        functools.partial(_kernel, call, tuple(given)),
        out_type=(
            jax.ShapeDtypeStruct((parts, rows), jnp.float32),
            jax.ShapeDtypeStruct((parts, rows), jnp.float32),
            jax.ShapeDtypeStruct((parts, rows if shape.tiles > 1 else shape.rows, shape.H), jnp.float32),
            jax.ShapeDtypeStruct((pairs,), jnp.int32),
            jax.ShapeDtypeStruct((pairs,), jnp.int32),
            *([jax.ShapeDtypeStruct(operands.query.shape, operands.query.dtype)] if call.finishes else []),
            *([jax.ShapeDtypeStruct((pairs, rows), jnp.float32)] if call.finishes else []),
        ),
        scratch_types=scratch_of(
            call,
            operands.query.dtype,
            plgpu.SMEM((rows, shape.H // 2), jnp.float32),
            plgpu.SMEM((rows, shape.H), operands.query.dtype),
        ),
        grid=(shape.K * programs_of_a_head(call),),
        grid_names=("program",),
        num_threads=shape.tiles,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*given.values())
    results = _Results(*statistics_and_outputs)
    finished = (results.output, results.lse) if call.finishes else ()
    return merge_parts(call, results[:5], finished, operands.real, operands.sinks, operands.query.dtype)


class _Results(NamedTuple):
    """What the kernel writes: statistics of the parts, where those of each pair are, and outputs of whole rows."""

    m: Any
    l: Any
    u: Any
    first: Any
    end: Any
    output: Any = None
    lse: Any = None


def _kernel(call: DecodeCall, names: tuple[str, ...], *refs: Any) -> None:
    """Statistics of every part: m, l [parts, rows] and u [parts, rows, H]; first and last + 1 part of every pair.

    A part that is a whole row is finished instead, and the pair has no parts.
    """
    given = dict(zip(names, refs, strict=False))
    outputs, scratch = refs[len(names) : -len(Scratch._fields)], Scratch(*refs[-len(Scratch._fields) :])
    results = _Results(*outputs)
    work = Work(call, given["length"], given.get("real"))
    program, group = lax.axis_index("program"), lax.axis_index("group")
    share = work.share(program)
    copies = Copies(call, given, scratch, work, group, share.blocks)
    zero = jnp.int32(0)

    def part(carry: Any) -> Any:
        done, index, place, ahead = carry
        blocks = share.run(place, done)
        following = work.after(place, blocks)
        plgpu.barrier_wait(scratch.query_ready)
        rows = Rows(call, given, work, place, group)
        m, l, u, ahead = attend(rows, scratch, copies, done, blocks, ahead)
        copies.release_query()
        number, whole = share.part + index, _is_whole(call, place, blocks)
        if call.finishes:
            pl.when(whole)(lambda: _finish(results, scratch, rows, m, l, u))
        pl.when(~whole)(lambda: _store(results, scratch, call, group, number, m, l, u))
        pl.when(group == 0)(lambda: _note_parts(results, call, place, blocks, number))
        copies.query(following, index, done + blocks)
        return done + blocks, index + 1, following, ahead

    copies.query(share.start, None, zero)
    carry = zero, zero, share.start, copies.begin(share.start)
    lax.while_loop(lambda carry: carry[0] < share.blocks, part, carry)
    plgpu.wait_smem_to_gmem(0)


def _is_whole(call: DecodeCall, place: Place, blocks: Array) -> Array:
    """Whether a part is a whole row that its program finishes."""
    return (place.block == 0) & (blocks == place.blocks) & call.finishes


def _finish(results: _Results, scratch: Scratch, rows: Rows, m: Array, l: Array, u: Array) -> None:
    """Write outputs and log-normalisers of a whole row. The query's memory takes the outputs."""
    shape, place, group = rows.call.shape, rows.place, rows.group
    *_, finished = scratch.query_or_results
    mine = pl.ds(pl.multiple_of(group * TILE, TILE), TILE)
    seen = (rows.token < rows.work.real_tokens(place.b)) & (l != 0)  # true for NaN, which is to be seen
    factor, (lse,) = finish(m, l, seen, rows.sinks())
    results.lse.at[place.b * shape.K + place.k, mine][...] = lse
    factor = across(factor, u.shape)
    finished.at[mine][...] = jnp.where(factor != 0, u * factor, 0.0).astype(finished.dtype)
    plgpu.commit_smem()
    if shape.tiles > 1:
        plgpu.barrier_arrive(scratch.rows_finished)
        plgpu.barrier_wait(scratch.rows_finished)

    @pl.when(group == 0)
    def _copy() -> None:
        heads = pl.ds(place.k * shape.G, shape.G)
        for i in range(shape.groups):
            at, size = ((i, heads), shape.G) if shape.heads_inside else ((slice(None), place.k * shape.G + i), shape.T)
            plgpu.copy_smem_to_gmem(finished.at[pl.ds(i * shape.stride, size)], results.output.at[(place.b, *at)])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(
    results: _Results, scratch: Scratch, call: DecodeCall, group: Array, part: Array, m: Array, l: Array, u: Array
) -> None:
    """Write the statistics of a part. The query has been read for the last time: its memory takes u."""
    _, sums, _ = scratch.query_or_results
    half = call.shape.H // 2
    origin = pl.multiple_of(group * TILE, TILE)
    mine, stored = pl.ds(origin, TILE), pl.ds(origin, min(call.shape.rows, TILE))
    results.m.at[part, mine][...] = m
    results.l.at[part, mine][...] = l
    for start in (0, half):
        sums.at[mine][...] = lax.slice(u, (0, start), (TILE, start + half))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums.at[stored], results.u.at[part, stored, pl.ds(start, half)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _note_parts(results: _Results, call: DecodeCall, place: Place, blocks: Array, part: Array) -> None:
    """Write which parts a pair has, once from its first one and once from its last one; a whole row has none."""
    pair = place.b * call.shape.K + place.k

    @pl.when(place.block == 0)
    def _begins() -> None:
        results.first[pair] = part

    @pl.when(place.block + blocks == place.blocks)
    def _ends() -> None:
        results.end[pair] = jnp.where(_is_whole(call, place, blocks), part, part + 1)
