"""Launch settings of the Hopper matmul with a tail: what is legal, a heuristic, and the candidates of a search."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels.launch import cdiv, round_up

TILE = 64  # rows of one wgmma
LANES = 64  # 16-bit elements of a row in swizzled shared memory
SHARED_MEMORY = 227 * 1024  # bytes that a thread block of sm_90 may have
RESERVED = 1024  # of them for barriers
OUT_SLOTS = 2  # pieces of the result of a warpgroup on their way to memory
MOST_SUMS = 128  # float32 sums of one thread: registers for two such warpgroups are all there are


class MatmulShape(NamedTuple):
    """Sizes of one launch.

    Args:
      M, N, K: x is [M, K], w is [K, N].
      products: 2 with a gate.
      residual_itemsize: bytes of an element of the residual; 0 without one.
    """

    M: int
    N: int
    K: int
    products: int = 1
    residual_itemsize: int = 0


class Deal(NamedTuple):
    """How tiles go to thread blocks, or to clusters of them.

    Args:
      programs: thread blocks, or clusters.
      whole: tiles of each.
      rest: tiles that are left for a last round.
      cut: into how many narrower tiles each of those is cut, so that more thread blocks share them.
    """

    programs: int
    whole: int
    rest: int
    cut: int


@dataclasses.dataclass(frozen=True)
class MatmulEpilogueConfig:
    """Settings of one launch; illegal ones cannot be built.

    Args:
      warpgroups: that compute, of 64 rows of x each.
      block_n: columns of w (and of the gate) in a tile, a multiple of 32.
      block_k: how much of the contraction is taken at a time, a multiple of 64.
      stages: steps of the contraction in flight.
      cluster_m, cluster_n: neighbouring tiles that share what they read: along the rows w, along the columns x.
      group: tiles along the rows that are worked on together, so that what they read stays in the cache.
      cut: into how many narrower ones a tile of an incomplete last round may be cut, 1, 2 or 4.
      programs: thread blocks, one for each multiprocessor.
    """

    warpgroups: int = 2
    block_n: int = 256
    block_k: int = 64
    stages: int = 4
    cluster_m: int = 1
    cluster_n: int = 1
    group: int = 8
    cut: int = 4
    programs: int = 132

    def __post_init__(self) -> None:
        for name, legal, expected in (
            ("warpgroups", self.warpgroups in (1, 2), "1 or 2"),
            ("block_n", self.block_n % 32 == 0 and 32 <= self.block_n <= 256, "a multiple of 32 from 32 to 256"),
            ("block_k", self.block_k % 64 == 0 and 64 <= self.block_k <= 256, "a multiple of 64 from 64 to 256"),
            ("stages", 2 <= self.stages <= 32, "2 to 32"),
            ("cluster_m", self.cluster_m in (1, 2), "1 or 2"),
            ("cluster_n", self.cluster_n in (1, 2), "1 or 2"),
            ("group", self.group >= 1, "at least 1"),
            ("cut", self.cut in (1, 2, 4), "1, 2 or 4"),
            ("programs", self.programs >= self.cluster, "at least the thread blocks of a cluster"),
        ):
            if not legal:
                raise ValueError(f"`{name}`: expected {expected}, got {getattr(self, name)}")

    @property
    def block_m(self) -> int:
        """Rows of x in a tile."""
        return TILE * self.warpgroups

    @property
    def cluster(self) -> int:
        """Thread blocks that share what they read."""
        return self.cluster_m * self.cluster_n

    @property
    def lanes(self) -> int:
        """Columns of a piece of shared memory: a swizzled row of 128 bytes, or of 64 where columns ask for it."""
        return LANES if self.block_n % LANES == 0 else LANES // 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes and of one that copies, which together fill the multiprocessor."""
        return {1: (232, 40), 2: (240, 24)}[self.warpgroups]

    def tiles(self, shape: MatmulShape) -> tuple[int, int]:
        """How many clusters of tiles cover the result, along rows and columns."""
        return cdiv(shape.M, self.block_m * self.cluster_m), cdiv(shape.N, self.block_n * self.cluster_n)

    def deal(self, shape: MatmulShape) -> "Deal":
        """How the tiles go to the thread blocks."""
        rows, columns = self.tiles(shape)
        programs = min(self.programs // self.cluster, rows * columns)
        whole, rest = divmod(rows * columns, programs)
        fits = (n for n in (4, 2) if n <= self.cut and rest * n <= programs and self.block_n % (n * self.lanes) == 0)
        return Deal(programs, whole, rest, next(fits, 1) if rest else 1)

    def shared_memory(self, shape: MatmulShape) -> int:
        """Bytes of shared memory that a launch takes, about."""
        stage = 2 * self.block_k * (self.block_m + shape.products * self.block_n)
        piece = self.block_m * self.lanes
        biases = 4 * self.warpgroups * shape.products * self.block_n
        return self.stages * stage + piece * (OUT_SLOTS * 2 + shape.residual_itemsize) + biases + RESERVED

    def refusals(self, shape: MatmulShape) -> tuple[str, ...]:
        """Why a launch of this shape cannot have these settings; empty when it can."""
        needed, sums = self.shared_memory(shape), shape.products * self.block_n // 2
        rules = (
            (min(shape[:3]) < 1, f"takes no empty operand, such as [{shape.M}, {shape.K}] x [{shape.K}, {shape.N}]"),
            (
                _ragged(shape, self.lanes),
                f"needs M, K and N in multiples of 8, 64 and {self.lanes}, not of {shape[:3]}",
            ),
            (needed > SHARED_MEMORY, f"needs {needed} bytes of shared memory, of which there are {SHARED_MEMORY}"),
            (sums > MOST_SUMS, f"needs {sums} registers for sums, of which there are {MOST_SUMS}"),
        )
        return tuple(reason for refused, reason in rules if refused)


def _ragged(shape: MatmulShape, columns: int) -> bool:
    """Whether the copy engine cannot describe an operand: rows up to 8 are one block of its own."""
    return bool((shape.M > 8 and shape.M % 8) or shape.K % LANES or shape.N % columns)


def heuristic(shape: MatmulShape, programs: int = 132) -> MatmulEpilogueConfig:
    """Settings for a shape that nobody has tuned.

    Few rows read w once, in blocks that keep nearly all multiprocessors reading; many rows take the largest tile.

    Args:
      shape: of the launch.
      programs: multiprocessors of the device.
    """
    warpgroups = 1 if shape.M <= TILE else 2
    most = min(256, 2 * MOST_SUMS // shape.products)
    rows = cdiv(shape.M, TILE * warpgroups)
    block_n = next((n for n in (most, 128, 64) if n <= most and rows * cdiv(shape.N, n) >= 0.8 * programs), 64)
    pairs = 2 if rows > 1 and rows % 2 == 0 else 1
    config = MatmulEpilogueConfig(warpgroups=warpgroups, block_n=block_n, cluster_m=pairs, stages=2, programs=programs)
    while config.stages < 32 and not dataclasses.replace(config, stages=config.stages + 1).refusals(shape):
        config = dataclasses.replace(config, stages=config.stages + 1)
    return config


def candidates(shape: MatmulShape, programs: int = 132) -> Iterator[MatmulEpilogueConfig]:
    """Legal settings that are worth timing for a shape, the heuristic's first."""
    first = heuristic(shape, programs)
    yield first
    for warpgroups, block_n, cluster_m, cluster_n, group, cut in itertools.product(
        (1, 2), (64, 128, 224, 256), (1, 2), (1, 2), (4, 8, 16), (1, 4)
    ):
        config = dataclasses.replace(
            first,
            warpgroups=warpgroups,
            block_n=block_n,
            stages=4,
            cluster_m=cluster_m,
            cluster_n=cluster_n,
            group=group,
            cut=cut,
        )
        if config != first and not config.refusals(shape):
            yield config


@dataclasses.dataclass(frozen=True)
class FewRowsConfig:
    """Settings of a launch for few rows; illegal ones cannot be built.

    Args:
      warpgroups: that compute, of 64 outputs each.
      block_k: how much of the contraction is taken at a time, a multiple of 64.
      stages: steps of the contraction in flight.
    """

    warpgroups: int = 2
    block_k: int = 64
    stages: int = 8

    def __post_init__(self) -> None:
        for name, legal, expected in (
            ("warpgroups", 1 <= self.warpgroups <= 4, "1 to 4"),
            ("block_k", self.block_k % 64 == 0 and 64 <= self.block_k <= 256, "a multiple of 64 from 64 to 256"),
            ("stages", 2 <= self.stages <= 32, "2 to 32"),
        ):
            if not legal:
                raise ValueError(f"`{name}`: expected {expected}, got {getattr(self, name)}")

    @property
    def block_n(self) -> int:
        """Outputs of a thread block."""
        return TILE * self.warpgroups

    def shared_memory(self, shape: MatmulShape) -> int:
        """Bytes of shared memory that a launch takes, about."""
        return self.stages * 2 * self.block_k * (round_up(shape.M, 8) + shape.products * self.block_n) + RESERVED

    def refusals(self, shape: MatmulShape) -> tuple[str, ...]:
        """Why a launch of this shape cannot have these settings; empty when it can."""
        needed = self.shared_memory(shape)
        rules = (
            (min(shape[:3]) < 1, f"takes no empty operand, such as [{shape.M}, {shape.K}] x [{shape.K}, {shape.N}]"),
            (shape.M > TILE, f"takes up to {TILE} rows, not {shape.M}"),
            (
                _ragged(shape, self.block_n),
                f"needs M, K and N in multiples of 8, 64 and {self.block_n}, not of {shape[:3]}",
            ),
            (needed > SHARED_MEMORY, f"needs {needed} bytes of shared memory, of which there are {SHARED_MEMORY}"),
        )
        return tuple(reason for refused, reason in rules if refused)


def few_rows(shape: MatmulShape) -> FewRowsConfig | None:
    """Settings of the kernel for few rows, with as many steps in flight as there is room for; None where it cannot run.

    Args:
      shape: of the launch.
    """
    config = FewRowsConfig(stages=2)
    if config.refusals(shape):
        return None
    while config.stages < 32 and not dataclasses.replace(config, stages=config.stages + 1).refusals(shape):
        config = dataclasses.replace(config, stages=config.stages + 1)
    return config
