"""`python notebooks/examples/shared_prefix.py`: many rows attend to a prefix that they share, read once (a cascade).

A system prompt of thousands of tokens stands before every request of a batch. Its keys are one part of each row's keys,
the row's own cache is the other, and the two are disjoint: statistics of both, merged, are those of the whole
(eq. 33.4, 33.5). The prefix has no batch axis. It is stored once, and read once for all rows.
"""

import jax
import jax.numpy as jnp

from flashspec import append, cascade_attention, decode_attention, dense_cache, view
from flashspec.attention import DenseView
from flashspec.cache import DenseCache

B, PREFIX, CAPACITY, NEW, N, K, H = 4, 96, 16, 3, 4, 2, 32
LENGTHS = jnp.array([3, 7, 12, 16])  # of each row's own tokens, the new ones included

Pair = tuple[jax.Array, jax.Array]


def example() -> tuple[jax.Array, Pair, DenseCache]:
    """Queries of new tokens [B, NEW, N, H], a prefix [PREFIX, K, H], and a cache of what each row holds besides."""
    keys = jax.random.split(jax.random.key(0), 5)
    query = jax.random.normal(keys[0], (B, NEW, N, H))
    prefix = jax.random.normal(keys[1], (PREFIX, K, H)), jax.random.normal(keys[2], (PREFIX, K, H))
    own = jax.random.normal(keys[3], (B, CAPACITY, K, H)), jax.random.normal(keys[4], (B, CAPACITY, K, H))
    return query, prefix, append(dense_cache(1, B, CAPACITY, K, H), 0, *own, num_valid=LENGTHS)


def in_one_piece(query: jax.Array, prefix: Pair, own: DenseCache) -> jax.Array:
    """The slow twin: every row stores its own copy of the prefix in front of its keys."""
    key, value = (
        jnp.concatenate([jnp.broadcast_to(shared, (len(query), *shared.shape)), rest], axis=1)
        for shared, rest in zip(prefix, (own.key[0], own.value[0]), strict=True)
    )
    return decode_attention(query, DenseView(key, value, own.length + len(prefix[0])))


def main() -> None:
    """The cascade beside its twin, and how many bytes of keys and values each stores."""
    query, prefix, own = example()
    difference = abs(cascade_attention(query, *prefix, view(own, 0)) - in_one_piece(query, prefix, own)).max()
    size = 2 * K * H * query.dtype.itemsize
    print(f"largest difference {difference:.1e}")
    print(
        f"{size * (PREFIX + B * CAPACITY):,} bytes of keys and values, {size * B * (PREFIX + CAPACITY):,} in one piece"
    )


if __name__ == "__main__":
    main()
