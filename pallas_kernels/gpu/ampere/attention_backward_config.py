"""Launch settings of the portable attention backward: what is legal, a heuristic, and the candidates of a search."""

import dataclasses
import itertools
from collections.abc import Iterator

from pallas_kernels.gpu.ampere.attention_forward_config import RESERVED, TILE, AttentionShape

HEAD_SIZES = ((64, 64), (128, 64), (128, 128))  # (H, Hv)


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Settings of one launch; illegal ones cannot be built.

    Args:
      block_q: queries that meet a block of keys at once, for dK and dV; 64 or 128.
      stages: blocks of queries that are in shared memory at once, 1 or 2.
      warpgroups: of a thread block that sums dK and dV, 64 keys each; 1 or 2.
      tile_q: queries of a thread block that sums dQ alone, 64 or 128.
      block_kv: keys that meet them at once, 16, 32 or 64.
      section: heads, over the batch, that are worked on together.
      halves: whether each of two warpgroups scores all keys with half of the queries and sums one of dK and dV, instead
        of both for half of the keys.
      bulk: whether tiles are copied, and parts of dQ added, by the copy engine (from compute capability 9.0 on).
    """

    block_q: int = 64
    stages: int = 2
    warpgroups: int = 2
    tile_q: int = 128
    block_kv: int = 32
    section: int = 8
    bulk: bool = False
    halves: bool = False

    def __post_init__(self) -> None:
        for name, legal, expected in (
            ("block_q", self.block_q in (64, 128), "64 or 128"),
            ("stages", self.stages in (1, 2), "1 or 2"),
            ("warpgroups", self.warpgroups in (1, 2), "1 or 2"),
            ("tile_q", self.tile_q in (64, 128), "64 or 128"),
            ("block_kv", self.block_kv in (16, 32, 64), "16, 32 or 64"),
            ("section", self.section >= 1, "at least 1"),
        ):
            if not legal:
                raise ValueError(f"`{name}`: expected {expected}, got {getattr(self, name)}")

    @property
    def keys(self) -> int:
        """Keys of a thread block that sums dK and dV."""
        return TILE * self.warpgroups

    def dq_share(self, H: int) -> tuple[int, int]:
        """Shape of a warpgroup's share of a block of dQ: all of it, half of the queries, or half of the columns."""
        if self.warpgroups == 1:
            return self.block_q, H
        return (TILE, H) if self.block_q == 2 * TILE else (self.block_q, H // 2)

    def key_block_bytes(self, shape: AttentionShape, *, fused: bool) -> int:
        """Bytes of shared memory of a thread block that sums dK and dV, and with `fused` its part of dQ."""
        tiles = 2 * (self.keys + self.stages * self.block_q) * (shape.H + shape.Hv)
        exchanged = 2 * self.keys * self.block_q
        dq = exchanged + (4 * self.block_q * shape.H if self.bulk else 0) if fused else 0
        return tiles + dq + (exchanged * (1 if fused else 2) if self.halves else 0) + RESERVED

    def query_block_bytes(self, shape: AttentionShape) -> int:
        """Bytes of shared memory of a thread block that sums dQ alone."""
        return 2 * (self.tile_q + 2 * self.block_kv) * (shape.H + shape.Hv) + RESERVED

    def refusals(self, shape: AttentionShape, memory: int, *, deterministic: bool) -> tuple[str, ...]:
        """Why a launch of this shape cannot have these settings; empty when it can.

        Args:
          shape: of the launch.
          memory: bytes of shared memory that a thread block may have.
          deterministic: whether dQ has a kernel of its own.
        """
        key_bytes = self.key_block_bytes(shape, fused=not deterministic)
        query_bytes = self.query_block_bytes(shape) if deterministic else 0
        # Per thread: the sums, and the scores and their gradient of one step.
        sums = max(shape.H, shape.Hv) if self.halves else (shape.H + shape.Hv) // 2
        registers = sums + self.block_q
        query_registers = self.tile_q * (shape.H + 2 * self.block_kv) // 128 if deterministic else 0
        columns = not deterministic and self.warpgroups == 2 and self.block_q == 64
        rules = (
            (key_bytes > memory, f"dK and dV: {key_bytes} bytes of shared memory are more than {memory}"),
            (self.halves and self.warpgroups == 1, "halves are for two warpgroups"),
            (query_bytes > memory, f"dQ: {query_bytes} bytes of shared memory are more than {memory}"),
            (registers > 192, f"block_q = {self.block_q} does not fit the registers at H = {shape.H}"),
            (query_registers > 208, f"block_kv = {self.block_kv} does not fit the registers at H = {shape.H}"),
            (
                (shape.H, shape.Hv) not in HEAD_SIZES,
                f"takes head sizes (H, Hv) of {HEAD_SIZES}, not ({shape.H}, {shape.Hv})",
            ),
            (
                columns and shape.H % 128,
                f"block_q = 64 splits dQ over two warpgroups by columns of 64, which H = {shape.H} has not twice",
            ),
            (shape.T % self.block_q, f"needs T in multiples of {self.block_q}, not {shape.T}"),
            (deterministic and shape.T % self.tile_q, f"needs T in multiples of {self.tile_q}, not {shape.T}"),
            (shape.S % self.keys, f"needs S in multiples of {self.keys}, not {shape.S}"),
            (deterministic and shape.S % self.block_kv, f"needs S in multiples of {self.block_kv}, not {shape.S}"),
        )
        return tuple(reason for refused, reason in rules if refused)


def heuristic(shape: AttentionShape, memory: int, *, bulk: bool, deterministic: bool = False) -> BackwardConfig:
    """Settings for a shape that nobody has tuned: the largest blocks that fit, with a copy engine in halves.

    Args:
      shape: of the launch.
      memory: bytes of shared memory that a thread block may have.
      bulk: whether the GPU has a copy engine.
      deterministic: whether dQ has a kernel of its own.
    """
    bytes_per_head = max(1, shape.T * (4 * shape.H + 2 * (shape.H + shape.Hv)) * shape.G)
    section = max(1, min(64, 24 * 2**20 // bytes_per_head))
    fallback = BackwardConfig(64, 1, 1, 64, 16, section, bulk)
    forms = (True, False) if bulk and not deterministic else (False,)
    sizes = itertools.product((2, 1), (2, 1), (128, 64), ((128, 32), (64, 32), (64, 16)), forms)
    for warpgroups, stages, block_q, (tile_q, block_kv), halves in sizes:
        config = BackwardConfig(block_q, stages, warpgroups, tile_q, block_kv, section, bulk, halves)
        if not config.refusals(shape, memory, deterministic=deterministic):
            return config
    return fallback


def candidates(shape: AttentionShape, memory: int, *, bulk: bool, deterministic: bool) -> Iterator[BackwardConfig]:
    """Legal settings worth timing, the heuristic's first."""
    first = heuristic(shape, memory, bulk=bulk, deterministic=deterministic)
    yield first
    own = ((128, 32), (64, 64), (64, 32)) if deterministic else ((first.tile_q, first.block_kv),)
    sizes = itertools.product((2, 1), (1, 2), (64, 128), own, (False, True))
    for warpgroups, stages, block_q, (tile_q, block_kv), halves in sizes:
        config = BackwardConfig(block_q, stages, warpgroups, tile_q, block_kv, first.section, bulk, halves)
        if config != first and not config.refusals(shape, memory, deterministic=deterministic):
            yield config
