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
from pallas_kernels.gpu.hopper.decode_block_config import ROWS_MULTIPLE
from pallas_kernels.gpu.hopper.decode_block_program import Program
from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS
from pallas_kernels.gpu.memory import store

TILE = BLOCK_OUTPUTS // grid.GROUPS  # outputs of one warpgroup's matrix product


# Copying.


def copy_weights(p: Program) -> None:
    """Copy the blocks of all products, and of the cache, as soon as there is free memory.

    To send them to the L2 cache still earlier made a call slower.
    """
    for number in p.phases():
        run = p.runs[number]
        if p.plan.phases[number] == "merge":
            continue

        @pl.loop(run.done, run.done + run.units)
        def _unit(index: Array, number: int = number) -> None:
            p.wait_until_free(index)
            if p.plan.phases[number] == "attend":
                attention.copy_keys(p, number, index)
            else:
                _copy_block(p, number, index)


def _copy_block(p: Program, number: int, index: Array) -> None:
    """Copy the weights of a unit, which is counted through the runs of all phases."""
    split, run, stage = p.split(number), p.runs[number], rem(index, p.plan.config.stages)
    unit = run.begin + index - run.done
    tile = div(unit, split.blocks)
    inputs = pl.multiple_of((unit - tile * split.blocks) * split.block_inputs, split.block_inputs)
    outputs = pl.multiple_of(tile * BLOCK_OUTPUTS, BLOCK_OUTPUTS)
    source = p.ops.weights[number].at[pl.ds(inputs, split.block_inputs), pl.ds(outputs, BLOCK_OUTPUTS)]
    plgpu.copy_gmem_to_smem(source, p.scratch.weights.at[stage], p.scratch.weights_ready.at[stage])


def copy_rows(p: Program) -> None:
    """Copy what the blocks are multiplied with, once it is there; with those of the cache, values and queries."""
    for number in p.phases():
        run = p.runs[number]
        if p.plan.phases[number] == "merge":
            continue
        if p.plan.phases[number] == "attend":
            attention.copy_values_and_queries(p, number)
            continue
        end = run.done + run.units

        def one(index: Array, there: Array, number: int = number, end: Array = end) -> Array:
            if number:
                there = lax.cond(index < there, lambda: there, lambda: index + _look(p, number, index, end - index))
            p.wait_until_free(index)
            _copy_some_rows(p, number, index)
            return there

        lax.fori_loop(run.done, end, one, run.done)


def _look(p: Program, number: int, index: Array, most: Array) -> Array:
    """Wait for the rows of a unit; for how many of at most so many from there on they have come."""
    split, run = p.split(number), p.runs[number]
    word = attention.rows_of_a_word(p) if p.plan.phases[number - 1] == "merge" else ()
    block = rem(run.begin + index - run.done, split.blocks)
    return grid.look(p.words(number - 1), split, block, most, *word)


def _copy_some_rows(p: Program, number: int, index: Array) -> None:
    split, run, stage = p.split(number), p.runs[number], rem(index, p.plan.config.stages)
    unit, size = run.begin + index - run.done, split.block_inputs
    inputs = pl.multiple_of(rem(unit, split.blocks) * size, size)
    source = p.ops.x if number == 0 else p.out.rows[p.plan.phases[number - 1]]
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
    split, run, stages = p.split(number), p.runs[number], p.plan.config.stages
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
    target = p.out.parts[p.plan.phases[number]].at[run.rank + tile, :, mine].transpose((1, 0))
    store(target, plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED))
    tiles = split.set_of(tile, div)
    last = grid.arrive(p.words(number).at[tiles], split.parts_of(tiles, div))
    pl.when(last > 0)(lambda: finish(tiles))
    return done + units
