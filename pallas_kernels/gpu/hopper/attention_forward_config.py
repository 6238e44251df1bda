"""Launch settings of the Hopper attention forward: what is legal, a heuristic, and the candidates of a search."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

TILE = 64  # rows of one wgmma
SHARED_MEMORY = 227 * 1024  # bytes that a thread block of sm_90 may have
RESERVED = 2048  # of them for barriers and reductions
REGISTERS = 64 * 1024  # of a multiprocessor
SECTION = 8 * 2**20  # bytes of K and V that are worked on together: of 8 to 32 MB, what ran fastest on an H200

# Orders of the loop, and queries that are copied ahead: each with what it needs.
PLAIN: dict[str, Any] = {"query_buffers": 1, "early_turn": 0, "lazy_sum": False}
AHEAD: dict[str, Any] = {"early_turn": 2, "stages": 2}
BUFFERS: dict[str, Any] = {"query_buffers": 2, "shared_output": False}
# Part of the best settings of all seven shapes of H = Hv = 128 timed on an H200, 1.02 to 1.10 times as fast as with
# the plain loop. Two shapes, which their masks alone tell from others, were fastest with `AHEAD` on top.
FAST: dict[str, Any] = BUFFERS | {"early_turn": 1, "lazy_sum": True}
LOOPS: tuple[dict[str, Any], ...] = (
    PLAIN,
    PLAIN | {"early_turn": 1},
    PLAIN | AHEAD,
    PLAIN | AHEAD | {"lazy_sum": True},
    PLAIN | BUFFERS,
    FAST,
    FAST | AHEAD,
)


class AttentionShape(NamedTuple):
    """Sizes of one launch, in the letters of `flashspec.dims`."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int

    @property
    def G(self) -> int:
        """Query heads per key/value head."""
        return self.N // self.K

    @classmethod
    def of[Shape: "AttentionShape"](cls: type[Shape], query: Any, key: Any, value: Any) -> Shape:
        """The sizes of [B, T, N, H], [B, S, K, H] and [B, S, K, Hv]."""
        B, T, N, H = query.shape
        return cls(B, T, key.shape[1], N, key.shape[2], H, value.shape[3])


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Settings of one launch; illegal ones cannot be built.

    Args:
      block_kv: keys of one step, a multiple of 64 up to 256.
      stages: blocks of K and of V in flight.
      warpgroups: compute warpgroups, of 64 queries each.
      programs: thread blocks that share the tiles out among them, one for each multiprocessor; 0 for one a tile.
      heads_per_section: key/value heads that are worked on together, so that their K and V stay in the cache.
      shared_output: whether the output leaves through the memory of Q, where there is no room for both.
      query_buffers: tiles of Q in shared memory: with 2, the next one is copied while one is computed.
      early_turn: how early a warpgroup waits for its turn at the matrix units. 0: between the accumulator of the scores
        and their product; 1: ahead of the accumulator, which then need not be cleared; 2: ahead of the wait for the
        product with the values too, which holds the exponentials beside that product. With one stage, 2 would never
        end: who has the turn waits for keys that come after values which the others keep until they have the turn.
      lazy_sum: whether l is summed within a thread, and over threads at the end of a tile alone.
    """

    block_kv: int = 128
    stages: int = 2
    warpgroups: int = 2
    programs: int = 132
    heads_per_section: int = 4
    shared_output: bool = False
    query_buffers: int = 1
    early_turn: int = 0
    lazy_sum: bool = False

    def __post_init__(self) -> None:
        buffers = (1,) if self.shared_output else (1, 2)
        turns = (0, 1) if self.stages == 1 else (0, 1, 2)
        for name, legal, expected in (
            ("block_kv", self.block_kv % 64 == 0 and 64 <= self.block_kv <= 256, "a multiple of 64 from 64 to 256"),
            ("stages", 1 <= self.stages <= 8, "1 to 8"),
            ("warpgroups", self.warpgroups in (1, 2, 3), "1, 2 or 3"),
            ("programs", self.programs >= 0, "at least 0"),
            ("heads_per_section", self.heads_per_section >= 1, "at least 1"),
            ("query_buffers", self.query_buffers in buffers, "1, or 2 without `shared_output`"),
            ("early_turn", self.early_turn in turns, "0, 1, or 2 with several stages"),
        ):
            if not legal:
                raise ValueError(f"`{name}`: expected {expected}, got {getattr(self, name)}")

    @property
    def tile_q(self) -> int:
        """Queries of one tile."""
        return TILE * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes and of one that copies, which together fill the multiprocessor."""
        return {1: (240, 40), 2: (240, 24), 3: (160, 32)}[self.warpgroups]

    def shared_memory(self, shape: AttentionShape, statistics: bool = False) -> int:
        """Bytes of shared memory that a launch takes, about."""
        stage = self.block_kv * (shape.H + shape.Hv) * 2
        output = 0 if self.shares_output(shape, statistics) else self.tile_q * shape.Hv * (4 if statistics else 2)
        rows = 2 * self.tile_q * 4
        return self.stages * stage + self.query_buffers * self.tile_q * shape.H * 2 + output + rows + RESERVED

    def shares_output(self, shape: AttentionShape, statistics: bool) -> bool:
        """Whether the output leaves through the memory of Q: where asked for, and where it is as large."""
        return self.shared_output and not statistics and shape.Hv == shape.H

    def refusals(self, shape: AttentionShape, statistics: bool = False) -> tuple[str, ...]:
        """Why a launch of this shape cannot have these settings; empty when it can."""
        needed = self.shared_memory(shape, statistics)
        rules = (
            (needed > SHARED_MEMORY, f"needs {needed} bytes of shared memory, of which there are {SHARED_MEMORY}"),
            (shape.H % 64 or shape.Hv % 64, f"needs head sizes in multiples of 64, not {shape.H} and {shape.Hv}"),
            (max(shape.H, shape.Hv) > 256, f"needs head sizes up to 256, not {shape.H} and {shape.Hv}"),
            (shape.T % 8 or shape.S % 8, f"needs lengths in multiples of 8, not {shape.T} and {shape.S}"),
        )
        return tuple(reason for refused, reason in rules if refused)


def heuristic(shape: AttentionShape, statistics: bool = False, programs: int = 132) -> ForwardConfig:
    """Settings for a shape that nobody has tuned.

    Args:
      shape: of the launch.
      statistics: whether it returns (m, l, u), whose u takes twice the memory.
      programs: multiprocessors of the device.
    """
    wide = max(shape.H, shape.Hv) > 128
    heads = SECTION // max(1, shape.S * (shape.H + shape.Hv) * 2)
    small = ForwardConfig(
        block_kv=64 if wide or statistics else 128,
        stages=2,
        warpgroups=3 if max(shape.H, shape.Hv) == 64 and not statistics else 2,
        programs=programs,
        heads_per_section=min(max(heads, 4), 16),
        shared_output=wide,
    )
    if small.refusals(shape._replace(T=8, S=8), statistics):
        small = dataclasses.replace(small, stages=1, warpgroups=1)
    return dataclasses.replace(small, **FAST) if shape.H == shape.Hv == 128 else small


def candidates(shape: AttentionShape, statistics: bool = False, programs: int = 132) -> Iterator[ForwardConfig]:
    """Legal settings that are worth timing for a shape, the heuristic's first."""
    first = heuristic(shape, statistics, programs)
    blocks = itertools.product((2, 3), (64, 128, 192), (2, 3))
    changes = [dict(zip(("warpgroups", "block_kv", "stages"), block, strict=True)) for block in blocks]
    sections = dict.fromkeys((first.heads_per_section, 1, 4, 16))
    others = (
        dataclasses.replace(first, heads_per_section=heads, **change)
        for change, heads in itertools.product((*changes, *LOOPS), sections)
    )
    for config in dict.fromkeys((first, *others)):
        if not config.refusals(shape, statistics):
            yield config
