"""What the programs of the decoder step on Hopper tell each other: that rows are there, by words in device memory.

Rows are read by the copy engine, which looks at no turn (`decode_block_letters`). So there is a word for the rows of a
set of tiles. Whoever has done the set's small work for four of them adds one to it, and who multiplies what came of it
looks for that first. Words go on counting from layer to layer: `turn` says how often a phase has come before.

Whoever has seen a word at a value may read what was written before it came to that: an addition is a release, and a
look an acquire, with barriers of the warpgroup between its one thread and the others. Rows are written by stores and
read by the copy engine: one fence between the two orders them, that of who looks.
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

LOOKS = 32  # words that are looked at together, one by each lane of a warp
THREADS = 128
SCALAR = plgpu.Layout.WG_SPLAT()
SAME = "shfl.sync.idx.b32 $0, $0, 0, 0x1f, 0xffffffff;"  # it is; or else the compiler lets matrix products wait
NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def tell(word: Any) -> None:
    """Add one to a word, after everything that this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def tell_all(_: Any, word: Any) -> None:
        mgpu.warpgroup_barrier()
        mgpu.SemaphoreRef(mgpu.memref_ptr(word)).signal(1, memory_scope="gpu")

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


def _me() -> tuple[Any, Any]:
    """This thread's number in its warpgroup, and the warpgroup's barrier."""
    thread = mgpu.thread_idx()
    return arith.remui(thread, mgpu.c(THREADS, thread.type)), mgpu.warpgroup_barrier_idx(sync=False)


def _over(x: Any, by: int) -> Any:
    return arith.divui(x, mgpu.c(by, x.type))


def _number(x: Any) -> Any:
    return FragmentedArray.splat(x, (), is_signed=True)
