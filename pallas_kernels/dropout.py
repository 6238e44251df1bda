"""Dropout masks as a pure function of the key and of the coordinates of one probability.

The bits of coordinate (batch, head, query, key) are Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3") applied twice: (batch, head) under the caller's key gives a key of that head, under which
(query, key) gives the bits. Nothing depends on the tile that asks, so forward, backward, every block size and every
shard (through its offsets) draw the same mask. Only adds, shifts and xors on uint32: any Pallas backend can run it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# Fewer than the 20 of `jax.random`, which keeps a margin that a mask does not need: the rounds are the whole cost.
ROUNDS = 13
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA

type Words = tuple[jax.Array, jax.Array]


def threefry2x32(key: Words, counter: Words, rounds: int = ROUNDS) -> Words:
    """Threefry-2x32: two uint32 words for a key and a counter of two words each, elementwise.

    Args:
      key: two uint32 arrays.
      counter: two uint32 arrays; all four broadcast against each other (scalars, or one rank).
      rounds: how many rounds; 20 is what `jax.random` uses.

    Returns:
      Two uint32 arrays of the broadcast shape.
    """
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for i in range(rounds):
        rotation = _ROTATIONS[i % 8]
        x = x + y
        y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        if i % 4 == 3:
            injection = i // 4 + 1
            x = x + schedule[injection % 3]
            y = y + schedule[(injection + 1) % 3] + jnp.uint32(injection)
    return x, y


def key_words(data: jax.Array) -> Words:
    """Two words from the data of one PRNG key (uint32 [2] of threefry2x32, [4] of rbg): pairs are folded in turn."""
    words = (data[0], data[1])
    for i in range(2, data.shape[0], 2):
        words = threefry2x32(words, (data[i], data[i + 1]))
    return words


def head_words(words: Words, batch: ArrayLike, head: ArrayLike) -> Words:
    """The key of one head of one row; `batch` and `head` are integer indices with the call's offsets added."""
    return threefry2x32(words, (_word(batch), _word(head)))


def bits(of_head: Words, query: ArrayLike, key: ArrayLike) -> jax.Array:
    """Uniform uint32 bits of each coordinate.

    Args:
      of_head: what `head_words` gave, shaped to broadcast against the indices.
      query: integer query indices, offset added; any shape.
      key: integer key indices, offset added; broadcasts against `query`.

    Returns:
      uint32 of the broadcast shape.
    """
    return threefry2x32(of_head, (_word(query), _word(key)))[0]


def threshold(rate: float) -> int:
    """rate * 2^32 to the nearest integer: a probability is kept iff its bits reach it. 0 keeps all, 2^32 drops all."""
    numerator, denominator = float(rate).as_integer_ratio()
    return (2 * (numerator << 32) + denominator) // (2 * denominator)


def keep_mask(of_head: Words, query: ArrayLike, key: ArrayLike, rate: float) -> jax.Array:
    """Which probabilities dropout keeps: `bits >= threshold(rate)`, for arguments as in `bits`; bool."""
    limit = threshold(rate)
    shape = np.broadcast_shapes(*(np.shape(x) for x in (*of_head, query, key)))
    if limit == 0 or limit == 2**32:
        return jnp.full(shape, limit == 0)
    return bits(of_head, query, key) >= jnp.uint32(limit)


def _word(index: ArrayLike) -> jax.Array:
    """An index as a counter word; int64 indices wrap modulo 2^32."""
    return jnp.asarray(index).astype(jnp.uint32)
