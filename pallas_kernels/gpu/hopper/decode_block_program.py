"""One program of the fused decoder step on Hopper: what it reads, writes and keeps, and its run of every phase."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_decode_work import rem
from pallas_kernels.gpu.hopper.decode_block_config import PHASES, Begin, BlockOperands, BlockPlan
from pallas_kernels.gpu.hopper.decode_block_letters_config import letters_of
from pallas_kernels.gpu.hopper.decode_block_line import Line, merge_tasks
from pallas_kernels.gpu.hopper.decode_block_split import Split, share_of


class Buffers(NamedTuple):
    """What a call writes.

    Args:
      rows: what the product after each phase multiplies, [padded rows, inputs], by the name of the phase.
      residual: [row_groups * 4, hidden].
      query: as `BlockPlan.query`.
    """

    rows: dict[str, Any]
    residual: Any = None
    query: Any = None

    def going_on(self, begin: Begin) -> "Buffers":
        """With what one call with attention leaves for the next."""
        return self._replace(rows=self.rows | {"down": begin.rows}, residual=begin.residual)


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
    """A program's run of the units of a phase.

    Args:
      layer, number: of the phase.
      turn: how often the phase has come before.
      rank: of the program among those that share the phase.
      begin, units: the first unit, and how many.
      done: how many blocks were copied before.
    """

    layer: Array
    turn: Array
    number: int
    rank: Array
    begin: Array
    units: Array
    done: Array

    @property
    def letters(self) -> Array:
        """The turn of letters that belong to the phase."""
        return self.turn + 1

    @property
    def turns_before(self) -> Array:
        """How often the phase before has come; the first of a layer goes on from the layer before."""
        return self.turn + 1 if self.number else self.turn


class Only(NamedTuple):
    """What a launch does where it does not do everything: for interpreters, whose programs run one after the other.

    Args:
      layer, number: of the phase.
      small_work: whether it is the small work behind the phase, or all before that.
    """

    layer: int
    number: int
    small_work: bool


class Program:
    """One program of a call.

    Args:
      plan: what is static.
      ops: what it reads.
      out: what it writes.
      scratch: its shared memory.
      only: None to do everything.
    """

    def __init__(self, plan: BlockPlan, ops: BlockOperands, out: Buffers, scratch: Scratch, only: Only | None) -> None:
        self.plan, self.ops, self.out, self.scratch, self.only = plan, ops, out, scratch, only
        self.program, self.group = lax.axis_index("program"), lax.axis_index("group")
        self.line = None if plan.attention is None else Line(plan, ops.lengths)
        self.first = jnp.int32(0) if plan.attention is None else ops.first[0]
        self.letters = letters_of(plan)

    def each(self, do: Callable[[Run], None]) -> None:
        """Do this program's run of every phase of every layer, one after the other.

        Every warpgroup computes its runs when it gets there: registers would not hold those of all phases.
        """
        layers, phases = range(self.plan.layers), range(len(self.plan.phases))
        if self.only is not None:
            layers, phases = (range(at, at + 1) for at in self.only[:2])

        def one_layer(layer: Array, done: Array) -> Array:
            for number in phases:
                run = self._run(layer, number, done)
                do(run)
                done = done if self.plan.phases[number] == "merge" else done + run.units
            return done

        if len(layers) == 1:
            one_layer(jnp.int32(layers.start), jnp.int32(0))
        else:
            lax.fori_loop(jnp.int32(0), jnp.int32(len(layers)), one_layer, jnp.int32(0))

    def _run(self, layer: Array, number: int, done: Array) -> Run:
        plan, programs = self.plan, self.plan.config.programs
        ahead = rem(layer * plan.rotation(len(plan.phases)), programs)
        rank = rem(self.program + (2 * programs - plan.rotation(number)) - ahead, programs)
        return Run(layer, self.first + layer, number, rank, *share_of(*self._share(number), rank), done)

    def _share(self, number: int) -> tuple[Any, Any]:
        """Units of every program in a phase, and how many have one more."""
        name, programs = self.plan.phases[number], self.plan.config.programs
        if name == "attend":
            assert self.line is not None
            return self.line.share
        return divmod(merge_tasks(self.plan), programs) if name == "merge" else self.split(number).share

    @property
    def copies(self) -> bool:
        """Whether it does what comes before small work."""
        return self.only is None or not self.only.small_work

    @property
    def finishes(self) -> bool:
        """Whether it does small work."""
        return self.only is None or self.only.small_work

    def split(self, number: int) -> Split:
        """How the product of a phase is shared out."""
        split = self.plan.splits[number]
        assert split is not None
        return split

    def owned(self, number: int) -> tuple[Array, Array]:
        """The first of the tasks of small work behind a product that are this program's in all layers, and how many.

        A task is a set of tiles for a group of rows; those of one set follow each other.
        """
        least, more = divmod(self.split(number).sets * self.plan.row_groups, self.plan.config.programs)
        return share_of(least, more, self.program)

    def words(self, name: str) -> Any:
        """Those of a phase's sets, wherever a call begins."""
        return self.ops.counts.at[PHASES.index(name)]

    def of_layer(self, layer: Array, choices: Sequence[Any], do: Callable[[Any], None]) -> None:
        """Do something with one of as many choices as there are layers."""
        if len(choices) == 1:
            do(choices[0])
        else:
            lax.switch(layer, [functools.partial(do, choice) for choice in choices])

    def wait_until_free(self, index: Array) -> None:
        """Wait for the memory of a block, which is counted through the runs of all phases."""
        stages = self.plan.config.stages
        pl.when(index >= stages)(lambda: plgpu.barrier_wait(self.scratch.free.at[rem(index, stages)]))

    def release(self, index: Array) -> None:
        """Say that this warpgroup has used a block."""
        plgpu.barrier_arrive(self.scratch.free.at[rem(index, self.plan.config.stages)])
