"""Launch settings of the Hopper attention backward: what is legal, a heuristic, and the candidates of a search."""

import dataclasses
from typing import Any

from pallas_kernels.gpu.hopper.attention_forward_config import RESERVED, SHARED_MEMORY, TILE, AttentionShape
from pallas_kernels.launch import cdiv, round_up

HEAD_SIZES = ((64, 64), (128, 64), (128, 128))  # (H, Hv)
WIDE_HEAD_SIZES = ((256, 256),)  # always in two kernels
LENGTH_MULTIPLE = 8  # shared memory is swizzled in groups of eight rows
L2_SHARE = 24 * 2**20  # bytes
PROGRAMS = 128  # about as many as there are multiprocessors
BLOCK_Q = 128  # queries of a thread block that sums dQ alone


class BackwardShape(AttentionShape):
    """Sizes of one launch of the backward."""

    @property
    def wide(self) -> bool:
        """Whether dK and dV of 64 keys do not fit one warpgroup's registers together."""
        return self.H + self.Hv > 256

    @property
    def block_kv(self) -> int:
        """Keys of a thread block that sums dK and dV: 64 for each of two warpgroups, or 64 and one sum for each."""
        return TILE if self.wide else 2 * TILE

    @property
    def dq_tiles(self) -> tuple[int, ...]:
        """Shape of the float32 sums of dQ, [B, N, queries / 64, H / 64, 64, 64] in whole blocks.

        Tiles are contiguous, and the numbers of each are in the order of `attention_backward_sums.add_fragments`.
        """
        return (self.B, self.N, round_up(self.T, BLOCK_Q) // TILE, self.H // TILE, TILE, TILE)


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Launch settings.

    Args:
      block_q: queries that meet a block of keys at once, for dK and dV; 64 or 128.
      stages: blocks of queries that are in shared memory at once.
      block_kv: keys that meet a block of queries at once, where dQ has a kernel of its own; 64 or 128.
      kv_stages: blocks of keys that are in shared memory at once there.
      section: key/value heads, over the batch, that are worked on together, with all queries of each.
      compute_registers, copy_registers: of a thread that computes, and of one that copies.
    """

    block_q: int = 64
    stages: int = 2
    block_kv: int = 128
    kv_stages: int = 2
    section: int = 8
    compute_registers: int = 240
    copy_registers: int = 24

    def __post_init__(self) -> None:
        for name, low, high in (("stages", 1, 4), ("kv_stages", 1, 4), ("section", 1, 2**16)):
            _check(name, getattr(self, name), range(low, high + 1), f"an integer in [{low}, {high}]")
        for name in ("block_q", "block_kv"):
            _check(name, getattr(self, name), (64, 128), "64 or 128")
        for name in ("compute_registers", "copy_registers"):
            _check(name, getattr(self, name), range(24, 257, 8), "a multiple of 8 in [24, 256]")
        if 2 * self.compute_registers + self.copy_registers > 512:
            raise ValueError(
                "`compute_registers`: expected two times them and copy_registers to be at most 512, "
                f"got {self.compute_registers} and {self.copy_registers}"
            )


def _check(name: str, value: Any, legal: Any, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value not in legal:
        raise ValueError(f"`{name}`: expected {expected}, got {value!r}")


def is_fused(shape: BackwardShape, *, deterministic: bool) -> bool:
    """Whether one kernel computes all three gradients."""
    return not (deterministic or shape.wide)


def key_block_bytes(shape: BackwardShape, config: BackwardConfig, *, fused: bool) -> int:
    """Bytes of shared memory of a thread block that sums dK and dV, and with `fused` its part of dQ."""
    keys = shape.block_kv * (shape.H + shape.Hv) * 2
    queries = config.stages * config.block_q * (2 * (shape.H + shape.Hv) + 2 * 4)
    exchange = 2 * shape.block_kv * config.block_q * 2 if fused else 0
    return keys + queries + exchange + RESERVED


def query_block_bytes(shape: BackwardShape, config: BackwardConfig) -> int:
    """Bytes of shared memory of a thread block that sums dQ alone."""
    return (BLOCK_Q + config.kv_stages * config.block_kv) * (shape.H + shape.Hv) * 2 + RESERVED


def config_refusals(shape: BackwardShape, config: BackwardConfig, *, deterministic: bool) -> tuple[str, ...]:
    """Why these settings are not legal for a call; empty when they are."""
    fused = is_fused(shape, deterministic=deterministic)
    key_bytes = key_block_bytes(shape, config, fused=fused)
    query_bytes = 0 if fused else query_block_bytes(shape, config)
    # Per thread: the sums, and the scores and their gradient of one step.
    registers = (max(shape.H, shape.Hv) if shape.wide else shape.H + shape.Hv) // 2 + config.block_q
    query_registers = 0 if fused else shape.H // 2 + config.block_kv
    rules = (
        (key_bytes > SHARED_MEMORY, f"dK and dV: {key_bytes} bytes of shared memory are more than {SHARED_MEMORY}"),
        (query_bytes > SHARED_MEMORY, f"dQ: {query_bytes} bytes of shared memory are more than {SHARED_MEMORY}"),
        (registers > 192, f"block_q = {config.block_q} does not fit the registers at H = {shape.H}"),
        (query_registers > 192, f"block_kv = {config.block_kv} does not fit the registers at H = {shape.H}"),
        (
            fused and config.block_q == 64 and shape.H % 128 != 0,
            f"block_q = 64 splits dQ over two warpgroups by columns of 64, which H = {shape.H} has not twice",
        ),
    )
    return tuple(reason for refused, reason in rules if refused)


def heuristic(shape: BackwardShape) -> BackwardConfig:
    """Settings for a call: the largest blocks that fit the registers, and sections of heads by `_section`."""
    section = _section(shape)
    if shape.wide:
        return BackwardConfig(block_kv=64, kv_stages=1, section=section)
    return BackwardConfig(block_q=128 if shape.H + shape.Hv <= 128 else 64, section=section)


def _section(shape: BackwardShape) -> int:
    """Heads of a section: about half the L2 cache, and no fewer than give every multiprocessor a block of keys.

    The last section decides how evenly the work ends: all of its blocks of keys are put in order of their length, so
    that a section should be a whole one, and not a few long blocks. It divides the number of heads where it can.
    """
    bytes_per_head = max(1, shape.T * (4 * shape.H + 2 * (shape.H + shape.Hv)) * shape.G)
    blocks, heads = max(1, cdiv(shape.S, shape.block_kv)), max(1, shape.B * shape.K)
    limit = min(heads, 64, max(L2_SHARE // bytes_per_head, cdiv(PROGRAMS, blocks)))
    divisor = max(n for n in range(1, limit + 1) if heads % n == 0)
    return divisor if 2 * divisor > limit else limit


def candidates(shape: BackwardShape, *, deterministic: bool) -> tuple[BackwardConfig, ...]:
    """Legal settings worth timing, the heuristic's first."""
    first = heuristic(shape)
    rings = {(first.block_kv, first.kv_stages)}
    if not is_fused(shape, deterministic=deterministic):
        rings |= {(128, 2), (64, 2), (64, 3)}
    others = (
        dataclasses.replace(
            first, block_q=block_q, stages=stages, block_kv=block_kv, kv_stages=kv_stages, section=section
        )
        for block_q in (64, 128)
        for stages in (2, 3)
        for block_kv, kv_stages in sorted(rings)
        for section in sorted({first.section, 4, 16})
    )
    legal = (c for c in others if c != first and not config_refusals(shape, c, deterministic=deterministic))
    return (first, *legal)


def refusals(shape: BackwardShape, *, itemsize: int) -> tuple[str, ...]:
    """Why the kernels cannot take a call; empty when they can."""
    rules = (
        (itemsize != 2, f"takes elements of two bytes (bfloat16, float16), not of {itemsize}"),
        (
            (shape.H, shape.Hv) not in HEAD_SIZES + WIDE_HEAD_SIZES,
            f"takes head sizes (H, Hv) of {HEAD_SIZES + WIDE_HEAD_SIZES}, not ({shape.H}, {shape.Hv})",
        ),
        (
            shape.T % LENGTH_MULTIPLE != 0 or shape.S % LENGTH_MULTIPLE != 0,
            f"takes lengths that are multiples of {LENGTH_MULTIPLE}, not T = {shape.T} and S = {shape.S}",
        ),
    )
    return tuple(reason for refused, reason in rules if refused)
