"""What the programs of the decoder step on Hopper tell each other: a word in device memory for each set of tiles.

A computing warpgroup that has stored its half of a part adds one to the word of the set. Who completes the number does
the set's small work, and adds `DONE`. Who multiplies what came of it looks for that first. Words go on counting from
layer to layer: `turn` says how often a phase has come before.

Whoever has seen a word at a value may read what was written before it came to that, by anyone: an addition is a
release, an acquire as well where its result is used, and so is a look; with barriers of the warpgroup between its one
thread and the others. This carries on from word to word. A set of tiles that is complete has used the rows of every set
of the product before, for each of which somebody has looked; so whoever completes it may read whatever these sets have
left, such as sums of squares. Rows are written by stores and read by the copy engine, which a fence of its own orders.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.gpu.hopper.decode_block_split import Split

GROUPS = 2  # computing warpgroups of a program
DONE = 1 << 16  # more than there are halves of parts in all layers of a step
LOOKS = 32  # words that are looked at together, one by each lane of a warp
THREADS = 128
SCALAR = plgpu.Layout.WG_SPLAT()
SAME = "shfl.sync.idx.b32 $0, $0, 0, 0x1f, 0xffffffff;"  # it is; or else the compiler lets matrix products wait
NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def arrive(word: Any, parts: Array, turn: Array) -> Array:
    """Say that this warpgroup's half of a part is stored.

    Args:
      word: of the set.
      parts: that the set has.
      turn: how often they all have been stored, and told of, before.

    Returns:
      Whether all halves of all parts are, so that this warpgroup, and no other, may read them: 1 or 0.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=NUMBER)
    def arrive_at(_: Any, word: Any, halves: Any) -> Any:
        last = mgpu.inline_ptx(
            f"""{{
            .reg .pred first, last;
            .reg .b32 before;
            bar.sync $2, {THREADS};
            setp.eq.u32 first, $1, 0;
            setp.ne.u32 last, $1, $1;
            @!first bra TOLD;
            atom.acq_rel.gpu.global.add.u32 before, [$3], 1;
            add.u32 before, before, 1;
            setp.eq.u32 last, before, $4;
            TOLD:
            bar.red.popc.u32 $0, $2, {THREADS}, last;
            {SAME}
            }}""",
            *_me(),
            mgpu.memref_ptr(word),
            halves.registers.item(),
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
            convergent=True,
        )
        return _number(last)

    halves = parts * GROUPS
    return arrive_at(word, turn * (halves + DONE) + halves)


def tell(word: Any, amount: int = DONE) -> None:
    """Say that some work is done, that of a set by default, after everything that this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def tell_all(_: Any, word: Any) -> None:
        # What was written by stores will be read by copies, which are ordered with stores by this fence alone.
        mgpu.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
        mgpu.warpgroup_barrier()
        mgpu.SemaphoreRef(mgpu.memref_ptr(word)).signal(amount, memory_scope="gpu")

    tell_all(word)


def look(words: Any, split: Split, block: Array, most: Array, columns: int, done: Array) -> Array:
    """Wait until the rows for a block of inputs are there, before anything that this warpgroup copies after it.

    Args:
      words: of the phase that makes the rows.
      split: of the product that needs them.
      block: the first block of inputs of that product that they are needed for; others follow, around its end.
      most: how many are needed.
      columns: of the rows, that a word stands for.
      done: the least value of a word whose rows are there.

    Returns:
      For how many blocks they are there: at least 1, at most `LOOKS` and `most`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR), return_type=NUMBER)
    def look_at(_: Any, words: Any, block: Any, most: Any, done: Any) -> Any:
        thread, barrier = _me()
        i32 = thread.type
        mine = arith.addi(block.registers.item(), arith.remui(thread, mgpu.c(LOOKS, i32)))
        inputs = arith.muli(arith.remui(mine, mgpu.c(split.blocks, i32)), mgpu.c(split.block_inputs, i32))
        word = mgpu.memref_slice(words, (arith.index_cast(ir.IndexType.get(), _over(inputs, columns)),))
        # The first warp looks, the others wait at the barrier for what it has seen.
        seen = mgpu.inline_ptx(
            f"""{{
            .reg .pred looks, no;
            .reg .b32 word, number;
            mov.u32 number, 0;
            setp.lt.u32 looks, $1, {LOOKS};
            @!looks bra SEEN;
            AGAIN:
            ld.relaxed.gpu.global.u32 word, [$3];
            setp.lt.u32 no, word, $5;
            vote.sync.ballot.b32 number, no, 0xffffffff;
            brev.b32 number, number;
            clz.b32 number, number;
            setp.eq.u32 no, number, 0;
            @no bra AGAIN;
            min.u32 number, number, $4;
            fence.acquire.gpu;
            SEEN:
            setp.lt.u32 looks, $1, number;
            bar.red.popc.u32 $0, $2, {THREADS}, looks;
            {SAME}
            fence.proxy.async.global;
            }}""",
            thread,
            barrier,
            mgpu.memref_ptr(word),
            most.registers.item(),
            done.registers.item(),
            result_types=i32,
            has_side_effects=True,
            convergent=True,
        )
        return _number(seen)

    return look_at(words, block, most, done)


def wait_for(word: Any, count: Array) -> None:
    """Wait until as many halves of parts are stored, before all that this warpgroup reads then."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def wait_for_parts(_: Any, word: Any, count: Any) -> None:
        mgpu.inline_ptx(
            f"""{{
            .reg .pred looks, no;
            .reg .b32 word;
            setp.lt.u32 looks, $0, {LOOKS};
            @!looks bra SEEN;
            AGAIN:
            ld.relaxed.gpu.global.u32 word, [$2];
            setp.lt.u32 no, word, $3;
            @no bra AGAIN;
            fence.acquire.gpu;
            SEEN:
            bar.sync $1, {THREADS};
            }}""",
            *_me(),
            mgpu.memref_ptr(word),
            count.registers.item(),
            has_side_effects=True,
            convergent=True,
        )

    wait_for_parts(word, count)


def _me() -> tuple[Any, Any]:
    """This thread's number in its warpgroup, and the warpgroup's barrier."""
    thread = mgpu.thread_idx()
    return arith.remui(thread, mgpu.c(THREADS, thread.type)), mgpu.warpgroup_barrier_idx(sync=False)


def _over(x: Any, by: int) -> Any:
    return arith.divui(x, mgpu.c(by, x.type))


def _number(x: Any) -> Any:
    return FragmentedArray.splat(x, (), is_signed=True)
