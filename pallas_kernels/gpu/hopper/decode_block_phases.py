"""The small work of the decoder step on Hopper: what is done with a product before the next one can begin.

It is cut into tasks, four rows of 128 columns or a head of a row, which all computing warpgroups share. Each begins
with the sum of a tile's parts.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper import decode_block_grid as grid
from pallas_kernels.gpu.hopper.attention_decode_work import div
from pallas_kernels.gpu.hopper.decode_block_config import COLUMNS, TOGETHER
from pallas_kernels.gpu.hopper.decode_block_stream import Program
from pallas_kernels.gpu.memory import store

WARP = 32
ROWS = plgpu.Layout.TILED(plgpu.Tiling(((TOGETHER, COLUMNS), (COLUMNS // WARP,))), (-3,), (-2,), -1)
SUMS = plgpu.Layout.TILED(plgpu.Tiling(((TOGETHER, WARP), (1,))), (-3,), (-2,), -1)


def row_layout(size: int) -> Any:
    """A vector that each warp holds as a whole."""
    return plgpu.Layout.TILED(plgpu.Tiling(((size,), (size // WARP,))), (plgpu.Replicated(4),), (-2,), -1)


def small_work(p: Program, number: int) -> None:
    """This warpgroup's tasks behind a product."""
    plan, name, split = p.plan, p.plan.products[number], p.splits[number]
    programs = plan.config.programs
    worker, workers = p.group * programs + p.program, grid.GROUPS * programs
    tasks, work = plan.row_groups * split.tiles, _add
    if name == "qkv":
        K, G, _ = plan.shape.heads
        tasks, work = plan.shape.rows * K * (G + 2), _head
    elif name == "gate_up":
        tasks, work = plan.row_groups * (split.tiles // 2), _activate

    @pl.when(worker < tasks)
    def _begin() -> None:
        p.wait(2 * number)
        if p.meets:
            pl.when(worker == 0)(lambda: grid.reset(plan, p.ops.counts, number))

    @pl.loop(worker, tasks, step=workers)
    def _task(task: Array) -> None:
        work(p, number, task)


def _add(p: Program, number: int, task: Array) -> None:
    """residual + product; that times the scale of the norm that follows; and the sum of its squares."""
    tiles, earlier = p.splits[number].tiles, p.plan.added(number)
    group = div(task, tiles)
    tile = task - group * tiles
    rows = pl.ds(pl.multiple_of(group * TOGETHER, TOGETHER), TOGETHER)
    columns = pl.ds(pl.multiple_of(tile * COLUMNS, COLUMNS), COLUMNS)
    residual = p.out.residual if earlier else p.ops.residual
    before = _read(residual.at[rows, columns], ROWS)
    product = _total(p, number, tile, lambda parts: _read(parts.at[rows], ROWS))
    new = (before.astype(jnp.float32) + product).astype(before.dtype)
    store(p.out.residual.at[rows, columns], new)
    if number + 1 == len(p.plan.products):
        return
    scale = _read(p.ops.scales[earlier].at[columns], ROWS.reduce(0)).astype(jnp.float32)
    if p.plan.unit_offset:
        scale = scale + 1.0
    wide = new.astype(jnp.float32)
    store(p.out.rows[number].at[rows, columns], (wide * _spread(scale, wide.shape, 1)).astype(before.dtype))
    store(p.out.squares[earlier].at[rows, tile], jnp.sum(wide * wide, axis=1))


def _activate(p: Program, number: int, task: Array) -> None:
    """activation(gate) * up."""
    half = p.splits[number].tiles // 2
    group = div(task, half)
    tile = task - group * half
    rows = pl.ds(pl.multiple_of(group * TOGETHER, TOGETHER), TOGETHER)
    columns = pl.ds(pl.multiple_of(tile * COLUMNS, COLUMNS), COLUMNS)
    gate, up = (_total(p, number, at, lambda parts: _read(parts.at[rows], ROWS)) for at in (tile, tile + half))
    factor = _factor(p, number, rows, SUMS)
    if factor is not None:
        wide = _spread(factor, gate.shape, 0)
        gate, up = gate * wide, up * wide
    target = p.out.rows[number]
    store(target.at[rows, columns], (p.plan.activation(gate) * up).astype(target.dtype))


def _head(p: Program, number: int, task: Array) -> None:
    """A head of a row: bias, norm, rotation, and where it goes. Its two halves are what is turned."""
    plan, places, (K, G, H) = p.plan, p.ops.places, p.plan.shape.heads
    row = div(task, K * (G + 2))
    head = task - row * (K * (G + 2))
    k = div(head, G + 2)
    i = head - k * (G + 2)
    half, dtype = H // 2, p.out.query.dtype
    layout = row_layout(half)
    halves = [pl.ds(0, half), pl.ds(half, half)]
    starts = [pl.multiple_of(head * H + offset, half) for offset in (0, half)]

    def product(start: Array) -> Array:
        tile = div(start, COLUMNS)
        within = pl.ds(pl.multiple_of(start - tile * COLUMNS, half), half)
        return _total(p, number, tile, lambda parts: _read(parts.at[row, within], layout))

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(jnp.float32)

    x = [product(start) for start in starts]
    factor = _factor(p, number, row, row_layout(WARP))
    if factor is not None:
        x = [plgpu.layout_cast(jnp.broadcast_to(factor, (half,)), layout) * part for part in x]
    if plan.biased:
        bias = [_read(p.ops.bias.at[pl.ds(start, half)], layout).astype(jnp.float32) for start in starts]
        x = [rounded(part) + by for part, by in zip(x, bias, strict=True)]
    to_lead, to_slot = places.lead[row], places.slot[row]
    leads, slots = p.ops.key.shape[:2]
    kept = (to_lead < leads) & (to_slot < slots) & (to_lead >= 0) & (to_slot >= 0)

    @pl.when((i == G + 1) & kept)
    def _value() -> None:
        for part, where in zip(x, halves, strict=True):
            store(p.ops.value.at[to_lead, to_slot, k, where], part.astype(p.ops.value.dtype))

    @pl.when(i <= G)
    def _turn() -> None:
        parts = [rounded(part) for part in x]
        if plan.head_norms:
            factor = lax.rsqrt(jnp.sum(parts[0] * parts[0] + parts[1] * parts[1]) * (1 / H) + plan.eps)
            is_key = jnp.broadcast_to(i == G, (half,))
            for at, where in enumerate(halves):
                scales = [_read(ref.at[where], layout).astype(jnp.float32) for ref in p.ops.head_scales]
                scale = jnp.where(is_key, scales[1], scales[0])
                if plan.unit_offset:
                    parts[at] = rounded(parts[at] * factor * (1.0 + scale))
                else:
                    parts[at] = rounded(rounded(parts[at] * factor) * scale)
        cos, sin = (_read(ref.at[row], layout) for ref in (places.cos, places.sin))
        turned = [parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin]

        @pl.when(i < G)
        def _query() -> None:
            for part, where in zip(turned, halves, strict=True):
                store(p.out.query.at[row, k * G + i, where], part.astype(dtype))

        @pl.when((i == G) & kept)
        def _key() -> None:
            for part, where in zip(turned, halves, strict=True):
                store(p.ops.key.at[to_lead, to_slot, k, where], part.astype(p.ops.key.dtype))


def _factor(p: Program, number: int, rows: Any, layout: Any) -> Array | None:
    """1 / sqrt(mean(x^2) + eps) of the norm before a product, of some rows or of one; None where there is none."""
    earlier = p.plan.added(number)
    if not earlier:
        return None
    size, squares, total = p.splits[number].inputs, p.out.squares[earlier - 1], None
    for start in range(0, squares.shape[1], WARP):
        some = _read(squares.at[rows, pl.ds(start, WARP)], layout)
        if (start + WARP) * COLUMNS > size:
            at = plgpu.broadcasted_iota(jnp.int32, some.shape, some.ndim - 1, layout=layout)
            some = jnp.where(at < size // COLUMNS - start, some, 0.0)
        total = some if total is None else total + some
    assert total is not None
    return lax.rsqrt(jnp.sum(total, axis=-1) * (1 / size) + p.plan.eps)


def _total(p: Program, number: int, tile: Array, read: Callable[[Any], Array]) -> Array:
    """What is read of a tile's parts, added up."""
    split, parts = p.splits[number], p.out.parts[number]
    unit = tile * split.blocks
    first, last = (split.program_of(u, div) for u in (unit, unit + (split.blocks - 1)))
    values = [read(parts.at[jnp.minimum(first + i, last) + tile]) for i in range(split.most_parts)]
    total = values[0]
    for i, value in enumerate(values[1:], 1):
        total = total + jnp.where(jnp.broadcast_to(first + i <= last, value.shape), value, 0.0)
    return total


def _read(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _spread(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A vector of rows (axis 0) or columns (axis 1) over a matrix."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), ROWS)
