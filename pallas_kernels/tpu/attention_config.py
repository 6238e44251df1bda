"""What the attention kernels share: the static part of a call, and the arrays that say which pairs count."""

import dataclasses
import math
from typing import NamedTuple

import jax

from pallas_kernels.launch import round_up

LANES = 128
LOG2_E = math.log2(math.e)
LOWEST, HIGHEST = -(2**31), 2**31 - 1
# Blocks along a side of the score matrix that the word of a step can name.
MAX_BLOCKS = 2**12
# What one program may use of VMEM: half of the smallest there is (TPU v5p and TPU7x have 64 MiB a core).
VMEM_BUDGET = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What is static about a call.

    Args:
      scale: multiplies q.k.
      soft_cap: c of c tanh(score / c), or None.
      limits: how many keys to the left and to the right of its own index a query sees, None for no limit; array indices
        stand for positions, so it is only used where queries and keys both sit at 0, 1, ...
      dropout_rate: probability of dropping; 0 draws no bits.
      shared_dropout: which of (query, key) share one dropout mask along themselves.
      statistics: whether (m, l, u) is asked for in place of the output and its log-normaliser.
    """

    scale: float
    soft_cap: float | None = None
    limits: tuple[int | None, int | None] = (None, None)
    dropout_rate: float = 0.0
    shared_dropout: tuple[bool, bool] = (False, False)
    statistics: bool = False

    @property
    def kept_scale(self) -> float:
        """What a kept probability is multiplied by; 0 where nothing is kept."""
        return 0.0 if self.dropout_rate >= 1 else 1 / (1 - self.dropout_rate)


class AttentionStructure(NamedTuple):
    """Arrays that decide which pairs count, and how much; None where there are none.

    A pair is visible iff first <= position <= last, the segments agree, and the mask and the bias allow it. A query
    with first > last sees nothing, and nobody sees a key at position `LOWEST`, which is below every `first`.
    """

    queries: jax.Array | None = None  # int32 [B|1, T, 3]: first, last, segment
    keys: jax.Array | None = None  # int32 [B|1, S, 2]: position, segment
    mask: jax.Array | None = None  # bool [B|1, N|1, T|1, S|1]
    bias: jax.Array | None = None  # bfloat16 or float32 [B|1, N|1, T|1, S|1]; -inf hides
    sinks: jax.Array | None = None  # float32 [N], natural logarithm
    dropout_words: jax.Array | None = None  # uint32 [B|1, N|1, 2], the key of each head
    dropout_offsets: jax.Array | None = None  # int32 [2], added to query and key indices

    @property
    def hides_keys(self) -> bool:
        """Whether the arrays can hide a key from all queries: then what it holds may not reach a product."""
        return self.queries is not None or self.mask is not None or self.bias is not None


def check_block(name: str, block: int, chunk: int) -> None:
    """ValueError unless `block` is whole lanes and whole chunks."""
    if block < LANES or block % LANES or chunk < LANES or chunk % LANES or block % chunk:
        raise ValueError(f"`{name}`: expected a multiple of {LANES} and of its chunk, got {block} in chunks of {chunk}")


def fit_block(size: int, largest: int) -> int:
    """The block for an axis of `size`: the whole axis where it fits, else the largest power of two that fills it up by
    less than a third."""
    whole = round_up(max(size, 1), LANES)
    if whole <= largest:
        return whole
    return next(b for b in (2048, 1024, 512, 256, LANES) if b <= largest and 3 * round_up(size, b) < 4 * whole)
