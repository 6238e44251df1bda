"""Decoding on Hopper in one kernel: the programs of a cluster share a row and head, and merge what each has found.

Where a cache is short, a second launch takes longer than reading it. A cluster of thread blocks needs none: its
programs read each other's shared memory. They take the blocks of the row in turns. Then all meet, and each merges a
few query rows over all parts, in the order of the parts. They meet once more: none goes before the others have read.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from pallas_kernels.gpu.hopper.attention_decode_config import LANES, PADDING, TILE, DecodeCall, DecodeOperands
from pallas_kernels.gpu.hopper.attention_decode_merge import merge_rows, row_layout, unpacked
from pallas_kernels.gpu.hopper.attention_decode_part import ROW, Copies, Rows, Scratch, attend, inputs, scratch_of
from pallas_kernels.gpu.hopper.attention_decode_work import ClusterWork, Place
from pallas_kernels.launch import cdiv

CLUSTER_AXIS: Any = 0
LOADS = 32  # rows of parts that a warpgroup reads at once


def decode_by_clusters(call: DecodeCall, operands: DecodeOperands) -> tuple[Array, ...]:
    """`attention_decode.decode` of a call whose settings ask for clusters."""
    shape, size = call.shape, call.config.cluster
    given, dtype, rows = inputs(call, operands), operands.query.dtype, shape.tiles * TILE
    numbers = jax.ShapeDtypeStruct((shape.B * shape.K, rows), jnp.float32)
    results = plgpu.kernel(
        functools.partial(_kernel, call, tuple(given)),
        out_type=(
            jax.ShapeDtypeStruct(operands.query.shape, jnp.float32 if call.statistics else dtype),
            *[numbers] * (2 if call.statistics else 1),
        ),
        scratch_types=[
            *scratch_of(call, dtype, plgpu.SMEM((rows, shape.H + PADDING), jnp.float32)),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.SMEM((rows,), jnp.float32),
        ],
        grid=(shape.B * shape.K,),
        grid_names=("pair",),
        cluster=(size,),
        cluster_names=("rank",),
        num_threads=shape.tiles,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*given.values())
    return unpacked(call, results)


class _Peers(NamedTuple):
    """Parts in the shared memory of a cluster's programs: m, l [rows] and u [rows, H] of each."""

    m: Any
    l: Any
    u: Any
    end: int
    first: int = 0

    def statistics(self, part: Any, row: Array) -> tuple[Array, Array]:
        peek = _peek(part, (), plgpu.Layout.WG_SPLAT())
        return peek(self.m.at[row]), peek(self.l.at[row])

    def sums(self, part: Any, row: Array, size: int) -> Array:
        return _peek(part, (size,), row_layout(size))(self.u.at[row, pl.ds(0, size)])


def _peek(part: int, shape: tuple[int, ...], layout: Any) -> Any:
    """A function that reads what a reference to shared memory holds in another program of the cluster."""
    number = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=number)
    def peek(_: Any, ref: Any) -> Any:
        there = mgpu.get_cluster_ref(ref, CLUSTER_AXIS, mgpu.c(part, ir.IndexType.get()), generic=False)
        if not shape:
            return FragmentedArray.splat(memref.load(there, []), shape)
        return FragmentedArray.load_strided(there, vec_size=shape[0] // LANES)

    return peek


def _kernel(call: DecodeCall, names: tuple[str, ...], *refs: Any) -> None:
    """Output, and lse or else m and l, of every pair."""
    count = len(Scratch._fields) + 2
    given, outputs = dict(zip(names, refs, strict=False)), refs[len(names) : -count]
    scratch, (m_parts, l_parts) = Scratch(*refs[-count:-2]), refs[-2:]
    pair, rank, group = lax.axis_index("pair"), lax.axis_index("rank"), lax.axis_index("group")
    work = ClusterWork(call, given["length"], given.get("real"))
    start = work.start(pair, rank)
    copies = Copies(call, given, scratch, work, group, work.share_of(start))
    ahead = copies.first(start)
    copies.query(start, None, jnp.int32(0))
    ahead = copies.rest(ahead, 1)
    rows = Rows(call, given, work, start, group)
    plgpu.barrier_wait(scratch.query_ready)
    m, l, u, _ = attend(rows, scratch, copies, jnp.int32(0), copies.blocks, ahead)
    copies.release_query()

    _, sums = scratch.query_or_results
    mine = pl.ds(pl.multiple_of(group * TILE, TILE), TILE)
    keep = _keeper(call.shape.rows)
    keep(m_parts.at[mine], l_parts.at[mine], sums.at[mine, pl.ds(0, call.shape.H)], m, l, u)
    meet_cluster()
    _merge(call, _Peers(m_parts, l_parts, sums, call.config.cluster), given, outputs, start, group)
    leave_cluster()


def _merge(call: DecodeCall, parts: _Peers, given: dict[str, Any], outputs: Any, start: Place, group: Array) -> None:
    """Write what the rows of a pair come to; the warpgroups of a cluster take them in turns."""
    shape, size = call.shape, call.config.cluster
    rows, workers, me = shape.T * shape.G, size * shape.tiles, start.block * shape.tiles + group
    together = min(max(1, LOADS // size), cdiv(rows, workers))

    def some(turn: Array, _: None) -> None:
        first = turn * (together * workers) + me

        @pl.when(first < rows)
        def _write() -> None:
            # Past the last row it is that one again: a number that is read is also stored, by which it has come.
            index = [jnp.minimum(first + i * workers, rows - 1) for i in range(together)]
            merge_rows(call, parts, given, outputs, (start.b, start.k), index, size)

    lax.fori_loop(jnp.int32(0), jnp.int32(cdiv(rows, together * workers)), some, None)


def _keeper(rows: int) -> Any:
    """A function that stores arrays in shared memory, whose rows may lie apart; jax's own stores do not take those.

    Each warp has sixteen rows. One whose rows lie past the number that there are has nothing to store.
    """

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 3, ROW, ROW, plgpu.Layout.WGMMA))
    def keep(_: Any, *refs_and_arrays: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        first = arith.muli(mgpu.warp_idx(), mgpu.c(16, i32))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, first, mgpu.c(rows, i32))):
            for ref, array in zip(refs_and_arrays[:3], refs_and_arrays[3:], strict=True):
                array.store_untiled(ref, optimized=False)

    return keep


@plgpu.inline_mgpu()
def meet_cluster(_: Any) -> None:
    """Wait for all threads of the cluster; each may then read what any has stored in its shared memory."""
    _meet()


@plgpu.inline_mgpu()
def leave_cluster(_: Any) -> None:
    """Wait until all threads of the cluster have read what they need.

    Arriving has to be a release here too: a relaxed one does not wait for reads that are under way. A read that comes
    to a program that has gone ends the launch with an error.
    """
    _meet()


def _meet() -> None:
    mgpu.inline_ptx(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
        has_side_effects=True,
        convergent=True,
    )
