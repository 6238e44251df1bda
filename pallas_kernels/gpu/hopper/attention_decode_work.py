"""How the blocks of a cache are shared out among the programs of the decode kernel, from the actual lengths.

All blocks of all (batch row, key/value head) pairs lie in one line, which is cut into units, and every program takes
as many neighbouring ones. Where all rows are as long, a unit is an equal part of a pair, or a whole pair, so that as
few pairs as possible have to be put together again. Rows of different lengths are cut wherever a program's share ends:
a unit is a block then, and the blocks of a pair that fall into one program are one part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.gpu.hopper.attention_decode_config import DecodeCall
from pallas_kernels.launch import cdiv

ROWS_AT_ONCE = 16  # rows whose lengths are read together


class Place(NamedTuple):
    """A block: its batch row, head, index within the pair, and what the row's blocks are."""

    b: Array
    k: Array
    block: Array
    first: Array  # the row's first block, counted from slot 0
    blocks: Array  # of one pair of the row


class Share(NamedTuple):
    """What one program does.

    Args:
      start: its first block.
      blocks: how many it takes.
      unit: blocks of a unit that is a part of its own; 0 where parts end with a pair or the share.
      part: number of its first part; parts of its own follow, others are numbered by pair beyond that.
    """

    start: Place
    blocks: Array
    unit: Array
    part: Array

    def run(self, place: Place, done: Array) -> Array:
        """Blocks of the part that begins at a place, after `done` blocks of the share."""
        rest = place.blocks - place.block
        return jnp.minimum(rest, jnp.where(self.unit > 0, self.unit, self.blocks - done))


def div(a: Array, b: Any) -> Array:
    """a // b for a >= 0 and b > 0, without the cases for signs."""
    return lax.div(a, jnp.broadcast_to(jnp.asarray(b, jnp.int32), a.shape))


def rem(a: Array, b: Any) -> Array:
    """a % b for a >= 0 and b > 0."""
    return lax.rem(a, jnp.broadcast_to(jnp.asarray(b, jnp.int32), a.shape))


class Work(NamedTuple):
    """The lengths of the rows, and what follows from them.

    Args:
      call: what is static.
      length, real: references to [B] int32; `real` may be None.
    """

    call: DecodeCall
    length: Any
    real: Any

    def real_tokens(self, b: Array) -> Array:
        """How many tokens of a row are real."""
        T = self.call.shape.T
        return jnp.int32(T) if self.real is None else jnp.clip(self.real[b], 0, T)

    def span(self, b: Array) -> tuple[Array, Array]:
        """First block and number of blocks of a row; at least one, which may be hidden altogether."""
        S, keys = self.call.shape.S, self.call.config.block_keys
        if self.call.is_ring:
            return jnp.int32(0), jnp.int32(cdiv(S, keys))
        length = self.length[b]
        end = div(jnp.clip(length, 1, S) + (keys - 1), keys)
        if self.call.left is None:
            return jnp.int32(0), end
        first = jnp.minimum(div(jnp.maximum(self.oldest(b), 0), keys), end - 1)
        return first, end - first

    def oldest(self, b: Array) -> Array:
        """With a window: a position before which no token of the row sees anything."""
        assert self.call.left is not None
        # A row of a tree mask without even the token itself counts as one step before the first new token.
        return self.length[b] - self.real_tokens(b) - self.call.left - (1 if self.call.is_tree else 0)

    def after(self, place: Place, step: Array | int) -> Place:
        """The place `step` blocks later, which is not past the beginning of the next pair."""
        shape, block = self.call.shape, place.block + step
        ends = block >= place.blocks
        k = jnp.where(ends, place.k + 1, place.k)
        wraps = k >= shape.K
        b = jnp.where(wraps, jnp.minimum(place.b + 1, shape.B - 1), place.b)
        first, blocks = self.span(b)
        return Place(b, jnp.where(wraps, 0, k), jnp.where(ends, 0, block), first, blocks)

    def share(self, program: Array) -> Share:
        """What a program does."""
        if self.call.split is not None:
            return self._pinned(program, self.call.split)
        if self.call.shape.B == 1:
            return self._even(program)
        return lax.cond(self._uniform(), lambda: self._even(program), lambda: self._cut(program))

    def _over_rows(self, add: Callable[[Array, Array, Any], Any], start: Any) -> Any:
        """Fold `add(row, blocks of a pair, carry)` over all rows, reading the lengths of some at once."""
        B, at_once = self.call.shape.B, min(self.call.shape.B, ROWS_AT_ONCE)

        def some(group: Array, carry: Any) -> Any:
            rows = [group * at_once + i for i in range(at_once)]
            spans = [self.span(jnp.minimum(row, B - 1))[1] for row in rows]
            for row, blocks in zip(rows, spans, strict=True):
                carry = add(row, jnp.where(row < B, blocks, 0), carry)
            return carry

        return lax.fori_loop(jnp.int32(0), jnp.int32(cdiv(B, at_once)), some, start)

    def _uniform(self) -> Array:
        """Whether all rows have equally many blocks, and an even cut keeps most programs busy."""
        shape, config = self.call.shape, self.call.config
        _, first = self.span(jnp.int32(0))
        same = self._over_rows(lambda row, blocks, same: same & ((blocks == first) | (row >= shape.B)), jnp.bool_(True))
        unit, per_program = self._even_unit(first)
        used = div(shape.B * shape.K * div(first + unit - 1, unit) + (per_program - 1), per_program)
        return same & ((8 * used >= 7 * config.programs) | (unit <= config.least_blocks))

    def _even_unit(self, blocks: Array) -> tuple[Array, int]:
        """Blocks of a unit where every pair has `blocks`, and units of a program."""
        pairs, config = self.call.shape.B * self.call.shape.K, self.call.config
        if pairs > config.programs:
            return blocks, cdiv(pairs, config.programs)
        parts = config.programs // pairs
        return jnp.maximum(div(blocks + (parts - 1), parts), config.least_blocks), 1

    def _even(self, program: Array) -> Share:
        """Units of equal size, for rows of equal length."""
        shape = self.call.shape
        first, blocks = self.span(jnp.int32(0))
        unit, per_program = self._even_unit(blocks)
        units = div(blocks + unit - 1, unit)
        total = shape.B * shape.K * units

        def at(index: Array) -> tuple[Array, Array]:
            pair = div(index, units)
            return pair, jnp.minimum((index - pair * units) * unit, blocks)

        begin = jnp.minimum(program * per_program, total)
        pair, block = at(begin)
        last_pair, last_block = at(jnp.minimum(begin + per_program, total))
        start = Place(jnp.minimum(div(pair, shape.K), shape.B - 1), rem(pair, shape.K), block, first, blocks)
        return Share(start, (last_pair - pair) * blocks + last_block - block, unit, begin)

    def _cut(self, program: Array) -> Share:
        """Equally many blocks for every program, wherever that ends."""
        shape, config = self.call.shape, self.call.config
        total = self._over_rows(lambda _, blocks, total: total + shape.K * blocks, jnp.int32(0))
        share = jnp.maximum(div(total + (config.programs - 1), config.programs), config.least_blocks)
        begin = jnp.minimum(program * share, total)
        start, _ = self._locate(begin, 1)
        part = program + start.b * shape.K + start.k
        return Share(start, jnp.minimum(begin + share, total) - begin, jnp.int32(0), part)

    def _pinned(self, program: Array, unit: int) -> Share:
        """Units of a given size, counted from the start of each row."""
        shape, config = self.call.shape, self.call.config

        def add(_: Array, blocks: Array, total: Array) -> Array:
            return total + shape.K * div(blocks + (unit - 1), unit)

        total = self._over_rows(add, jnp.int32(0))
        share = div(total + (config.programs - 1), config.programs)
        begin = jnp.minimum(program * share, total)
        start, before = self._locate(begin, unit)
        _, end = self._locate(jnp.minimum(begin + share, total), unit)
        return Share(start, end - before, jnp.int32(unit), begin)

    def _locate(self, index: Array, unit: int) -> tuple[Place, Array]:
        """Where a unit begins, and how many blocks lie before it; one past the last unit lies at head K."""
        shape, zero = self.call.shape, jnp.int32(0)

        def look(row: Array, blocks: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
            found_row, units_before, blocks_before = found
            units = units_before + shape.K * div(blocks + (unit - 1), unit)
            later = (found_row == row) & (index >= units) & (row < shape.B - 1)
            return (
                jnp.where(later, row + 1, found_row),
                jnp.where(later, units, units_before),
                jnp.where(later, blocks_before + shape.K * blocks, blocks_before),
            )

        row, units_before, blocks_before = self._over_rows(look, (zero, zero, zero))
        first, blocks = self.span(row)
        units = div(blocks + (unit - 1), unit)
        k = div(index - units_before, units)
        block = jnp.minimum((index - units_before - k * units) * unit, blocks)
        return Place(row, k, block, first, blocks), blocks_before + k * blocks + block


def most_parts(call: DecodeCall) -> int:
    """How many parts there can be."""
    shape, config = call.shape, call.config
    if call.split is None:
        return config.programs + shape.B * shape.K
    return shape.B * shape.K * cdiv(cdiv(shape.S, config.block_keys), call.split)
