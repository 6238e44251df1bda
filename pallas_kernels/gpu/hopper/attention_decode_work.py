"""How the blocks of a cache are shared out among the programs of the decode kernel, from the actual lengths.

Every program stays within one key/value head. The blocks of all batch rows lie in one line, which is cut into as many
equal shares as there are programs for a head. Programs of different heads take the same share at the same time: a
position holds all heads side by side in memory, so that what they read together lies together.

The blocks of a row that fall into one share are one part, whose statistics are merged with those of its other parts; or
a part has a given number of blocks, counted from the start of its row, whatever else is in the batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.gpu.hopper.attention_decode_config import DecodeCall
from pallas_kernels.launch import cdiv

ROWS_AT_ONCE = 16  # rows whose lengths are read together


class Place(NamedTuple):
    """A block: its batch row, head, index within the row, and what the row's blocks are."""

    b: Array
    k: Array
    block: Array
    first: Array  # the row's first block, counted from slot 0
    blocks: Array  # of the row


class Share(NamedTuple):
    """What one program does.

    Args:
      start: its first block.
      blocks: how many it takes.
      unit: blocks of a part; None where parts end with a row or the share.
      part: number of its first part; the others follow.
    """

    start: Place
    blocks: Array
    unit: int | None
    part: Array

    def run(self, place: Place, done: Array) -> Array:
        """Blocks of the part that begins at a place, after `done` blocks of the share."""
        limit = self.blocks - done if self.unit is None else self.unit
        return jnp.minimum(place.blocks - place.block, limit)


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

    @property
    def step(self) -> int:
        """Blocks of a row from one block of a part to the next."""
        return 1

    @property
    def most_blocks(self) -> int:
        """Blocks that a program can have."""
        return self.call.shape.B * cdiv(self.call.shape.S, self.call.config.block_keys)

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
        """The place `step` blocks later, which is not past the beginning of the next row."""
        block = place.block + step
        ends = block >= place.blocks
        b = jnp.where(ends, jnp.minimum(place.b + 1, self.call.shape.B - 1), place.b)
        first, blocks = self.span(b)
        return Place(b, place.k, jnp.where(ends, 0, block), first, blocks)

    def share(self, program: Array) -> Share:
        """What a program does."""
        K, split, per_head = self.call.shape.K, self.call.split, programs_of_a_head(self.call)
        k, index = rem(program, K), div(program, K)
        total = self._over_rows(lambda _, blocks, total: total + self._units(blocks), jnp.int32(0))
        share = div(total + (per_head - 1), per_head)
        if split is None:
            share = jnp.maximum(share, self.call.config.least_blocks)
        begin = jnp.minimum(index * share, total)
        end = jnp.minimum(begin + share, total)
        start, before = self._locate(k, begin)
        part = k * parts_of_a_head(self.call)
        if split is None:
            return Share(start, end - begin, None, part + index + start.b)
        return Share(start, self._locate(k, end)[1] - before, split, part + begin)

    def _units(self, blocks: Array) -> Array:
        """In how many pieces the blocks of a row are counted: one each, or parts of a given size."""
        split = self.call.split
        return blocks if split is None else div(blocks + (split - 1), split)

    def _over_rows(self, add: Callable[[Array, Array, Any], Any], start: Any) -> Any:
        """Fold `add(row, blocks of the row, carry)` over all rows, reading the lengths of some at once."""
        B, at_once = self.call.shape.B, min(self.call.shape.B, ROWS_AT_ONCE)

        def some(group: Array, carry: Any) -> Any:
            rows = [group * at_once + i for i in range(at_once)]
            spans = [self.span(jnp.minimum(row, B - 1))[1] for row in rows]
            for row, blocks in zip(rows, spans, strict=True):
                carry = add(row, jnp.where(row < B, blocks, 0), carry)
            return carry

        return lax.fori_loop(jnp.int32(0), jnp.int32(cdiv(B, at_once)), some, start)

    def _locate(self, k: Array, index: Array) -> tuple[Place, Array]:
        """Where piece `index` of a head's line begins, and how many blocks of the line lie before it."""
        B, zero = self.call.shape.B, jnp.int32(0)

        def look(row: Array, blocks: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
            found_row, units_before, blocks_before = found
            units = units_before + self._units(blocks)
            later = (found_row == row) & (index >= units) & (row < B - 1)
            return (
                jnp.where(later, row + 1, found_row),
                jnp.where(later, units, units_before),
                jnp.where(later, blocks_before + blocks, blocks_before),
            )

        row, units_before, blocks_before = self._over_rows(look, (zero, zero, zero))
        first, blocks = self.span(row)
        block = jnp.minimum((index - units_before) * (self.call.split or 1), blocks)
        return Place(row, k, block, first, blocks), blocks_before + block


class ClusterWork(Work):
    """The work of clusters, each with a pair of row and head: its programs take the row's blocks in turns.

    Where a program begins does not depend on the lengths, so that nothing waits for them.
    """

    @property
    def step(self) -> int:
        return self.call.config.cluster

    @property
    def most_blocks(self) -> int:
        return cdiv(cdiv(self.call.shape.S, self.call.config.block_keys), self.step)

    def after(self, place: Place, step: Array | int) -> Place:
        """The place `step` blocks of the program later."""
        return place._replace(block=place.block + step * self.step)

    def start(self, pair: Array, rank: Array) -> Place:
        """Where a program of a pair's cluster begins, which is past the row's end if it has nothing to do."""
        b, k = div(pair, self.call.shape.K), rem(pair, self.call.shape.K)
        return Place(b, k, rank, *self.span(b))

    def share_of(self, start: Place) -> Array:
        """Blocks of a program; one that has nothing to do takes a block that is hidden altogether."""
        return jnp.maximum(div(start.blocks - start.block + (self.step - 1), self.step), 1)


def programs_of_a_head(call: DecodeCall) -> int:
    """How many programs share a head's line."""
    return max(1, call.config.programs // call.shape.K)


def parts_of_a_head(call: DecodeCall) -> int:
    """How many parts there can be in a head's line."""
    B, S = call.shape.B, call.shape.S
    if call.split is None:
        return programs_of_a_head(call) + B
    return B * cdiv(cdiv(S, call.config.block_keys), call.split)
