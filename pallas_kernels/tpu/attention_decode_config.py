"""Launch configuration of TPU decode attention."""

import dataclasses

from pallas_kernels.launch import round_up
from pallas_kernels.tpu.attention_config import LANES

# Bytes of keys in one block: enough that a copy's latency costs little, and two blocks of keys and values fit anywhere.
BLOCK_BYTES = 2**20
# Scores of one tile: the heads whose softmax is computed at once.
TILE = 64 * 1024
# Positions of a tile of bfloat16: where heads lie apart, a copy begins and ends with one.
ROWS = 16


def heads_lie_apart(K: int) -> bool:
    """Whether XLA lays K heads out as [K, S, H] rather than [S, K, H], their number filling no tile."""
    return K not in (2, 4) and K % 8 != 0


@dataclasses.dataclass(frozen=True)
class AttentionDecodeConfig:
    """How the keys of a row are cut up.

    Args:
      block_kv: slots that are copied at a time; whole pages of a paged cache.
      chunk_kv: slots that are computed at a time; divides `block_kv`.
      heads: key/value heads that are computed at a time; divides K.
      splits: parts of the keys with statistics of their own, merged afterwards: one for each core that shares a grid.
    """

    block_kv: int = 512
    chunk_kv: int = 512
    heads: int = 1
    splits: int = 1

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 1 or self.block_kv % self.chunk_kv:
            raise ValueError(f"`block_kv`: expected positive numbers and whole chunks, got {self}")


def heuristic(
    S: int, K: int, rows: int, H: int, Hv: int, itemsize: int, page: int = 1, splits: int = 1
) -> AttentionDecodeConfig:
    """The configuration for S slots of K heads: about `BLOCK_BYTES` of keys a block, in whole pages.

    Args:
      S, K, H, Hv, itemsize: slots of a row, key/value heads, head sizes, bytes of an element.
      rows: query rows of one key/value head, G T.
      page: slots of a page, 1 where there are none.
      splits: parts of the keys, one for each core that shares a grid.
    """
    block = max(LANES, min(1024, BLOCK_BYTES // (K * max(H, Hv) * itemsize) // LANES * LANES))
    block = max(1, block // page) * page if page > 1 else min(block, max(S, 1))
    chunk = LANES if block % LANES == 0 else block
    rows = round_up(rows, 8)
    heads = next(heads for heads in range(K, 0, -1) if K % heads == 0 and (heads == 1 or heads * rows * chunk <= TILE))
    return AttentionDecodeConfig(block, chunk, heads, splits)
