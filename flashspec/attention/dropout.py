"""Dropout of attention probabilities: the facts of one call, and its mask tile by tile.

The mask is a pure function of the key and of each probability's coordinates (`pallas_kernels.dropout`), so forward and
backward draw it again instead of storing it. It multiplies u, never l: dropped probabilities stay in the normaliser.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels import dropout as counter_based

AXES = ("batch", "head", "query", "key")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of one attention call; build it with `make_dropout`.

    Args:
      words: uint32 [2], the key.
      offsets: int32 [4], added to the (batch, head, query, key) indices of this call.
      rate: probability of dropping, in [0, 1].
      broadcast: names out of `AXES` along which one mask is shared.
    """

    words: Array
    offsets: Array
    rate: float = dataclasses.field(metadata={"static": True})
    broadcast: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def scale(self) -> float:
        """1 / (1 - rate), what the kept probabilities are multiplied by; 0 when nothing is kept."""
        return 0.0 if self.rate >= 1.0 else 1.0 / (1.0 - self.rate)

    def tile(self, batch: int, heads: int, q_start: ArrayLike, q_size: int, k_start: ArrayLike, k_size: int) -> Array:
        """Which probabilities of a tile are kept: bool [B|1, N|1, q_size|1, k_size|1], size 1 on shared axes."""
        query, key = (self._indices(axis, *span) for axis, span in ((2, (q_start, q_size)), (3, (k_start, k_size))))
        return counter_based.keep_mask(self.head_words(batch, heads), query, key, self.rate)

    def head_words(self, batch: int, heads: int) -> counter_based.Words:
        """The key of each head of each row, two uint32 words [B|1, N|1, 1, 1]."""
        rows, columns = (self._indices(axis, 0, size) for axis, size in enumerate((batch, heads)))
        return counter_based.head_words((self.words[0], self.words[1]), rows, columns)

    def _indices(self, axis: int, start: ArrayLike, size: int) -> Array:
        """Indices along one axis, alone on that axis of a rank-4 array; a shared axis has index 0 on every shard."""
        if AXES[axis] in self.broadcast:
            return jnp.zeros((1, 1, 1, 1), jnp.int32)
        index = jnp.arange(size, dtype=jnp.int32) + jnp.asarray(start, jnp.int32) + self.offsets[axis]
        return index.reshape([size if other == axis else 1 for other in range(4)])


def make_dropout(key: Array, rate: float, broadcast: tuple[str, ...] = (), offsets: ArrayLike | None = None) -> Dropout:
    """Dropout under one typed PRNG key; `offsets` are where the shard's (batch, head, query, key) indices start."""
    words = jnp.stack(counter_based.key_words(jax.random.key_data(key)))
    starts = jnp.zeros(4, jnp.int32) if offsets is None else jnp.asarray(offsets, jnp.int32)
    return Dropout(words, starts, float(rate), tuple(broadcast))
