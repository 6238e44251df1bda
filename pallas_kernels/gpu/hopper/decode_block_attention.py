"""Attention within the fused decoder step on Hopper: blocks of the cache in the same stream as the weights.

The new queries of a batch row that read one key/value head are packed into a tile, query (t, g) in row t G + g. The
computing warpgroups take turns at blocks. Each folds its own into (m, l, u) by online softmax (eq. 33.3 and 33.4, in
base 2), and stores what it has of a pair as an output with its log-normaliser; the merge weighs these (eq. 33.5).

Keys and values of earlier steps are there when a call begins, and so are weights: they are copied ahead, only those of
the step itself and the queries once they have come.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper import decode_block_grid as grid
from pallas_kernels.gpu.hopper.attention_decode_work import div, rem
from pallas_kernels.gpu.hopper.attention_tile import COLUMN, LOG2E, MATRIX, ROW
from pallas_kernels.gpu.hopper.decode_block_config import QUERY_TILE, ROWS_MULTIPLE, TOGETHER
from pallas_kernels.gpu.hopper.decode_block_letters import Wanted, receive, send
from pallas_kernels.gpu.hopper.decode_block_letters_config import Box
from pallas_kernels.gpu.hopper.decode_block_line import TASK_COLUMNS, Pair, tasks_of_a_head
from pallas_kernels.gpu.hopper.decode_block_program import Program, Run
from pallas_kernels.gpu.hopper.decode_block_rows import rows_layout, scatter
from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS, GROUPS

AT_ONCE = 16  # parts that are read together, as each is small and takes as long to come as all
TASK = rows_layout(TASK_COLUMNS)


def rows_of_a_word(p: Program) -> tuple[int, int]:
    """Columns of the attended rows that one word of the merge stands for, and how many tasks a layer count there."""
    _, G, H = p.plan.shape.heads
    return G * H, math.prod(tasks_of_a_head(p.plan))


# Copying.


def copy_keys(p: Program, run: Run, index: Array) -> None:
    """Copy a block's keys; those of the step, once they are there."""
    pair, slots = _block(p, run, index)
    assert p.line is not None
    held, _ = p.line.held(pair.b)
    pl.when(slots.start + slots.size > held)(lambda: _wait_for_heads(p, run, pair.k))
    stage = rem(index, p.plan.config.stages)

    def copy(cache: Any) -> None:
        source = cache[0].at[pair.b, slots, pair.k]
        plgpu.copy_gmem_to_smem(source, p.scratch.keys.at[stage, 0], p.scratch.weights_ready.at[stage])

    p.of_layer(run.layer, p.ops.caches, copy)


def copy_values_and_queries(p: Program, run: Run) -> None:
    """Copy the values of a run's blocks, which are to these what rows are to weights, and every pair's queries.

    The warpgroup of the rows has to copy something for every block: nothing else keeps the barriers that it waits for
    from going on without it.
    """
    line = p.line
    assert line is not None
    size = line.keys // (p.plan.padded // ROWS_MULTIPLE)  # one copy for each that the barrier expects of rows

    @pl.loop(run.done, run.done + run.units)
    def _unit(index: Array) -> None:
        p.wait_until_free(index)
        pair, slots = _block(p, run, index)
        stage, unit = rem(index, p.plan.config.stages), run.begin + index - run.done

        @pl.when((unit == pair.begin) | (unit == run.begin))
        def _first() -> None:
            # With queries all keys and values of the head are there.
            _wait_for_heads(p, run, pair.k)
            plgpu.barrier_wait(p.scratch.query_free)
            target = p.scratch.query.at[pl.ds(0, p.plan.query[2])]
            plgpu.copy_gmem_to_smem(p.out.query.at[pair.b, pair.k], target, p.scratch.query_ready)

        def copy(cache: Any) -> None:
            for first in range(0, line.keys, size):
                some = pl.ds(pl.multiple_of(slots.start + first, size), size)
                target = p.scratch.keys.at[stage, 1, pl.ds(first, size)]
                plgpu.copy_gmem_to_smem(cache[1].at[pair.b, some, pair.k], target, p.scratch.rows_ready.at[stage])

        p.of_layer(run.layer, p.ops.caches, copy)


def _wait_for_heads(p: Program, run: Run, k: Array) -> None:
    """Wait for the queries, key and value of a key/value head, before anything that this warpgroup copies after it."""
    split, (_, G, H) = p.plan.split("qkv"), p.plan.shape.heads
    width = split.together * BLOCK_OUTPUTS  # columns that one word of the product stands for
    first, last = div(k * ((G + 2) * H), width), div((k + 1) * ((G + 2) * H) - 1, width)
    each = dataclasses.replace(split, inputs=split.sets * split.block_inputs)  # a word as if it were a block of inputs
    count = last - first + 1

    def more(there: Array) -> Array:
        done = (run.turn + 1) * p.plan.row_groups
        return there + grid.look(p.words("qkv"), each, first + there, count - there, split.block_inputs, done)

    lax.while_loop(lambda there: there < count, more, jnp.int32(0))


def _block(p: Program, run: Run, index: Array) -> tuple[Pair, Any]:
    """The pair and the slots of a block, which is counted through the runs of all phases."""
    line = p.line
    assert line is not None
    unit = run.begin + index - run.done
    pair = line.pair(unit)
    return pair, pl.ds(pl.multiple_of((unit - pair.begin) * line.keys, line.keys), line.keys)


# Folding.


def attend(p: Program, run: Run) -> None:
    """Fold the blocks of a run, pair by pair."""
    lax.while_loop(lambda done: done < run.units, lambda done: _part(p, run, done), jnp.int32(0))


def _part(p: Program, run: Run, done: Array) -> Array:
    """Fold a pair's blocks, from unit `done` of the run on, and store the part; returns how many units are done."""
    line = p.line
    assert line is not None
    first = run.begin + done
    pair = line.pair(first)
    units = jnp.minimum(pair.end - first, run.units - done)
    plgpu.barrier_wait(p.scratch.query_ready)
    m, l, u = _fold(p, pair, run.done + done, first - pair.begin, units)
    plgpu.barrier_arrive(p.scratch.query_free)
    part, total = line.place(run.rank, pair, p.group), jnp.where(l == 0, 1.0, l)

    @pl.when(units > p.group)
    def _send() -> None:
        (attended, normalisers), turn = _boxes(p), run.letters
        send(p.ops.letters, attended, (part, 0, 0), (1, 2), u * _across(1 / total, u.shape), MATRIX, turn)
        send(p.ops.letters, normalisers, (part, 0), (1,), m + jnp.log2(total), ROW, turn)

    return done + units


def _fold(p: Program, pair: Pair, index: Array, block: Array, units: Array) -> tuple[Array, Array, Array]:
    """m, l [QUERY_TILE] and u [QUERY_TILE, H] over this warpgroup's blocks, every second one of some."""
    line, form, (_, G, H) = p.line, p.plan.attention, p.plan.shape.heads
    assert line is not None
    assert form is not None
    held, length = line.held(pair.b)
    first = p.group

    def skip(i: Array) -> None:
        """Leave a block to the other warpgroup; it has to have come before this one can say so."""
        stage = rem(index + i, p.plan.config.stages)
        plgpu.barrier_wait(p.scratch.weights_ready.at[stage])
        plgpu.barrier_wait(p.scratch.rows_ready.at[stage])
        p.release(index + i)

    def step(turn: Array, carry: Any) -> Any:
        m, l, u = carry
        i = first + turn * GROUPS
        stage = rem(index + i, p.plan.config.stages)
        start = (block + i) * line.keys
        keys, values = (p.scratch.keys.at[stage, which] for which in range(2))
        plgpu.barrier_wait(p.scratch.weights_ready.at[stage])

        def product(acc: Any) -> Array:
            plgpu.wgmma(acc, p.scratch.query, keys.transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(product, plgpu.ACC((QUERY_TILE, line.keys), jnp.float32)) * (form.scale * LOG2E)
        at = plgpu.broadcasted_iota(jnp.int32, (line.keys,), 0, layout=COLUMN) + start
        token = div(plgpu.broadcasted_iota(jnp.int32, (QUERY_TILE,), 0, layout=ROW), G)
        seen = _down(at, scores.shape) <= _across(jnp.minimum(held + token, length - 1), scores.shape)
        scores = jnp.where(seen, scores, -jnp.inf)
        m, old = jnp.maximum(m, jnp.max(scores, axis=1)), m
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        weights = jnp.exp2(scores - _across(shift, scores.shape))
        decay = jnp.exp2(old - shift)
        l = l * decay + jnp.sum(weights, axis=1)
        u = u * _across(decay, u.shape)
        narrow = weights.astype(p.scratch.query.dtype)
        plgpu.barrier_wait(p.scratch.rows_ready.at[stage])
        pl.when(start + line.keys > length)(lambda: _hide(values, length - start))

        def add(acc: Any) -> Array:
            acc[...] = u
            plgpu.wgmma(acc, narrow, values)
            return acc[...]

        u = pl.run_scoped(add, plgpu.ACC((QUERY_TILE, H), jnp.float32))
        p.release(index + i)
        pl.when(i + 1 < units)(lambda: skip(i + 1))
        return m, l, u

    empty = _full(-jnp.inf, (QUERY_TILE,), ROW), _full(0.0, (QUERY_TILE,), ROW), _full(0.0, (QUERY_TILE, H), MATRIX)
    pl.when(first > 0)(lambda: skip(jnp.int32(0)))
    return lax.fori_loop(jnp.int32(0), div(units - first + 1, GROUPS), step, empty)


def _hide(values: Any, real: Array) -> None:
    """Zero the values past the first so many: a weight of 0 would not hide their NaN."""
    layout = rows_layout(values.shape[1])
    here = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout) < real
    held = plgpu.load(values, layout=layout, optimized=False)
    values[...] = jnp.where(here, held, jnp.zeros((), values.dtype))
    plgpu.commit_smem()


# Merging.


def merge(p: Program, run: Run) -> None:
    """Merge the parts of every task of a run, once they are there: the warpgroups of a program take turns."""

    @pl.loop(0, run.units)
    def _task(i: Array) -> None:
        pl.when(rem(i, GROUPS) == p.group)(lambda: _merge(p, run, run.begin + i))


def _merge(p: Program, run: Run, task: Array) -> None:
    line, (_, G, H) = p.line, p.plan.shape.heads
    assert line is not None
    k, b, group, columns = _coordinates(task, tasks_of_a_head(p.plan))
    pair, vector_layout = line.pair_of(k, b), TASK.reduce(1)
    first, last = line.programs_of(pair)
    attended, normalisers = _boxes(p)

    def some(i: Array, carry: Any) -> Any:
        highest, total, u = carry
        program = first + i * (AT_ONCE // GROUPS)
        there = line.parts_there(program, pair, AT_ONCE)
        place, size = (line.place(program, pair), group * TOGETHER, columns * TASK_COLUMNS), (TOGETHER, TASK_COLUMNS)
        wanted = (
            Wanted(attended, place, (1, 2), size, TASK, there, AT_ONCE),
            Wanted(normalisers, place[:2], (1,), size[:1], vector_layout, there, AT_ONCE),
        )
        outputs, read = receive(p.ops.letters, wanted, run.letters)
        logs = [
            jnp.where(jnp.broadcast_to((there >> part) & 1 > 0, x.shape), x, -jnp.inf) for part, x in enumerate(read)
        ]
        old = highest
        for each in logs:
            highest = jnp.maximum(highest, each)
        shift = jnp.where(highest == -jnp.inf, 0.0, highest)
        decay = jnp.exp2(old - shift)
        total, u = total * decay, u * _across(decay, u.shape, TASK)
        for each, output in zip(logs, outputs, strict=True):
            weight = jnp.exp2(each - shift)
            total, u = total + weight, u + output * _across(weight, u.shape, TASK)
        return highest, total, u

    empty = (
        _full(-jnp.inf, (TOGETHER,), vector_layout),
        _full(0.0, (TOGETHER,), vector_layout),
        _full(0.0, (TOGETHER, TASK_COLUMNS), TASK),
    )
    count = div((last - first + 1) * GROUPS + (AT_ONCE - 1), AT_ONCE)
    _, total, u = lax.fori_loop(jnp.int32(0), count, some, empty)
    output = u * _across(1 / jnp.where(total == 0, 1.0, total), u.shape, TASK)
    packed = plgpu.broadcasted_iota(jnp.int32, (TOGETHER,), 0, layout=vector_layout) + group * TOGETHER
    token = div(packed, G)
    row = jnp.where(packed < p.plan.tokens * G, b * p.plan.tokens + token, -1)  # past the last, nowhere
    column = (k * G + packed - token * G) * H + columns * TASK_COLUMNS
    target = p.out.rows["merge"]
    scatter(target, output.astype(target.dtype), row, column=column)
    grid.tell(p.words("merge").at[k])


def _boxes(p: Program) -> tuple[Box, Box]:
    """Of outputs of parts, and of their normalisers."""
    attended, normalisers = p.letters.attended, p.letters.normalisers
    assert attended is not None
    assert normalisers is not None
    return attended, normalisers


def _coordinates(index: Array, sizes: tuple[int, ...]) -> list[Array]:
    """An index into a line as one for each axis, the first of which has any size."""
    found = []
    for size in reversed(sizes):
        found.append(rem(index, size))
        index = div(index, size)
    return [index, *reversed(found)]


def _across(rows: Array, shape: tuple[int, ...], layout: Any = MATRIX) -> Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(rows, shape, (0,)), layout)


def _down(columns: Array, shape: tuple[int, ...]) -> Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(columns, shape, (1,)), MATRIX)


def _full(value: float, shape: tuple[int, ...], layout: Any) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
