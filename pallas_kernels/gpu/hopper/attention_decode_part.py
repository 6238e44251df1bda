"""One part of a row in Hopper decoding: the blocks that a program reads, what hides their keys, and the sums over them.

A program is one warpgroup for each 64 packed rows. The first one also starts the copies of blocks ahead of their use,
so that all threads compute and their registers suffice for large blocks.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_decode_config import NOWHERE, TILE, DecodeCall, DecodeOperands, DecodeShape
from pallas_kernels.gpu.hopper.attention_decode_work import Place, Work, div, rem
from pallas_kernels.launch import cdiv

LOG2E = math.log2(math.e)
ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def inputs(call: DecodeCall, operands: DecodeOperands) -> dict[str, Array]:
    """What a kernel reads, by name: the operands that there are, as it takes them."""
    shape, keys = call.shape, call.config.block_keys
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    given["query"] = _grouped(shape, operands.query)
    if call.is_ring:
        padding = cdiv(shape.S, keys) * keys - shape.S
        given["positions"] = jnp.pad(given["positions"], ((0, 0), (0, padding)), constant_values=NOWHERE)
    return given


def _grouped(shape: DecodeShape, query: Array) -> Array:
    """The query as [B, T, K, G, H], padded where its inner groups are neither below eight nor a multiple of it."""
    query = query.reshape(shape.B, shape.T, shape.K, shape.G, shape.H)
    axis, size = (3, shape.G) if shape.heads_inside else (1, shape.T)
    if size < 8 or size % 8 == 0:
        return query
    return jnp.pad(query, [(0, shape.stride - size if i == axis else 0) for i in range(5)])


class Scratch(NamedTuple):
    """What a program keeps in shared memory."""

    query_or_results: Any  # the query of a part; after its last block what becomes of it
    key: Any  # [stages, block_keys, H]
    value: Any
    query_ready: Any  # barriers
    query_read: Any
    sums_stored: Any
    rows_finished: Any
    values_hidden: Any
    key_ready: Any
    value_ready: Any
    consumed: Any


def scratch_of(call: DecodeCall, dtype: Any, *results: Any) -> Scratch:
    """What a program keeps; the query's memory takes any one of the results after the last block."""
    shape, stages = call.shape, call.config.stages
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    blocks = (stages, call.config.block_keys, shape.H)
    pieces = call.config.block_keys // _piece(call)
    return Scratch(
        plgpu.RefUnion(plgpu.SMEM((shape.tiles * TILE, shape.H), dtype, transforms=transforms), *results),
        plgpu.SMEM(blocks, dtype, transforms=transforms),
        plgpu.SMEM(blocks, dtype, transforms=transforms),
        plgpu.Barrier(num_arrivals=shape.groups),
        plgpu.Barrier(num_arrivals=shape.tiles),
        plgpu.Barrier(num_arrivals=shape.tiles),
        plgpu.Barrier(num_arrivals=shape.tiles),
        plgpu.Barrier(num_arrivals=shape.tiles),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
        plgpu.Barrier(num_arrivals=shape.tiles, num_barriers=stages),
    )


def _piece(call: DecodeCall) -> int:
    """Keys that are copied at once: those of a block, or as many as lie together in a page."""
    page, keys = call.shape.page, call.config.block_keys
    return keys if page is None else math.gcd(page, keys)


type Ahead = tuple[Place, tuple[Array, ...]]  # the block to copy next, and its pages


class Copies(NamedTuple):
    """Copies to shared memory, which the first warpgroup starts."""

    call: DecodeCall
    given: dict[str, Any]
    scratch: Scratch
    work: Work
    group: Array
    blocks: Array  # of the program

    def query(self, place: Place, index: Array | None, done: Array) -> None:
        """Start the copy of a part's packed query rows; before it come `done` blocks and part `index`, if any."""
        shape, scratch = self.call.shape, self.scratch
        target, *_ = scratch.query_or_results
        if shape.tiles > 1 and index is not None:
            plgpu.barrier_arrive(scratch.sums_stored)

        @pl.when((self.group == 0) & (done < self.blocks))
        def _start() -> None:
            if shape.tiles > 1 and index is not None:
                plgpu.barrier_wait(scratch.sums_stored)
            # Past the size of the axis the copy fills in zeros; jax refuses that of a start that it knows, such as 0.
            inner = pl.ds(pl.multiple_of(self.group * shape.stride, shape.stride), shape.stride)
            for i in range(shape.groups):
                at = (i, place.k, inner) if shape.heads_inside else (inner, place.k, i)
                rows = target.at[pl.ds(i * shape.stride, shape.stride)]
                plgpu.copy_gmem_to_smem(self.given["query"].at[(place.b, *at)], rows, scratch.query_ready)

    def release_query(self) -> None:
        """Wait until no warpgroup reads the query any more: its memory takes the sums of all."""
        if self.call.shape.tiles > 1:
            plgpu.barrier_arrive(self.scratch.query_read)
            plgpu.barrier_wait(self.scratch.query_read)

    def begin(self, start: Place) -> Ahead:
        """Fill all stages; returns the block that follows and its pages."""
        return self.rest((start, self._pages(start)), 0)

    def rest(self, ahead: Ahead, filled: int) -> Ahead:
        """Fill all stages but the first few, which are filled."""
        for stage in range(filled, self.call.config.stages):
            ahead = self.fill(jnp.int32(stage), ahead)
        return ahead

    def first(self, start: Place) -> Ahead:
        """Fill one stage where a program has a block for certain, whatever the lengths are; as `begin` otherwise."""
        return self.fill(jnp.int32(0), (start, self._pages(start)), sure=True)

    def fill(self, index: Array, ahead: Ahead, *, sure: bool = False) -> Ahead:
        """Start the copy of block `index` of the program, and move on."""
        place, pages = ahead

        @pl.when((self.group == 0) if sure else (self.group == 0) & (index < self.blocks))
        def _() -> None:
            self._copy(place, pages, rem(index, self.call.config.stages))

        place = self.work.after(place, 1)
        return place, self._pages(place)

    def refill(self, index: Array, ahead: Ahead) -> Ahead:
        """Put a block in the place of block `index`, once all warpgroups have read that."""
        stages = self.call.config.stages
        if self.work.most_blocks <= stages:
            return ahead
        if self.call.shape.tiles > 1:
            consumed = self.scratch.consumed.at[rem(index, stages)]
            plgpu.barrier_arrive(consumed)

            @pl.when((self.group == 0) & (index + stages < self.blocks))
            def _() -> None:
                plgpu.barrier_wait(consumed)

        return self.fill(index + stages, ahead)

    def _pages(self, place: Place) -> tuple[Array, ...]:
        """The pages of a block, read one block before they are needed. Entries past the length are not looked at."""
        table, page, keys = self.given.get("page_table"), self.call.shape.page, self.call.config.block_keys
        if table is None:
            return ()
        last = jnp.clip(self.work.length[place.b], 1, self.call.shape.S) - 1
        origin = (place.first + place.block) * keys
        slots = [jnp.minimum(origin + offset, last) for offset in range(0, keys, _piece(self.call))]
        pages = [table[place.b, div(slot, page)] for slot in slots]
        return tuple(jnp.clip(page, 0, self.given["key"].shape[0] - 1) for page in pages)

    def _copy(self, place: Place, pages: tuple[Array, ...], slot: Array) -> None:
        scratch, size = self.scratch, _piece(self.call)
        origin = (place.first + place.block) * self.call.config.block_keys
        for ref, smem, ready in (
            (self.given["key"], scratch.key, scratch.key_ready),
            (self.given["value"], scratch.value, scratch.value_ready),
        ):
            for i in range(self.call.config.block_keys // size):
                at = origin + i * size
                row, at = (pages[i], rem(at, self.call.shape.page)) if pages else (place.b, at)
                source = ref.at[row, pl.ds(pl.multiple_of(at, size), size), place.k]
                plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(i * size, size)], ready.at[slot])


class Rows:
    """What the rows of a warpgroup see of a pair's blocks."""

    def __init__(self, call: DecodeCall, given: dict[str, Any], work: Work, place: Place, group: Array) -> None:
        self.call, self.given, self.work, self.place, self.group = call, given, work, place, group
        self.length = work.length[place.b]
        self.first_new = self.length - work.real_tokens(place.b)
        self.row = group * TILE + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW)
        stride = call.shape.stride
        self.token = div(self.row, stride) if call.shape.heads_inside else rem(self.row, stride)
        if call.is_tree:
            self.ancestors, self.oldest = (self._of_tokens(given[name]) for name in ("ancestors", "oldest"))

    def _of_tokens(self, ref: Any) -> Array:
        """Numbers of the batch row's tokens, at their rows."""
        x = jnp.zeros_like(self.token)
        for t in range(self.call.shape.T):
            x = jnp.where(self.token == t, ref[self.place.b, t], x)
        return x

    def sinks(self) -> Array | None:
        """The sink of each row in base 2, if there are any."""
        if "sinks" not in self.given:
            return None
        shape, x = self.call.shape, jnp.zeros(self.row.shape, jnp.float32)
        head = rem(self.row, shape.stride) if shape.heads_inside else div(self.row, shape.stride)
        for g in range(shape.G):
            x = jnp.where(head == g, self.given["sinks"][self.place.k * shape.G + g] * LOG2E, x)
        return x

    def positions(self, start: Array, size: int, layout: Any) -> Array:
        """Logical positions of `size` slots."""
        if self.call.is_ring:
            ref = self.given["positions"].at[self.place.b, pl.ds(start, size)]
            return plgpu.load(ref, layout=layout, optimized=False)
        return start + plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)

    def visible(self, at: Array) -> Array:
        """Which rows see which of the positions [keys]: bool [TILE, keys]."""
        shape = (TILE, at.shape[0])
        if not self.call.is_tree:
            own, at = self.first_new + self.token, down(at, shape)
            seen = at <= across(own, shape)
            return seen if self.call.left is None else seen & (at >= across(own - self.call.left, shape))
        new = at - self.first_new
        among = (new >= 0) & (new < self.call.shape.T)
        bit = jnp.where(among, jnp.left_shift(1, jnp.clip(new, 0, 31)), 0)
        old = down(jnp.where(new < 0, at, -NOWHERE), shape) >= across(self.oldest, shape)
        return old | ((down(bit, shape) & across(self.ancestors, shape)) != 0)

    def partly_hidden(self, start: Array) -> Array:
        """Whether a block may hold slots that no row sees."""
        if self.call.is_ring:
            return jnp.bool_(True)
        some = start + self.call.config.block_keys > self.length
        return some if self.call.left is None else some | (start < self.work.oldest(self.place.b))

    def hide(self, start: Array, value: Any, done: Any) -> None:
        """Zero the values that no row sees: a weight of 0 would not hide their NaN. `done` is a barrier."""

        def blank() -> None:
            for i in range(0, self.call.config.block_keys, TILE):
                at = self.positions(start + i, TILE, ROW)
                seen = at < self.length
                if self.call.left is not None:
                    seen = seen & (at >= self.work.oldest(self.place.b))
                tile = value.at[pl.ds(i, TILE)]
                tile[...] = jnp.where(across(seen, tile.shape), tile[...], jnp.zeros((), tile.dtype))
            plgpu.commit_smem()

        if self.call.shape.tiles == 1:
            blank()
            return
        pl.when(self.group == 0)(blank)
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)


def across(rows: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(rows, shape, (0,))


def down(columns: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(columns, shape, (1,))


def attend(rows: Rows, scratch: Scratch, copies: Copies, done: Array, blocks: Array, ahead: Any) -> Any:
    """m, l [TILE] and u [TILE, H] of a part of `blocks` blocks, after `done` blocks of the program (eq. 33.3)."""
    call, place = rows.call, rows.place
    keys, H = call.config.block_keys, call.shape.H
    mine = pl.ds(pl.multiple_of(rows.group * TILE, TILE), TILE)
    query, *_ = scratch.query_or_results

    def step(i: Array, carry: Any) -> Any:
        m, l, u, ahead = carry
        slot = rem(done + i, call.config.stages)
        start = (place.first + place.block + i * rows.work.step) * keys
        at = rows.positions(start, keys, COLUMN)
        plgpu.barrier_wait(scratch.key_ready.at[slot])

        def product(acc: Any) -> Array:
            plgpu.wgmma(acc, query.at[mine], scratch.key.at[slot].transpose((1, 0)))
            return acc[...]

        s = _base_2(call, pl.run_scoped(product, plgpu.ACC((TILE, keys), jnp.float32)))
        s = jnp.where(rows.visible(at), s, -jnp.inf)
        m, old = jnp.maximum(m, jnp.max(s, axis=1)), m
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        weights = jnp.exp2(s - across(shift, s.shape))
        decay = jnp.exp2(old - shift)
        l = l * decay + jnp.sum(weights, axis=1)
        u = u * across(decay, u.shape)
        narrow = weights.astype(scratch.value.dtype)
        plgpu.barrier_wait(scratch.value_ready.at[slot])
        pl.when(rows.partly_hidden(start))(lambda: rows.hide(start, scratch.value.at[slot], scratch.values_hidden))

        def add(acc: Any) -> Array:
            acc[...] = u
            plgpu.wgmma(acc, narrow, scratch.value.at[slot])
            return acc[...]

        u = pl.run_scoped(add, plgpu.ACC((TILE, H), jnp.float32))
        return m, l, u, copies.refill(done + i, ahead)

    def full(value: float, shape: tuple[int, ...], layout: Any) -> Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    start = full(-jnp.inf, (TILE,), ROW), full(0.0, (TILE,), ROW), full(0.0, (TILE, H), plgpu.Layout.WGMMA)
    return lax.fori_loop(jnp.int32(0), blocks, step, (*start, ahead))


def _base_2(call: DecodeCall, products: Array) -> Array:
    """Scores times log2(e), of q.k."""
    if call.soft_cap is None:
        return products * (call.scale * LOG2E)
    # tanh by way of 2^x: the approximate instruction for it is good to 11 bits only
    twice = jnp.exp2(products * (2 * LOG2E * call.scale / call.soft_cap))
    return (1 - 2 / (1 + twice)) * (call.soft_cap * LOG2E)
