"""The small work of the decoder step on Hopper: what is done with a set of tiles before it can be multiplied on.

One computing warpgroup does it, for all rows, of which each warp holds every fourth. It begins with the sums of the
tiles' parts.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.gpu.hopper import decode_block_grid as grid
from pallas_kernels.gpu.hopper.attention_decode_work import div
from pallas_kernels.gpu.hopper.decode_block_config import COLUMNS, COUNTS, PRODUCTS, TOGETHER
from pallas_kernels.gpu.hopper.decode_block_stream import Program
from pallas_kernels.gpu.memory import store

WARP = 32
HELD = 1536  # numbers of heads that the registers have room for, with all that they are made from


def rows_layout(columns: int) -> Any:
    """Rows, every fourth in one warp."""
    return plgpu.Layout.TILED(plgpu.Tiling(((TOGETHER, columns), (columns // WARP,))), (-3,), (-2,), -1)


ROWS = rows_layout(COLUMNS)
SUMS = rows_layout(WARP)


def finish(p: Program, number: int, tiles: Array) -> None:
    """The small work of a set of tiles, all of whose parts are stored; and say that it is done."""
    {"gate_up": _activate, "qkv": _heads}.get(p.plan.products[number], _add)(p, number, tiles)
    pl.when(tiles == 0)(lambda: _reset(p, number))
    if number + 1 < len(p.plan.products):
        grid.tell(p.words(number).at[tiles])


def _reset(p: Program, number: int) -> None:
    """Set words to 0 that nobody looks at any more, or not yet."""
    place = PRODUCTS.index(p.plan.products[number])
    layout = plgpu.Layout.WG_STRIDED(COUNTS[1:], vec_size=COUNTS[1] // grid.THREADS)
    for other in (2, 3) if place == 0 else (place - 2,) if number > 1 else ():
        store(p.ops.counts.at[other], plgpu.layout_cast(jnp.zeros(COUNTS[1:], jnp.int32), layout))


def _add(p: Program, number: int, tile: Array) -> None:
    """residual + product; that times the scale of the norm that follows; and the sum of its squares."""
    rows, earlier, is_last = _rows(p), p.plan.added(number), number + 1 == len(p.plan.products)
    columns = pl.ds(pl.multiple_of(tile * COLUMNS, COLUMNS), COLUMNS)
    residual = p.out.residual if earlier else p.ops.residual
    before = _read(residual.at[rows, columns], ROWS)
    # What is read is read before anything is written, so that all of it is under way together.
    scale = None if is_last else _read(p.ops.scales[earlier].at[columns], ROWS.reduce(0)).astype(jnp.float32)
    product = _total(p, number, tile, lambda parts: _read(parts.at[rows], ROWS))
    new = (before.astype(jnp.float32) + product).astype(before.dtype)
    store(p.out.residual.at[rows, columns], new)
    if scale is None:
        return
    if p.plan.unit_offset:
        scale = scale + 1.0
    wide = new.astype(jnp.float32)
    scaled = wide * _spread(scale, wide.shape, 1, ROWS)
    store(p.out.rows[number].at[rows, columns], scaled.astype(before.dtype))
    store(p.out.squares[earlier].at[rows, tile], jnp.sum(wide * wide, axis=1))


def _activate(p: Program, number: int, tile: Array) -> None:
    """activation(gate) * up."""
    rows, columns = _rows(p), pl.ds(pl.multiple_of(tile * COLUMNS, COLUMNS), COLUMNS)
    tiles = p.splits[number].tiles_of(tile)
    gate, up = (_total(p, number, at, lambda parts: _read(parts.at[rows], ROWS)) for at in tiles)
    factor = _factor(p, number, rows)
    if factor is not None:
        wide = _spread(factor, gate.shape, 0, ROWS)
        gate, up = gate * wide, up * wide
    target = p.out.rows[number]
    store(target.at[rows, columns], (p.plan.activation(gate) * up).astype(target.dtype))


def _heads(p: Program, number: int, tiles: Array) -> None:
    """The heads of a set of tiles: two where they are narrow, and one tile or two are one otherwise."""
    H, end = p.plan.shape.heads.H, p.plan.row_groups * TOGETHER
    together = HELD // H // TOGETHER * TOGETHER
    for first in range(0, end, together):
        for index in range(max(1, COLUMNS // H)):
            _head(p, number, tiles, index, pl.ds(first, min(together, end - first)))


def _head(p: Program, number: int, tiles: Array, index: int, rows: Any) -> None:
    """A head: bias, norm, rotation, and where it goes. Its two halves are what is turned."""
    plan, places, (_, G, H) = p.plan, p.ops.places, p.plan.shape.heads
    head = tiles * max(1, COLUMNS // H) + index
    k = div(head, G + 2)
    i = head - k * (G + 2)
    half, dtype = H // 2, p.out.query.dtype
    layout, shape = rows_layout(half), (rows.size, half)
    halves = [pl.ds(0, half), pl.ds(half, half)]

    def product(start: int) -> Array:
        within = pl.ds(start % COLUMNS, half)
        tile = p.splits[number].tiles_of(tiles)[start // COLUMNS]
        return _total(p, number, tile, lambda parts: _read(parts.at[rows, within], layout))

    def vectors(ref: Any, start: Any = 0) -> list[Array]:
        some = [pl.ds(start + offset, half) for offset in (0, half)]
        read = [_read(ref.at[each], layout.reduce(0)).astype(jnp.float32) for each in some]
        return [_spread(each, shape, 1, layout) for each in read]

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(jnp.float32)

    x = [product(index * H + offset) for offset in (0, half)]
    factor = _factor(p, number, rows)
    bias = vectors(p.ops.bias, pl.multiple_of(head * H, half)) if plan.biased else None
    scales = [vectors(ref) for ref in p.ops.head_scales]
    row = plgpu.broadcasted_iota(jnp.int32, (rows.size,), 0, layout=layout.reduce(1)) + rows.start
    lead, slot, cos, sin = jnp.full_like(row, -1), jnp.full_like(row, -1), jnp.zeros(shape), jnp.zeros(shape)
    # One by one, as there may be fewer than a layout has.
    for one in range(rows.start, min(rows.start + rows.size, plan.shape.rows)):
        lead, slot = (
            jnp.where(row == one, jnp.broadcast_to(ref[one], row.shape), x)
            for ref, x in ((places.lead, lead), (places.slot, slot))
        )
        here = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) == one - rows.start
        cos, sin = (
            jnp.where(here, _spread(_read(ref.at[one], layout.reduce(0)), shape, 1, layout), x)
            for ref, x in ((places.cos, cos), (places.sin, sin))
        )
    if factor is not None:
        x = [_spread(factor, shape, 0, layout) * part for part in x]
    if bias is not None:
        x = [rounded(part) + by for part, by in zip(x, bias, strict=True)]

    @pl.when(i == G + 1)
    def _value() -> None:
        for part, where in zip(x, halves, strict=True):
            _scatter(p.ops.value.at[:, :, k, where], part.astype(p.ops.value.dtype), lead, slot)

    @pl.when(i <= G)
    def _turn() -> None:
        parts = [rounded(part) for part in x]
        if plan.head_norms:
            squares = jnp.sum(parts[0] * parts[0] + parts[1] * parts[1], axis=1)
            by = _spread(lax.rsqrt(squares * (1 / H) + plan.eps), shape, 0, layout)
            is_key = jnp.broadcast_to(i == G, shape)
            for at in range(2):
                scale = jnp.where(is_key, scales[1][at], scales[0][at])
                if plan.unit_offset:
                    parts[at] = rounded(parts[at] * by * (1.0 + scale))
                else:
                    parts[at] = rounded(rounded(parts[at] * by) * scale)
        turned = [parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin]

        @pl.when(i < G)
        def _query() -> None:
            for part, where in zip(turned, halves, strict=True):
                _scatter(p.out.query.at[:, k * G + i, where], part.astype(dtype), row)

        @pl.when(i == G)
        def _key() -> None:
            for part, where in zip(turned, halves, strict=True):
                _scatter(p.ops.key.at[:, :, k, where], part.astype(p.ops.key.dtype), lead, slot)


def _scatter(ref: Any, x: Array, *index: Array) -> None:
    """Write the rows of x, each where the indices say; nowhere, where that is not within the reference."""
    layout = rows_layout(x.shape[1])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[layout.reduce(1)] * len(index)))
    def scatter(_: Any, ref: Any, x: Any, *index: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(mgpu.thread_idx(), mgpu.c(WARP, i32))
        column = _index(arith.muli(lane, mgpu.c(x.shape[1] // WARP, i32)))
        held = [[vector.extract(number, [], [0]) for number in each.registers.flat] for each in index]
        for mine, *numbers in zip(x.registers.flat, *held, strict=True):
            inside = mgpu.c(1, ir.IntegerType.get_signless(1))
            for number, size in zip(numbers, ir.MemRefType(ref.type).shape, strict=False):
                inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ult, number, mgpu.c(size, i32)))
            with mgpu.when(inside):
                vector.store(mine, mgpu.memref_slice(ref, tuple(map(_index, numbers))), [column])

    scatter(ref, x, *index)


def _index(number: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), number)


def _rows(p: Program) -> Any:
    """All rows, up to a whole number of groups."""
    return pl.ds(0, p.plan.row_groups * TOGETHER)


def _factor(p: Program, number: int, rows: Any) -> Array | None:
    """1 / sqrt(mean(x^2) + eps) of the norm before a product, of its rows; None where there is none."""
    earlier = p.plan.added(number)
    if not earlier:
        return None
    size, squares, total = p.splits[number].inputs, p.out.squares[earlier - 1], None
    for start in range(0, squares.shape[1], WARP):
        some = _read(squares.at[rows, pl.ds(start, WARP)], SUMS)
        if (start + WARP) * COLUMNS > size:
            at = plgpu.broadcasted_iota(jnp.int32, some.shape, 1, layout=SUMS)
            some = jnp.where(at < size // COLUMNS - start, some, 0.0)
        total = some if total is None else total + some
    assert total is not None
    return lax.rsqrt(jnp.sum(total, axis=-1) * (1 / size) + p.plan.eps)


def _total(p: Program, number: int, tile: Array, read: Callable[[Any], Array]) -> Array:
    """What is read of a tile's parts, added up."""
    split, parts = p.splits[number], p.out.parts[number]
    first, last = split.programs_of(tile, div)
    values = [read(parts.at[jnp.minimum(first + i, last) + tile]) for i in range(split.most_parts)]
    total = values[0]
    for i, value in enumerate(values[1:], 1):
        total = total + jnp.where(jnp.broadcast_to(first + i <= last, value.shape), value, 0.0)
    return total


def _read(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _spread(x: Array, shape: tuple[int, ...], axis: int, layout: Any) -> Array:
    """A vector of rows (axis 0) or columns (axis 1) over a matrix."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)
