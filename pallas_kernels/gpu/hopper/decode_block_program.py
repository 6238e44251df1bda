"""One program of the fused decoder step on Hopper: what it reads, writes and keeps, and its run of every phase."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_decode_work import rem
from pallas_kernels.gpu.hopper.decode_block_config import PHASES, BlockOperands, BlockPlan
from pallas_kernels.gpu.hopper.decode_block_line import Line, merge_tasks
from pallas_kernels.gpu.hopper.decode_block_split import Split, share_of


class Buffers(NamedTuple):
    """What a call writes, by the names of phases where each has its own.

    Args:
      parts: of a product, float32 [places, padded rows, BLOCK_OUTPUTS]; of `attend`, outputs of parts float32 [places,
        packed queries in fours, H].
      normalisers: of the parts of `attend`, in base 2: float32 [places, QUERY_TILE].
      rows: what the next product multiplies, [padded rows, inputs].
      squares: behind `out` and `down`, float32 sums of squares [padded rows, tiles of 128, rounded up to 32].
      residual: [row_groups * 4, hidden].
      query: as `BlockPlan.query`.
    """

    parts: dict[str, Any]
    rows: dict[str, Any]
    squares: dict[str, Any]
    normalisers: Any = None
    residual: Any = None
    query: Any = None


class Scratch(NamedTuple):
    """What a program keeps in shared memory; what only attention needs may be None."""

    weights: Any  # [stages, block_inputs, BLOCK_OUTPUTS]
    keys: Any  # in the same memory, keys and values [stages, 2, keys, H]
    rows: Any  # [stages, padded rows, block_inputs]
    query: Any  # [QUERY_TILE, H]
    weights_ready: Any  # barriers
    rows_ready: Any
    free: Any
    query_ready: Any
    query_free: Any


class Run(NamedTuple):
    """A program's run of the units of a phase: the first, how many, and how many blocks were copied before."""

    begin: Array
    units: Array
    done: Array
    rank: Array


class Program:
    """One program of a call.

    Args:
      plan: what is static.
      ops: what it reads.
      out: what it writes.
      scratch: its shared memory.
      only: the one phase that it does; None for all of them.
    """

    def __init__(self, plan: BlockPlan, ops: BlockOperands, out: Buffers, scratch: Scratch, only: int | None) -> None:
        self.plan, self.ops, self.out, self.scratch = plan, ops, out, scratch
        self.program, self.group = lax.axis_index("program"), lax.axis_index("group")
        self.line = Line(plan, ops.lengths) if "attend" in plan.phases else None
        self.only, self.runs = only, dict[int, Run]()

    def phases(self) -> Iterator[int]:
        """The phases that this program does, one after the other, each with its run in `runs` from then on.

        Every warpgroup computes these anew, when it gets there: registers would not hold those of all phases.
        """
        done, programs = jnp.int32(0), self.plan.config.programs
        self.runs.clear()
        for number, name in enumerate(self.plan.phases):
            if self.only in (None, number):
                rank = rem(self.program + (programs - self.plan.rotation(number)), programs)
                begin, units = share_of(*self._share(number), rank)
                self.runs[number] = Run(begin, units, done, rank)
                yield number
                done = done if name == "merge" else done + units

    def _share(self, number: int) -> tuple[Any, Any]:
        """Units of every program in a phase, and how many have one more."""
        name, programs = self.plan.phases[number], self.plan.config.programs
        if name == "attend":
            assert self.line is not None
            return self.line.share
        return divmod(merge_tasks(self.plan), programs) if name == "merge" else self.split(number).share

    def split(self, number: int) -> Split:
        """How the product of a phase is shared out."""
        split = self.plan.splits[number]
        assert split is not None
        return split

    def words(self, number: int) -> Any:
        """Those of a phase's sets, wherever a call begins."""
        return self.ops.counts.at[PHASES.index(self.plan.phases[number])]

    def wait_until_free(self, index: Array) -> None:
        """Wait for the memory of a block, which is counted through the runs of all phases."""
        stages = self.plan.config.stages
        pl.when(index >= stages)(lambda: plgpu.barrier_wait(self.scratch.free.at[rem(index, stages)]))

    def release(self, index: Array) -> None:
        """Say that this warpgroup has used a block."""
        plgpu.barrier_arrive(self.scratch.free.at[rem(index, self.plan.config.stages)])
