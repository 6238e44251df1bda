"""Launch configuration of the TPU matmul with a tail."""

import dataclasses

from pallas_kernels.launch import round_up
from pallas_kernels.tpu.attention_config import LANES, VMEM_BUDGET

SUBLANES = 16  # rows of a bfloat16 tile


@dataclasses.dataclass(frozen=True)
class MatmulEpilogueConfig:
    """Block sizes.

    Args:
      block_m: rows of x, a multiple of 16.
      block_n: columns of w, a multiple of 128.
      block_k: how much of the contraction is taken at a time, a multiple of 128.
    """

    block_m: int = 512
    block_n: int = 512
    block_k: int = 512

    def __post_init__(self) -> None:
        if (
            min(dataclasses.astuple(self)) < 1
            or self.block_m % SUBLANES
            or self.block_n % LANES
            or self.block_k % LANES
        ):
            raise ValueError(f"`block_m`: expected multiples of {SUBLANES}, {LANES} and {LANES}, got {self}")


def vmem_bytes(config: MatmulEpilogueConfig, itemsize: int, products: int) -> int:
    """What a launch holds in VMEM: two buffers of each operand and of residual and result, and float32 sums."""
    x, w = config.block_m * config.block_k, products * config.block_k * config.block_n
    rows = config.block_m * config.block_n
    return 2 * itemsize * (x + w + 2 * rows) + 4 * products * rows


def heuristic(M: int, N: int, K: int, itemsize: int, products: int = 1) -> MatmulEpilogueConfig:
    """The configuration for [M, K] x [K, N]: few rows take long blocks of w, which is read once a block of rows.

    Args:
      M, N, K: sizes.
      itemsize: bytes of an element of x and w.
      products: 2 with a gate.
    """
    block_m = min(512, round_up(M, SUBLANES))
    largest_n, largest_k = (1024, 1024) if block_m == 512 else (512, 2048)
    while True:
        config = MatmulEpilogueConfig(block_m, min(largest_n, round_up(N, LANES)), min(largest_k, round_up(K, LANES)))
        if largest_k == LANES or vmem_bytes(config, itemsize, products) <= VMEM_BUDGET:
            return config
        largest_k //= 2
