"""How the programs of the decoder step on Hopper share out a product, and where their sums lie.

A product of few rows with a large matrix is as fast as the matrix can be read. Its work is cut into units, blocks of
`block_inputs` x `BLOCK_OUTPUTS` weights, that lie in one line, down the inputs of one tile of outputs after the other.
Every program takes an equal run of that line, so a tile may be summed by several programs: the part of program p of
tile t lies in place p + t, which no two parts share. Whoever reads the product adds up the parts of a tile in order.

Tiles form sets, whose small work is done at once: a gate and what it gates, the tiles of a head, or one tile.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

GROUPS = 2  # computing warpgroups of a program
BLOCK_OUTPUTS = 128  # of a unit: 64 for each of them


@dataclasses.dataclass(frozen=True)
class Split:
    """Which program does which units, and where its sums lie.

    Args:
      inputs, outputs: of the matrix, multiples of those of a unit.
      block_inputs: of a unit.
      programs: thread blocks that share the work.
      together: tiles of a set.
      apart: whether those of a set lie as far apart as there are sets; they are neighbours otherwise.
    """

    inputs: int
    outputs: int
    block_inputs: int
    programs: int
    together: int = 1
    apart: bool = False

    @property
    def blocks(self) -> int:
        """Units of a tile."""
        return self.inputs // self.block_inputs

    @property
    def tiles(self) -> int:
        """Tiles of outputs."""
        return self.outputs // BLOCK_OUTPUTS

    @property
    def sets(self) -> int:
        """Sets of tiles."""
        return self.tiles // self.together

    @property
    def units(self) -> int:
        """Units of all tiles."""
        return self.blocks * self.tiles

    @property
    def share(self) -> tuple[int, int]:
        """Units of every program, and how many programs have one more; these come first."""
        return divmod(self.units, self.programs)

    @property
    def places(self) -> int:
        """Places of parts; some stay empty."""
        return self.programs + self.tiles - 1

    @property
    def most_parts(self) -> int:
        """The most programs that share a tile."""
        first, last = self.programs_of(np.arange(self.tiles))
        return int((last - first).max()) + 1

    def tiles_of(self, number: Any) -> list[Any]:
        """The tiles of a set."""
        return [number + i * self.sets if self.apart else number * self.together + i for i in range(self.together)]

    def programs_of(self, tile: Any, div: Any = np.floor_divide) -> tuple[Any, Any]:
        """The first and the last program that sum up a tile; `div` as in `program_of`."""
        unit = tile * self.blocks
        return self.program_of(unit, div), self.program_of(unit + (self.blocks - 1), div)

    def program_of(self, unit: Any, div: Any = np.floor_divide) -> Any:
        """The program that a unit belongs to.

        Args:
          unit: its number, or an array of them.
          div: division of two numbers that are not negative; numpy's, or that of a kernel.
        """
        return owner_of(unit, *self.share, div)


def owner_of(unit: Any, least: Any, more: Any, div: Any = np.floor_divide) -> Any:
    """The program that a unit belongs to, where every one has `least`, and the first `more` have one more."""
    ahead = more * (least + 1)  # units of the programs that have one more
    static = all(isinstance(x, int | np.integer | np.ndarray) for x in (unit, least, more))
    xp: Any = np if static else jnp
    some = max(least, 1) if isinstance(least, int) else jnp.maximum(least, 1)  # if none has any, nothing comes of it
    return xp.where(unit < ahead, div(unit, least + 1), more + div(xp.maximum(unit - ahead, 0), some))


def share_of(least: Any, more: Any, rank: Array) -> tuple[Array, Array]:
    """The first unit of a program, and how many it has."""
    return rank * least + jnp.minimum(rank, more), least + (rank < more).astype(jnp.int32)
