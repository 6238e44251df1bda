"""The stream of weights through a program of the decoder step on Hopper: two warpgroups copy, two multiply.

Weights are the 64-row side of the matrix unit's products and the tokens its narrow side, so that eight tokens cost no
more than one.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper import decode_block_attention as attention
from pallas_kernels.gpu.hopper import decode_block_grid as grid
from pallas_kernels.gpu.hopper.attention_decode_work import div, rem
from pallas_kernels.gpu.hopper.attention_tile import MATRIX
from pallas_kernels.gpu.hopper.decode_block_config import BEFORE, COLUMNS, ROWS_MULTIPLE
from pallas_kernels.gpu.hopper.decode_block_letters import send
from pallas_kernels.gpu.hopper.decode_block_program import Program, Run
from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS, GROUPS

TILE = BLOCK_OUTPUTS // GROUPS  # outputs of one warpgroup's matrix product


# Copying.


def copy_weights(p: Program) -> None:
    """Copy the blocks of all products, and the keys of those of the cache, as soon as there is free memory.

    Not all that there is: what is asked for waits in a queue, and with it whatever other programs wait for. To send
    blocks to the L2 cache still earlier made a call slower.
    """

    def copy(run: Run) -> None:
        name = p.plan.phases[run.number]
        if name == "merge":
            return

        @pl.loop(run.done, run.done + run.units)
        def _unit(index: Array) -> None:
            p.wait_until_free(index)
            arrived = index - p.plan.config.in_flight
            stage = rem(jnp.maximum(arrived, 0), p.plan.config.stages)
            pl.when(arrived >= 0)(lambda: plgpu.barrier_wait(p.scratch.weights_ready.at[stage]))
            if name == "attend":
                attention.copy_keys(p, run, index)
            else:
                _copy_block(p, run, index)

    p.each(copy)


def _copy_block(p: Program, run: Run, index: Array) -> None:
    """Copy the weights of a unit, which is counted through the runs of all phases."""
    split, stage = p.split(run.number), rem(index, p.plan.config.stages)
    unit = run.begin + index - run.done
    tile = div(unit, split.blocks)
    inputs = pl.multiple_of((unit - tile * split.blocks) * split.block_inputs, split.block_inputs)
    outputs = pl.multiple_of(tile * BLOCK_OUTPUTS, BLOCK_OUTPUTS)

    def copy(matrix: Any) -> None:
        source = matrix.at[pl.ds(inputs, split.block_inputs), pl.ds(outputs, BLOCK_OUTPUTS)]
        plgpu.copy_gmem_to_smem(source, p.scratch.weights.at[stage], p.scratch.weights_ready.at[stage])

    p.of_layer(run.layer, p.ops.weights[run.number], copy)


def copy_rows(p: Program) -> None:
    """Copy what the blocks are multiplied with, once it is there; with those of the cache, values and queries."""

    def copy(run: Run) -> None:
        name, end = p.plan.phases[run.number], run.done + run.units
        if name == "merge":
            return
        if name == "attend":
            attention.copy_values_and_queries(p, run)
            return

        def one(index: Array, there: Array) -> Array:
            if not p.plan.is_given(run.number):
                there = lax.cond(index < there, lambda: there, lambda: index + _look(p, run, index, end - index))
            p.wait_until_free(index)
            _copy_some_rows(p, run, index)
            return there

        lax.fori_loop(run.done, end, one, run.done)

    p.each(copy)


def _look(p: Program, run: Run, index: Array, most: Array) -> Array:
    """Wait for the rows of a unit; for how many of at most so many from there on they have come."""
    split, before = p.split(run.number), BEFORE[p.plan.phases[run.number]]
    columns, times = attention.rows_of_a_word(p) if before == "merge" else (COLUMNS, p.plan.row_groups)
    block = rem(run.begin + index - run.done, split.blocks)
    return grid.look(p.words(before), split, block, most, columns, run.turns_before * times)


def _copy_some_rows(p: Program, run: Run, index: Array) -> None:
    split, stage = p.split(run.number), rem(index, p.plan.config.stages)
    unit, size = run.begin + index - run.done, split.block_inputs
    inputs = pl.multiple_of(rem(unit, split.blocks) * size, size)
    source = p.ops.x if p.plan.is_given(run.number) else p.out.rows[BEFORE[p.plan.phases[run.number]]]
    for first in range(0, p.plan.padded, ROWS_MULTIPLE):
        # Past the last row the copy fills in zeros; jax refuses that of a start that it knows.
        rows = pl.ds(p.program * 0 + first, ROWS_MULTIPLE)
        target = p.scratch.rows.at[stage, pl.ds(first, ROWS_MULTIPLE)]
        plgpu.copy_gmem_to_smem(source.at[rows, pl.ds(inputs, size)], target, p.scratch.rows_ready.at[stage])


# Multiplying.


def multiply(p: Program, run: Run, finish: Callable[[Array], None]) -> None:
    """Sum up the units of a product's run, tile by tile, then `finish` the tasks that are this warpgroup's."""
    if p.copies:
        lax.while_loop(lambda done: done < run.units, lambda done: _tile(p, run, done), jnp.int32(0))
    begin, count = p.owned(run.number) if p.finishes else (0, 0)

    @pl.loop(begin, begin + count)
    def _task(task: Array) -> None:
        pl.when(rem(task, GROUPS) == p.group)(lambda: finish(task))


def _tile(p: Program, run: Run, done: Array) -> Array:
    """Sum up the units of one tile, from unit `done` of the run on; returns how many are done."""
    name, split, stages = p.plan.phases[run.number], p.split(run.number), p.plan.config.stages
    tile = div(run.begin + done, split.blocks)
    units = jnp.minimum((tile + 1) * split.blocks - run.begin, run.units) - done
    mine = pl.ds(pl.multiple_of(p.group * TILE, TILE), TILE)
    index = run.done + done

    def add_up(acc: Any) -> Array:
        @pl.loop(0, units)
        def _unit(i: Array) -> None:
            stage = rem(index + i, stages)
            plgpu.barrier_wait(p.scratch.weights_ready.at[stage])
            plgpu.barrier_wait(p.scratch.rows_ready.at[stage])
            weights, rows = p.scratch.weights.at[stage, :, mine], p.scratch.rows.at[stage]
            plgpu.wgmma(acc, weights.transpose((1, 0)), rows.transpose((1, 0)))
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: p.release(index + i - 1))

        return acc[...]

    total = pl.run_scoped(add_up, plgpu.ACC((TILE, p.plan.padded), jnp.float32))
    p.release(index + units - 1)
    send(p.ops.letters, p.letters.parts[name], (run.rank + tile, 0, mine.start), (2, 1), total, MATRIX, run.letters)
    return done + units
