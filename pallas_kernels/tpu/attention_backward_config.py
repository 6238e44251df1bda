"""Launch configuration of the TPU attention backward."""

import dataclasses

from pallas_kernels.tpu.attention_config import VMEM_BUDGET, check_block, fit_block


@dataclasses.dataclass(frozen=True)
class AttentionBackwardConfig:
    """Block sizes, all multiples of 128; blocks and chunks as in the forward.

    Args:
      block_q, block_kv: queries and keys of a block.
      chunk_q, chunk_kv: queries and keys of a chunk.
    """

    block_q: int = 512
    block_kv: int = 512
    chunk_q: int = 512
    chunk_kv: int = 512

    def __post_init__(self) -> None:
        check_block("block_q", self.block_q, self.chunk_q)
        check_block("block_kv", self.block_kv, self.chunk_kv)


def query_gradient_bytes(T: int, H: int) -> int:
    """VMEM of one head's query gradient, which stays there in float32 while all of the head's blocks are visited."""
    return 4 * T * (-(-H // 128) * 128)


def vmem_bytes(config: AttentionBackwardConfig, T: int, H: int, Hv: int, itemsize: int, bias_bytes: int = 0) -> int:
    """What a launch holds in VMEM: the query gradient, two buffers of each block, accumulators, four tiles of scores.

    Args:
      config: the launch.
      T, H, Hv, itemsize: queries, head sizes, and bytes of an element of query, key and value.
      bias_bytes: bytes of bias, its gradient and mask for each pair of a block.
    """
    lanes = sum(-(-size // 128) * 128 for size in (H, Hv))
    operands = itemsize * (config.block_q + 2 * config.block_kv) * lanes
    pairs = bias_bytes * config.block_q * config.block_kv
    scores = 4 * 4 * config.chunk_q * config.chunk_kv
    return query_gradient_bytes(T, H) + 2 * (operands + pairs) + 4 * config.block_kv * lanes + scores


def heuristic(T: int, S: int, H: int, Hv: int, itemsize: int, bias_bytes: int = 0) -> AttentionBackwardConfig:
    """The configuration for a call: the largest blocks up to 1024 that fit beside the query gradient."""
    largest = 1024
    while True:
        block_q, block_kv = fit_block(T, largest), fit_block(S, largest)
        config = AttentionBackwardConfig(block_q, block_kv, _chunk(block_q), _chunk(block_kv))
        rest = vmem_bytes(config, T, H, Hv, itemsize, bias_bytes) - query_gradient_bytes(T, H)
        if largest == 128 or rest <= VMEM_BUDGET // 2:
            return config
        largest //= 2


def candidates(T: int, S: int, H: int, Hv: int, itemsize: int) -> tuple[AttentionBackwardConfig, ...]:
    """Legal configurations worth measuring for a call."""
    found = {
        AttentionBackwardConfig(q, kv, _chunk(q), _chunk(kv))
        for largest_q in (512, 1024)
        for largest_kv in (512, 1024)
        for q, kv in [(fit_block(T, largest_q), fit_block(S, largest_kv))]
    }
    return tuple(sorted(found, key=dataclasses.astuple))


def _chunk(block: int, largest: int = 512) -> int:
    """The largest divisor of a block that is a multiple of 128 and at most `largest`."""
    return next(chunk for chunk in range(min(block, largest), 0, -128) if block % chunk == 0)
