"""The stream of weights through a program of the decoder step on Hopper: two warpgroups copy, two multiply.

Weights are the 64-row side of the matrix unit's products and the tokens its narrow side, so that eight tokens cost no
more than one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper import decode_block_grid as grid
from pallas_kernels.gpu.hopper.attention_decode_work import div, rem
from pallas_kernels.gpu.hopper.decode_block_config import PRODUCTS, ROWS_MULTIPLE, BlockOperands, BlockPlan
from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS, Split
from pallas_kernels.gpu.memory import store

TILE = BLOCK_OUTPUTS // grid.GROUPS  # outputs of one warpgroup's matrix product


class Buffers(NamedTuple):
    """What a call writes.

    Args:
      parts: of each product, float32 [places, padded rows, BLOCK_OUTPUTS].
      rows: what the products behind the first multiply, [padded rows, inputs].
      squares: behind `out` and `down`, float32 sums of squares [padded rows, tiles of 128, rounded up to 32].
      residual: [row_groups * 4, hidden].
      query: [rows, N, H].
    """

    parts: tuple[Any, ...]
    rows: tuple[Any, ...]
    squares: tuple[Any, ...]
    residual: Any = None
    query: Any = None


class Scratch(NamedTuple):
    """What a program keeps in shared memory."""

    weights: Any  # [stages, block_inputs, BLOCK_OUTPUTS]
    rows: Any  # [stages, padded rows, block_inputs]
    weights_ready: Any  # barriers
    rows_ready: Any
    free: Any


class Run(NamedTuple):
    """A program's run of the units of a product: the first, how many, and how many of other products come before."""

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
      only: the one product that it does; None for all of them.
    """

    def __init__(self, plan: BlockPlan, ops: BlockOperands, out: Buffers, scratch: Scratch, only: int | None) -> None:
        self.plan, self.ops, self.out, self.scratch = plan, ops, out, scratch
        self.program, self.group = lax.axis_index("program"), lax.axis_index("group")
        self.splits = plan.splits
        self.runs: dict[int, Run] = {}
        done, programs = jnp.int32(0), plan.config.programs
        for number, split in enumerate(self.splits):
            if only in (None, number):
                rank = rem(self.program + (programs - plan.rotation(number)), programs)
                begin, units = _share(split, rank)
                self.runs[number] = Run(begin, units, done, rank)
                done = done + units
        self.units = done

    def words(self, number: int) -> Any:
        """Those of a product's sets of tiles, wherever a call begins."""
        return self.ops.counts.at[PRODUCTS.index(self.plan.products[number])]


# Copying.


def copy_weights(p: Program) -> None:
    """Copy the blocks of all products as soon as there is free memory.

    To send them to the L2 cache still earlier made a call slower.
    """
    stages = p.plan.config.stages
    first = jnp.minimum(p.units, stages)

    def copy(index: Array) -> None:
        for number, run in p.runs.items():
            inside = (index >= run.done) & (index < run.done + run.units)
            pl.when(inside)(functools.partial(_copy_block, p, number, index))

    pl.loop(0, first)(copy)

    @pl.loop(first, p.units)
    def _refill(index: Array) -> None:
        plgpu.barrier_wait(p.scratch.free.at[rem(index, stages)])
        copy(index)


def _copy_block(p: Program, number: int, index: Array) -> None:
    """Copy the weights of a unit, which is counted through the runs of all products."""
    split, run, stage = p.splits[number], p.runs[number], rem(index, p.plan.config.stages)
    unit = run.begin + index - run.done
    tile = div(unit, split.blocks)
    inputs = pl.multiple_of((unit - tile * split.blocks) * split.block_inputs, split.block_inputs)
    outputs = pl.multiple_of(tile * BLOCK_OUTPUTS, BLOCK_OUTPUTS)
    source = p.ops.weights[number].at[pl.ds(inputs, split.block_inputs), pl.ds(outputs, BLOCK_OUTPUTS)]
    plgpu.copy_gmem_to_smem(source, p.scratch.weights.at[stage], p.scratch.weights_ready.at[stage])


def copy_rows(p: Program) -> None:
    """Copy what the blocks are multiplied with, once it is there."""
    stages = p.plan.config.stages
    for number, run in p.runs.items():
        end = run.done + run.units

        def one(index: Array, there: Array, number: int = number, end: Array = end) -> Array:
            if number:
                there = lax.cond(index < there, lambda: there, lambda: index + _look(p, number, index, end - index))
            pl.when(index >= stages)(lambda: plgpu.barrier_wait(p.scratch.free.at[rem(index, stages)]))
            _copy_some_rows(p, number, index)
            return there

        lax.fori_loop(run.done, end, one, run.done)


def _look(p: Program, number: int, index: Array, most: Array) -> Array:
    """Wait for the rows of a unit; for how many of at most so many from there on they have come."""
    split, run = p.splits[number], p.runs[number]
    return grid.look(p.words(number - 1), split, rem(run.begin + index - run.done, split.blocks), most)


def _copy_some_rows(p: Program, number: int, index: Array) -> None:
    split, run, stage = p.splits[number], p.runs[number], rem(index, p.plan.config.stages)
    unit, size = run.begin + index - run.done, split.block_inputs
    inputs = pl.multiple_of(rem(unit, split.blocks) * size, size)
    source = p.ops.x if number == 0 else p.out.rows[number - 1]
    for first in range(0, p.plan.padded, ROWS_MULTIPLE):
        # Past the last row the copy fills in zeros; jax refuses that of a start that it knows.
        rows = pl.ds(p.program * 0 + first, ROWS_MULTIPLE)
        target = p.scratch.rows.at[stage, pl.ds(first, ROWS_MULTIPLE)]
        plgpu.copy_gmem_to_smem(source.at[rows, pl.ds(inputs, size)], target, p.scratch.rows_ready.at[stage])


# Multiplying.


def multiply(p: Program, number: int, finish: Callable[[Array], None]) -> None:
    """Sum up the units of a product's run, tile by tile, and `finish` the sets of tiles that this completes."""
    run = p.runs[number]
    lax.while_loop(lambda done: done < run.units, lambda done: _tile(p, number, finish, done), jnp.int32(0))


def _tile(p: Program, number: int, finish: Callable[[Array], None], done: Array) -> Array:
    """Sum up the units of one tile, from unit `done` of the run on; returns how many are done."""
    split, run, stages = p.splits[number], p.runs[number], p.plan.config.stages
    tile = div(run.begin + done, split.blocks)
    units = jnp.minimum((tile + 1) * split.blocks - run.begin, run.units) - done
    mine = pl.ds(pl.multiple_of(p.group * TILE, TILE), TILE)
    index = run.done + done

    def release(index: Array) -> None:
        plgpu.barrier_arrive(p.scratch.free.at[rem(index, stages)])

    def add_up(acc: Any) -> Array:
        @pl.loop(0, units)
        def _unit(i: Array) -> None:
            stage = rem(index + i, stages)
            plgpu.barrier_wait(p.scratch.weights_ready.at[stage])
            plgpu.barrier_wait(p.scratch.rows_ready.at[stage])
            weights, rows = p.scratch.weights.at[stage, :, mine], p.scratch.rows.at[stage]
            plgpu.wgmma(acc, weights.transpose((1, 0)), rows.transpose((1, 0)))
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: release(index + i - 1))

        return acc[...]

    total = pl.run_scoped(add_up, plgpu.ACC((TILE, p.plan.padded), jnp.float32))
    release(index + units - 1)
    target = p.out.parts[number].at[run.rank + tile, :, mine].transpose((1, 0))
    store(target, plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED))
    tiles = split.set_of(tile, div)
    last = grid.arrive(p.words(number).at[tiles], split.parts_of(tiles, div))
    pl.when(last > 0)(lambda: finish(tiles))
    return done + units


def _share(split: Split, rank: Array) -> tuple[Array, Array]:
    """The first unit of a program, and how many it has."""
    least, more = split.share
    return rank * least + jnp.minimum(rank, more), least + (rank < more).astype(jnp.int32)
