"""How the programs of the fused decoder step on Hopper share out attention: blocks of a cache, then the merge.

The blocks of the cache that hold something lie in one line: key/value head after head, in each the batch rows, in each
its blocks. Every program takes an equal run of it. The blocks of a pair of head and batch row that fall into one run
are a part for each computing warpgroup that has any, which take turns at them; part g of program p of pair t lies in
place 2 (p + t) + g, which no two parts share. How many blocks there are is known on the device alone.

The merge of the parts is cut into tasks of a few queries and columns, for as many warpgroups as possible at once.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.gpu.hopper.attention_decode_work import div, rem
from pallas_kernels.gpu.hopper.decode_block_config import TOGETHER, BlockPlan, unit_keys
from pallas_kernels.gpu.hopper.decode_block_split import GROUPS, owner_of, share_of
from pallas_kernels.launch import cdiv

TASK_COLUMNS = 32  # one for each lane of a warp, whose rows are every fourth


class Pair(NamedTuple):
    """A batch row of a key/value head.

    Args:
      k, b: head and row.
      begin, end: its units in the line.
    """

    k: Array
    b: Array
    begin: Array
    end: Array


class Line:
    """The blocks of a step's cache.

    Args:
      plan: what is static.
      lengths: a reference to int32 [2, B], as `BlockOperands.lengths`.
    """

    def __init__(self, plan: BlockPlan, lengths: Any) -> None:
        assert plan.attention is not None
        self.plan, self.lengths = plan, lengths
        self.keys, slots = unit_keys(plan.shape, plan.config), plan.attention.slots
        self.ends = [jnp.int32(0)]  # of the batch rows before one, and of that
        for b in range(plan.query[0]):
            held = jnp.clip(lengths[1, b], 1, slots)  # one block at least, which may be hidden altogether
            self.ends.append(self.ends[-1] + div(held + (self.keys - 1), self.keys))
        units, programs = self.ends[-1] * plan.shape.heads.K, plan.config.programs
        self.share = div(units, programs), rem(units, programs)

    def held(self, b: Array) -> tuple[Array, Array]:
        """Positions that a batch row held before the step, and holds with its tokens as far as there is room."""
        assert self.plan.attention is not None
        return self.lengths[0, b], jnp.minimum(self.lengths[1, b], self.plan.attention.slots)

    def pair(self, unit: Array) -> Pair:
        """The pair that a unit belongs to."""
        k, b = div(unit, self.ends[-1]), jnp.int32(0)
        for first in self.ends[1:-1]:
            later = unit - k * self.ends[-1] >= first
            b = b + later.astype(jnp.int32)
        return self.pair_of(k, b)

    def pair_of(self, k: Array, row: Any) -> Pair:
        """A pair by its numbers."""
        begin, end = self.ends[0], self.ends[1]
        for b in range(1, len(self.ends) - 1):
            begin, end = (
                jnp.where(row == b, new, old) for new, old in ((self.ends[b], begin), (self.ends[b + 1], end))
            )
        return Pair(k, row, k * self.ends[-1] + begin, k * self.ends[-1] + end)

    def programs_of(self, pair: Pair) -> tuple[Array, Array]:
        """The first and the last program that have units of a pair."""
        first, last = (owner_of(unit, *self.share, div) for unit in (pair.begin, pair.end - 1))
        return first, last

    def parts_there(self, program: Array, pair: Pair, most: int) -> Array:
        """Which of the parts of a pair there are, from a program's on: bit by bit, as they lie in their places."""
        there = jnp.int32(0)
        for i in range(most // GROUPS):
            begin, units = share_of(*self.share, program + i)
            own = jnp.minimum(begin + units, pair.end) - jnp.maximum(begin, pair.begin)
            for group in range(GROUPS):
                there |= (own > group).astype(jnp.int32) << (i * GROUPS + group)
        return there

    def place(self, program: Array, pair: Pair, group: Any = 0) -> Array:
        """Where the part of a program and warpgroup lies."""
        return (program + pair.k * self.plan.query[0] + pair.b) * GROUPS + group


def places(plan: BlockPlan) -> int:
    """Places of parts; some stay empty."""
    B, K, *_ = plan.query
    return (plan.config.programs + B * K - 1) * GROUPS


def tasks_of_a_head(plan: BlockPlan) -> tuple[int, int, int]:
    """Tasks of the merge for a key/value head: batch rows, groups of packed queries, groups of columns."""
    B, _, _, H = plan.query
    return B, cdiv(plan.tokens * plan.shape.heads.G, TOGETHER), H // TASK_COLUMNS


def merge_tasks(plan: BlockPlan) -> int:
    """Tasks of the merge."""
    rows, queries, columns = tasks_of_a_head(plan)
    return plan.shape.heads.K * rows * queries * columns
