"""Launch configuration of the TPU attention forward."""

import dataclasses

from pallas_kernels.tpu.attention_config import VMEM_BUDGET, check_block, fit_block


@dataclasses.dataclass(frozen=True)
class AttentionForwardConfig:
    """Block sizes, all multiples of 128.

    A block is what is copied and what costs one step of the grid; it is computed in chunks, of which the products of
    the next are issued while the softmax of the last is computed.

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


def vmem_bytes(config: AttentionForwardConfig, H: int, Hv: int, itemsize: int, bias_bytes: int = 0) -> int:
    """What a launch holds in VMEM: two buffers of each block, the accumulators, and scores at two stages of a chunk.

    Args:
      config: the launch.
      H, Hv, itemsize: head sizes, and bytes of an element of query, key and value.
      bias_bytes: bytes of bias and mask for each pair of a block.
    """
    lanes = [-(-size // 128) * 128 for size in (H, Hv)]
    operands = itemsize * (config.block_q + config.block_kv) * sum(lanes) + 4 * 128 * config.block_q
    scores = 2 * 4 * max(config.chunk_q * config.block_kv, config.chunk_q * config.chunk_kv)
    pairs = bias_bytes * config.block_q * config.block_kv
    return 2 * (operands + pairs) + 4 * config.block_q * (lanes[1] + 256) + scores


def heuristic(
    T: int, S: int, H: int, Hv: int, itemsize: int, bias_bytes: int = 0, matrix_unit: int = 128
) -> AttentionForwardConfig:
    """The configuration for a call: the largest blocks up to 1024 that fit, chunks of 512 keys.

    Args:
      T, S, H, Hv, itemsize: sizes, and bytes of an element of query, key and value.
      bias_bytes: bytes of bias and mask for each pair of a block.
      matrix_unit: rows and columns of the chip's matrix unit: a chunk's queries are twice as many.
    """
    largest = 1024
    while True:
        block_q, block_kv = fit_block(T, largest), fit_block(S, largest)
        config = AttentionForwardConfig(block_q, block_kv, _chunk(block_q, 2 * matrix_unit), _chunk(block_kv, 512))
        if largest == 128 or vmem_bytes(config, H, Hv, itemsize, bias_bytes) <= VMEM_BUDGET:
            return config
        largest //= 2


def candidates(T: int, S: int, H: int, Hv: int, itemsize: int) -> tuple[AttentionForwardConfig, ...]:
    """Legal configurations worth measuring for a call."""
    found = {
        AttentionForwardConfig(q, kv, _chunk(q, chunk), _chunk(kv, 512))
        for largest_q in (512, 1024)
        for largest_kv in (512, 1024)
        for chunk in (256, 512)
        for q, kv in [(fit_block(T, largest_q), fit_block(S, largest_kv))]
    }
    fitting = [config for config in found if vmem_bytes(config, H, Hv, itemsize) <= VMEM_BUDGET]
    return tuple(sorted(fitting, key=dataclasses.astuple))


def _chunk(block: int, largest: int) -> int:
    """The largest divisor of a block that is a multiple of 128 and at most `largest`."""
    return next(chunk for chunk in range(min(block, largest), 0, -128) if block % chunk == 0)
