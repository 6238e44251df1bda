"""Where the letters of a fused decoder step on Hopper lie: all of them in one array, in a box for each kind.

No kernel is imported here.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.gpu.hopper.decode_block_config import ADDING, PRODUCTS, BlockPlan
from pallas_kernels.gpu.hopper.decode_block_line import places
from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS
from pallas_kernels.launch import round_up

ALIGNED = 16  # letters, so that two can be read or written at once


class Box(NamedTuple):
    """Letters as an array.

    Args:
      begin: the first of them, among all letters.
      shape: of the array.
    """

    begin: int
    shape: tuple[int, ...]

    def step(self, axis: int) -> int:
        """From one letter along an axis to the next."""
        return math.prod(self.shape[axis:][1:])

    def letter(self, place: Sequence[Any]) -> Any:
        """The number of a letter, among all."""
        return self.begin + sum(i * self.step(axis) for axis, i in enumerate(place))

    def room(self, place: Sequence[Any], axes: Sequence[int]) -> list[Array]:
        """How many letters there are from a place on, along some axes."""
        return [jnp.int32(self.shape[axis] - place[axis]) for axis in axes]


class Letters(NamedTuple):
    """All letters of a step, by the names of phases where each has its own.

    Args:
      squares: sums of squares of the residual behind `down` and `out`, [rows, tiles].
      parts: of a product, [places, rows, BLOCK_OUTPUTS].
      attended: outputs of parts of attention, [places, packed queries, H].
      normalisers: of these parts, in base 2, [places, packed queries].
      total: how many there are.
    """

    squares: dict[str, Box]
    parts: dict[str, Box]
    attended: Box | None
    normalisers: Box | None
    total: int


def letters_of(plan: BlockPlan) -> Letters:
    """Where the letters of a plan are; those that a step with attention begins with, of `down`, are the first."""
    end, rows = 0, plan.shape.rows

    def box(*shape: int) -> Box:
        nonlocal end
        begin, end = end, round_up(end + math.prod(shape), ALIGNED)
        return Box(begin, shape)

    tiles = plan.shape.hidden // BLOCK_OUTPUTS
    squares = {name: box(rows, tiles) for name in reversed(ADDING) if name in plan.phases}
    products = (name for name in PRODUCTS if name in plan.phases)
    parts = {name: box(plan.split(name).places, rows, BLOCK_OUTPUTS) for name in products}
    attended = normalisers = None
    if plan.attention is not None:
        _, G, H = plan.shape.heads
        attended, normalisers = (box(places(plan), plan.tokens * G, *more) for more in ((H,), ()))
    return Letters(squares, parts, attended, normalisers, end)
