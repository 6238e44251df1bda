"""The small work of the decoder step on Hopper: what is done with a set of tiles before it can be multiplied on.

A computing warpgroup does it for four rows, one in each of its warps. It begins with the sums of the tiles' parts,
which it waits for. Rows of a set are always the same warpgroup's: what it has stored of the residual is what it reads.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper import decode_block_grid as grid
from pallas_kernels.gpu.hopper.attention_decode_work import div
from pallas_kernels.gpu.hopper.decode_block_config import ADDING, BEFORE, COLUMNS, TOGETHER, WARP
from pallas_kernels.gpu.hopper.decode_block_letters import Wanted, receive, send
from pallas_kernels.gpu.hopper.decode_block_program import Program, Run
from pallas_kernels.gpu.hopper.decode_block_rows import rows_layout, scatter
from pallas_kernels.gpu.memory import store
from pallas_kernels.launch import cdiv

LETTERS = 64  # that a thread reads together
PARTS = 16  # of a sum among them
ROWS = rows_layout(COLUMNS)
SUMS = rows_layout(WARP)


def finish(p: Program, run: Run, task: Array) -> None:
    """The small work of a set of tiles for some rows, once all of its parts are there; and say that it is done."""
    name, attends = p.plan.phases[run.number], p.plan.attention is not None
    tiles = div(task, p.plan.row_groups)
    rows = pl.ds(pl.multiple_of((task - tiles * p.plan.row_groups) * TOGETHER, TOGETHER), TOGETHER)
    {"gate_up": _activate, "qkv": _heads}.get(name, _add)(p, run, tiles, rows)
    if attends or run.number + 1 < len(p.plan.phases):
        grid.tell(p.words(name).at[tiles])


def _add(p: Program, run: Run, tile: Array, rows: Any) -> None:
    """residual + product; that times the scale of the norm that follows; and the sum of its squares."""
    name = p.plan.phases[run.number]
    columns = pl.ds(pl.multiple_of(tile * COLUMNS, COLUMNS), COLUMNS)
    residual = p.out.residual if p.plan.added_before(run.number) else p.ops.residual
    # What is read is read before anything is written, so that all of it is under way together.
    before, scale = _read(residual.at[rows, columns], ROWS), None
    if name in p.ops.scales:
        scale = _read(p.ops.scales[name].at[run.turn, columns], ROWS.reduce(0)).astype(jnp.float32)
    product, _ = _sums(p, run, [(tile, 0)], rows, COLUMNS)
    new = (before.astype(jnp.float32) + product).astype(before.dtype)
    store(p.out.residual.at[rows, columns], new)
    if scale is None:
        return
    if p.plan.unit_offset:
        scale = scale + 1.0
    wide = new.astype(jnp.float32)
    scaled = wide * _spread(scale, wide.shape, 1, ROWS)
    store(p.out.rows[name].at[rows, columns], scaled.astype(before.dtype))
    # They are of the turn of the phase that asks for them.
    turn = run.letters + (1 if run.number + 1 == len(p.plan.phases) else 0)
    squares, of_rows = jnp.sum(wide * wide, axis=1), ROWS.reduce(1)
    send(p.ops.letters, p.letters.squares[name], (rows.start, tile), (0,), squares, of_rows, turn)


def _activate(p: Program, run: Run, tile: Array, rows: Any) -> None:
    """activation(gate) * up."""
    columns = pl.ds(pl.multiple_of(tile * COLUMNS, COLUMNS), COLUMNS)
    tiles = p.split(run.number).tiles_of(tile)
    gate, up, factor = _sums(p, run, [(each, 0) for each in tiles], rows, COLUMNS)
    if factor is not None:
        wide = _spread(factor, gate.shape, 0, ROWS)
        gate, up = gate * wide, up * wide
    target = p.out.rows[p.plan.phases[run.number]]
    store(target.at[rows, columns], (p.plan.activation(gate) * up).astype(target.dtype))


def _heads(p: Program, run: Run, tiles: Array, rows: Any) -> None:
    """The heads of a set of tiles: two where they are narrow, and one tile or two are one otherwise."""
    for index in range(max(1, COLUMNS // p.plan.shape.heads.H)):
        _head(p, run, tiles, index, rows)


def _head(p: Program, run: Run, tiles: Array, index: int, rows: Any) -> None:
    """A head: bias, norm, rotation, and where it goes. Its two halves are what is turned."""
    plan, places, (_, G, H) = p.plan, p.ops.places, p.plan.shape.heads
    head = tiles * max(1, COLUMNS // H) + index
    k = div(head, G + 2)
    which = head - k * (G + 2)
    half, dtype = H // 2, p.out.query.dtype
    layout, shape = rows_layout(half), (rows.size, half)
    halves = [pl.ds(0, half), pl.ds(half, half)]

    def place(start: int) -> tuple[Array, int]:
        return p.split(run.number).tiles_of(tiles)[start // COLUMNS], start % COLUMNS

    def vectors(ref: Any, start: Any = 0) -> list[Array]:
        some = [pl.ds(start + offset, half) for offset in (0, half)]
        read = [_read(ref.at[run.turn, each], layout.reduce(0)).astype(jnp.float32) for each in some]
        return [_spread(each, shape, 1, layout) for each in read]

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(jnp.float32)

    *x, factor = _sums(p, run, [place(index * H + offset) for offset in (0, half)], rows, half)
    bias = vectors(p.ops.bias, pl.multiple_of(head * H, half)) if plan.biased else None
    scales = [vectors(ref) for ref in p.ops.head_scales]
    row = plgpu.broadcasted_iota(jnp.int32, (rows.size,), 0, layout=layout.reduce(1)) + rows.start
    lead, slot, cos, sin = jnp.full_like(row, -1), jnp.full_like(row, -1), jnp.zeros(shape), jnp.zeros(shape)
    # One by one, as there may be fewer than a layout has: then the last is read again, for none.
    for i in range(min(rows.size, plan.shape.rows)):
        one = jnp.minimum(rows.start + i, plan.shape.rows - 1)
        lead, slot = (
            jnp.where(row == one, jnp.broadcast_to(ref[one], row.shape), x)
            for ref, x in ((places.lead, lead), (places.slot, slot))
        )
        here = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) == i
        cos, sin = (
            jnp.where(here, _spread(_read(ref.at[one], layout.reduce(0)), shape, 1, layout), x)
            for ref, x in ((places.cos, cos), (places.sin, sin))
        )
    if factor is not None:
        x = [_spread(factor, shape, 0, layout) * part for part in x]
    if bias is not None:
        x = [rounded(part) + by for part, by in zip(x, bias, strict=True)]

    def write(parts: list[Array], array: int) -> None:
        def scatter_parts(cache: Any) -> None:
            for part, where in zip(parts, halves, strict=True):
                scatter(cache[array].at[:, :, k, where], part.astype(dtype), lead, slot)

        p.of_layer(run.layer, p.ops.caches, scatter_parts)

    pl.when(which == G + 1)(lambda: write(x, 1))

    @pl.when(which <= G)
    def _turn() -> None:
        parts = [rounded(part) for part in x]
        if plan.head_norms:
            squares = jnp.sum(parts[0] * parts[0] + parts[1] * parts[1], axis=1)
            by = _spread(lax.rsqrt(squares * (1 / H) + plan.eps), shape, 0, layout)
            is_key = jnp.broadcast_to(which == G, shape)
            for at in range(2):
                scale = jnp.where(is_key, scales[1][at], scales[0][at])
                if plan.unit_offset:
                    parts[at] = rounded(parts[at] * by * (1.0 + scale))
                else:
                    parts[at] = rounded(rounded(parts[at] * by) * scale)
        turned = [parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin]

        @pl.when(which < G)
        def _query() -> None:
            b = plgpu.layout_cast(div(row, plan.tokens), layout.reduce(1))
            packed = (row - b * plan.tokens) * G + which
            for part, where in zip(turned, halves, strict=True):
                scatter(p.out.query.at[:, k, :, where], part.astype(dtype), b, packed)

        pl.when(which == G)(lambda: write(turned, 0))


def _sums(p: Program, run: Run, places: Sequence[tuple[Array, Any]], rows: Any, columns: int) -> list[Any]:
    """The sums of all parts of some tiles, [rows, columns] from a column on, in the order of the programs.

    Then the factor of the norm before the product, 1 / sqrt(mean(x^2) + eps) of its rows: None where there is none.
    """
    split, box = p.split(run.number), p.letters.parts[p.plan.phases[run.number]]
    layout, most, factor = rows_layout(columns), split.most_parts, None
    together = min(PARTS, LETTERS // (len(places) * columns // WARP))
    parts: list[list[Array]] = [[] for _ in places]
    for begin in range(0, most, together):
        wanted = []
        for tile, column in places:
            first, last = split.programs_of(tile, div)
            count = jnp.clip(last - first + 1 - begin, 0, together)
            place, shape = (first + tile + begin, rows.start, column), (rows.size, columns)
            wanted.append(Wanted(box, place, (1, 2), shape, layout, (1 << count) - 1, min(together, most - begin)))
        squares = _squares(p, run, rows) if begin == 0 else []
        found = receive(p.ops.letters, wanted + squares, run.letters)
        for own, more in zip(parts, found, strict=False):
            own += more
        for tiles in found[len(parts) :]:
            factor = lax.rsqrt(jnp.sum(_added(tiles), axis=-1) * (1 / split.inputs) + p.plan.eps)
    return [*map(_added, parts), factor]


def _squares(p: Program, run: Run, rows: Any) -> list[Wanted]:
    """What the factor of the norm before a product is made from."""
    before = BEFORE[p.plan.phases[run.number]]
    if before not in ADDING or not p.plan.added_before(run.number):
        return []
    box = p.letters.squares[before]
    count = cdiv(box.shape[1], WARP)
    return [Wanted(box, (rows.start, 0), (0, 1), (rows.size, WARP), SUMS, (1 << count) - 1, count, (1, WARP))]


def _added(parts: Sequence[Array]) -> Array:
    """In their order."""
    return functools.reduce(operator.add, parts)


def _read(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _spread(x: Array, shape: tuple[int, ...], axis: int, layout: Any) -> Array:
    """A vector of rows (axis 0) or columns (axis 1) over a matrix."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)
