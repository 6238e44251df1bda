"""Launch settings of the Hopper matmul with a tail: what is legal, what is best, and where XLA is better."""

import dataclasses
from typing import Any, NamedTuple

from pallas_kernels.launch import cdiv, round_up

TILE = 64  # rows of one wgmma, which a warpgroup multiplies
LANES = 64  # 16-bit elements of a row in swizzled shared memory; steps of the contraction, and pieces of the result
WARPGROUPS = 2  # that compute, where there are many rows
BLOCK_M = TILE * WARPGROUPS  # rows of x in a tile
SHARED_MEMORY = 227 * 1024  # bytes that a thread block of sm_90 may have
RESERVED = 1024  # of them for barriers
OUT_SLOTS = 2  # pieces of the result of a warpgroup on their way to memory
MOST_SUMS = 128  # float32 sums of one thread: registers for two such warpgroups are all there are
REGISTERS = (240, 24)  # of a thread that computes and of one that copies, which together fill the multiprocessor
FULL = 0.8  # of the multiprocessors with a tile: then larger tiles are better than more of them
BUSY = 0.5  # of the multiprocessors with a tile: below that XLA is faster
PAIR = (1024, 3072)  # the smallest K and N at which a gate beside what it gates was measured
PAIR_MOST = (8192, 28672)  # the largest where there are many rows
PAIR_MOST_OF_FEW = (2048, 8192)  # the largest at which the kernel for few rows was faster
PAIR_ROWS = 8  # the fewest rows of that
PADDED = 1.03  # rows of the tiles for each row that there is, at most: what is multiplied in vain has to be won first


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
    """How tiles go to thread blocks.

    Args:
      programs: thread blocks.
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
    """Settings of one launch for many rows; illegal ones cannot be built.

    Args:
      block_n: columns of w (and of the gate) in a tile, a multiple of 64.
      stages: steps of the contraction in flight.
      group: tiles along the rows that are worked on together, so that what they read stays in the cache.
      cut: into how many narrower ones a tile of an incomplete last round may be cut, 1, 2 or 4.
      programs: thread blocks, one for each multiprocessor.
    """

    block_n: int = 256
    stages: int = 4
    group: int = 16
    cut: int = 4
    programs: int = 132

    def __post_init__(self) -> None:
        _check(
            self,
            block_n=(self.block_n in (64, 128, 192, 256), "64, 128, 192 or 256"),
            stages=(2 <= self.stages <= 32, "2 to 32"),
            group=(self.group >= 1, "at least 1"),
            cut=(self.cut in (1, 2, 4), "1, 2 or 4"),
            programs=(self.programs >= 1, "at least 1"),
        )

    def tiles(self, shape: MatmulShape) -> tuple[int, int]:
        """How many tiles cover the result, along rows and columns."""
        return cdiv(shape.M, BLOCK_M), cdiv(shape.N, self.block_n)

    def deal(self, shape: MatmulShape) -> Deal:
        """How the tiles go to the thread blocks."""
        rows, columns = self.tiles(shape)
        programs = min(self.programs, rows * columns)
        whole, rest = divmod(rows * columns, programs)
        fits = (n for n in (4, 2) if n <= self.cut and rest * n <= programs and self.block_n % (n * LANES) == 0)
        return Deal(programs, whole, rest, next(fits, 1) if rest else 1)

    def shared_memory(self, shape: MatmulShape) -> int:
        """Bytes of shared memory that a launch takes, about."""
        stage = 2 * LANES * (BLOCK_M + shape.products * self.block_n)
        piece = BLOCK_M * LANES
        biases = 4 * WARPGROUPS * shape.products * self.block_n
        return self.stages * stage + piece * (OUT_SLOTS * 2 + shape.residual_itemsize) + biases + RESERVED

    def refusals(self, shape: MatmulShape) -> tuple[str, ...]:
        """Why a launch of this shape cannot have these settings; empty when it can."""
        needed, sums = self.shared_memory(shape), shape.products * self.block_n // 2
        rules = (
            (needed > SHARED_MEMORY, f"needs {needed} bytes of shared memory, of which there are {SHARED_MEMORY}"),
            (sums > MOST_SUMS, f"needs {sums} registers for sums, of which there are {MOST_SUMS}"),
        )
        return _sizes(shape, LANES) + tuple(reason for refused, reason in rules if refused)


@dataclasses.dataclass(frozen=True)
class FewRowsConfig:
    """Settings of a launch for few rows; illegal ones cannot be built.

    Args:
      warpgroups: that compute, of 64 outputs each.
      stages: steps of the contraction in flight.
    """

    warpgroups: int = 2
    stages: int = 6

    def __post_init__(self) -> None:
        _check(
            self,
            warpgroups=(1 <= self.warpgroups <= 4, "1 to 4"),
            stages=(2 <= self.stages <= 32, "2 to 32"),
        )

    @property
    def block_n(self) -> int:
        """Outputs of a thread block."""
        return TILE * self.warpgroups

    def shared_memory(self, shape: MatmulShape) -> int:
        """Bytes of shared memory that a launch takes, about."""
        return self.stages * 2 * LANES * (round_up(shape.M, 8) + shape.products * self.block_n) + RESERVED

    def refusals(self, shape: MatmulShape) -> tuple[str, ...]:
        """Why a launch of this shape cannot have these settings; empty when it can."""
        needed = self.shared_memory(shape)
        rules = (
            (shape.M > TILE, f"takes up to {TILE} rows, not {shape.M}"),
            (needed > SHARED_MEMORY, f"needs {needed} bytes of shared memory, of which there are {SHARED_MEMORY}"),
        )
        return _sizes(shape, self.block_n) + tuple(reason for refused, reason in rules if refused)


def _check(config: object, **rules: tuple[bool, str]) -> None:
    for name, (legal, expected) in rules.items():
        if not legal:
            raise ValueError(f"`{name}`: expected {expected}, got {getattr(config, name)}")


def _sizes(shape: MatmulShape, columns: int) -> tuple[str, ...]:
    """What the copy engine cannot describe: rows up to 8 are one block of its own."""
    M, N, K = shape[:3]
    if min(M, N, K) < 1:
        return (f"takes no empty operand, such as [{M}, {K}] x [{K}, {N}]",)
    if (M > 8 and M % 8) or K % LANES or N % columns:
        return (f"needs M, K and N in multiples of 8, {LANES} and {columns}, not of {shape[:3]}",)
    return ()


def weights_and_columns(w: Any, gate: Any, shape: MatmulShape) -> list[tuple[Any, int]]:
    """The weights of each product, W first, and their first column in the array that they are in.

    Args:
      w: [K, N]; or without a `gate` of two products both, [K, 2 N], W_g before W.
      gate: [K, N] or None.
      shape: of the launch.
    """
    if shape.products == 1:
        return [(w, 0)]
    return [(w, shape.N), (w, 0)] if gate is None else [(w, 0), (gate, 0)]


def heuristic(shape: MatmulShape, programs: int = 132) -> FewRowsConfig | MatmulEpilogueConfig:
    """The best settings for a shape, by what was measured at 16, 256 and 8192 rows of 4096 x 14336.

    Few rows read w once, each multiprocessor about 100 KB ahead: more in flight is no faster. Many rows take the
    largest tiles that keep nearly all multiprocessors at work, and as many stages as there is room for.

    Args:
      shape: of the launch.
      programs: multiprocessors of the device.
    """
    if shape.M <= TILE:
        enough = FULL * programs <= shape.N // (2 * TILE)
        warpgroups = 2 if enough and shape.N % (2 * TILE) == 0 else 1
        return FewRowsConfig(warpgroups, 12 // (warpgroups * shape.products))
    most = min(256, 2 * MOST_SUMS // shape.products)
    rows = cdiv(shape.M, BLOCK_M)
    block_n = next((n for n in (most, 128, 64) if n <= most and rows * cdiv(shape.N, n) >= FULL * programs), 64)
    config = MatmulEpilogueConfig(block_n, stages=2, programs=programs)
    while config.stages < 32 and not dataclasses.replace(config, stages=config.stages + 1).refusals(shape):
        config = dataclasses.replace(config, stages=config.stages + 1)
    return config


def passed_over(shape: MatmulShape, programs: int = 132) -> str | None:
    """Why XLA is the better choice for a shape that the kernels can run; None where they are.

    No thread block shares a contraction with another. With tiles for 56 of 132 multiprocessors, at 16 rows, XLA was
    1.08 times as fast as this; with tiles for 112 of them it was slower in every measurement.

    Args:
      shape: of the launch.
      programs: multiprocessors of the device.
    """
    config = heuristic(shape, programs)
    tiles = cdiv(shape.N, config.block_n) * (1 if shape.M <= TILE else cdiv(shape.M, BLOCK_M))
    if tiles >= BUSY * programs:
        return None
    return f"is slower here than XLA: {tiles} tiles leave most of the {programs} multiprocessors without work"


def unmeasured_pair(rows: int, inputs: int, outputs: int) -> str | None:
    """Why one product of a gate and what it gates, [K, 2, N], and then its activation, are left to XLA.

    In bfloat16 with SiLU (H200) tiles full of rows were 1.01 to 1.33 times as fast as XLA, from 128 rows on and from
    1024 x 3072 to 8192 x 28672; 192 and 264 rows, which tiles make 256 and 384, only 0.85 and 0.79 times. From 8 to 64
    rows it was 1.11 to 1.31 times up to 2048 x 8192, and 0.98 to 1.03 times from 4096 x 12288 on. That is taken to
    hold between the sizes that were measured, and for rows that nearly fill their tiles.

    Args:
      rows, inputs, outputs: M, K and N.

    Returns:
      The reason; None where the kernels are known to be faster.
    """
    if rows < PAIR_ROWS:
        return f"was measured to be faster from {PAIR_ROWS} rows on, not for {rows}"
    few, padded = rows <= TILE, round_up(rows, BLOCK_M)
    most = PAIR_MOST_OF_FEW if few else PAIR_MOST
    if not all(low <= size <= high for low, size, high in zip(PAIR, (inputs, outputs), most, strict=True)):
        sizes = f"from {PAIR[0]} x {PAIR[1]} to {most[0]} x {most[1]}"
        return f"was measured to be faster {sizes} with {rows} rows, not for {inputs} x {outputs}"
    if not few and padded > PADDED * rows:
        return f"works on whole tiles of {BLOCK_M} rows, {padded} where there are {rows}"
    return None
