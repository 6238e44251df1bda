"""Launch settings of the portable attention forward: what is legal, a heuristic, and the candidates of a search."""

import dataclasses
import itertools
from collections.abc import Iterator

from pallas_kernels.gpu.hopper.attention_forward_config import AttentionShape

__all__ = ["AttentionShape", "ForwardConfig", "candidates", "heuristic", "shared_memory"]

TILE = 64  # rows of one mma over four warps
REGISTERS = 255  # of a thread
RESERVED = 1024  # bytes of shared memory that the compiler and barriers take
SECTION = 32 * 2**20  # bytes of K and V that are worked on together
MIXED = 40  # registers of a thread for addresses, limits and operands of products in flight


def shared_memory(capability: str | None) -> int:
    """Bytes of shared memory that one thread block may have on a GPU of a compute capability such as "8.0".

    Known are 163 KB of 8.0 and 8.7, 227 KB of 9.0, 10.0 and 10.3, and 99 KB of all others from 8.6 on; without a
    capability, what all of them have.
    """
    return {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}.get(capability or "", 99) * 1024


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Settings of one launch; illegal ones cannot be built.

    Args:
      tile_q: queries of a thread block, 64 or 128: 16 or 32 to a warp.
      block_kv: keys of one step, a multiple of 16 up to 128.
      stages: 1 or 2 blocks of K and of V in shared memory.
      section: key/value heads, over the batch, that are worked on together, so that their K and V stay in the cache.
      bulk: whether tiles are copied by the copy engine, which GPUs have from compute capability 9.0 on.
    """

    tile_q: int = 128
    block_kv: int = 64
    stages: int = 2
    section: int = 4
    bulk: bool = False

    def __post_init__(self) -> None:
        for name, legal, expected in (
            ("tile_q", self.tile_q in (64, 128), "64 or 128"),
            ("block_kv", self.block_kv in (16, 32, 64, 128), "16, 32, 64 or 128"),
            ("stages", self.stages in (1, 2), "1 or 2"),
            ("section", self.section >= 1, "at least 1"),
        ):
            if not legal:
                raise ValueError(f"`{name}`: expected {expected}, got {getattr(self, name)}")

    def shared_memory(self, shape: AttentionShape) -> int:
        """Bytes of shared memory that a thread block takes, about."""
        return 2 * (self.tile_q * shape.H + self.stages * self.block_kv * (shape.H + shape.Hv)) + RESERVED

    def registers(self, shape: AttentionShape) -> int:
        """Registers that a thread takes for the sums and the scores of one step, and for what is beside them."""
        return self.tile_q * (shape.Hv + self.block_kv) // 128 + MIXED

    def refusals(self, shape: AttentionShape, memory: int) -> tuple[str, ...]:
        """Why a launch of this shape cannot have these settings; empty when it can.

        Args:
          shape: of the launch.
          memory: bytes of shared memory that a thread block may have.
        """
        needed = self.shared_memory(shape)
        rules = (
            (needed > memory, f"needs {needed} bytes of shared memory, of which there are {memory}"),
            (self.registers(shape) > REGISTERS, f"needs {self.registers(shape)} registers of {REGISTERS}"),
            (shape.H % 64 or shape.Hv % 64, f"needs head sizes in multiples of 64, not {shape.H} and {shape.Hv}"),
            (max(shape.H, shape.Hv) > 256, f"needs head sizes up to 256, not {shape.H} and {shape.Hv}"),
            (shape.T % self.tile_q, f"needs T in multiples of {self.tile_q}, not {shape.T}"),
            (shape.S % self.block_kv, f"needs S in multiples of {self.block_kv}, not {shape.S}"),
        )
        return tuple(reason for refused, reason in rules if refused)


def heuristic(shape: AttentionShape, memory: int, *, bulk: bool) -> ForwardConfig:
    """Settings for a shape that nobody has tuned: the largest tiles that fit.

    Args:
      shape: of the launch.
      memory: bytes of shared memory that a thread block may have.
      bulk: whether the GPU has a copy engine.
    """
    heads = SECTION // max(1, shape.S * (shape.H + shape.Hv) * 2)
    section = min(max(heads, 1), 16)
    for tile_q, block_kv, stages in itertools.product((128, 64), (64, 32, 16), (2, 1)):
        config = ForwardConfig(tile_q, block_kv, stages, section, bulk)
        if not config.refusals(shape, memory):
            return config
    return ForwardConfig(64, 16, 1, section, bulk)


def candidates(shape: AttentionShape, memory: int, *, bulk: bool) -> Iterator[ForwardConfig]:
    """Legal settings that are worth timing for a shape, the heuristic's first."""
    first = heuristic(shape, memory, bulk=bulk)
    yield first
    for tile_q, block_kv, stages, section in itertools.product((128, 64), (128, 64, 32), (1, 2), (1, 4, 16)):
        config = ForwardConfig(tile_q, block_kv, stages, section, bulk)
        if config != first and not config.refusals(shape, memory):
            yield config
