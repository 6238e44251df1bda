"""`python notebooks/examples/shared_prefix.py`: many rows attend to a prefix that they share, read once (a cascade).

A system prompt of thousands of tokens stands before every request of a batch. Its keys are one part of each row's keys,
the row's own tokens are another, and the two are disjoint: statistics of both, merged, are those of the whole
(eq. 33.4, 33.5). The prefix has no batch axis, so its keys and values are read once for all rows.
"""

import jax
import jax.numpy as jnp

from flashspec import attention_stats, dot_product_attention, finalize, merge
from flashspec.online_softmax import SoftmaxStats

B, PREFIX, SUFFIX, N, K, H = 4, 96, 16, 4, 2, 32


def fold_rows(x: jax.Array) -> jax.Array:
    """[B, T, N, H] -> [1, B T, N, H]: the queries of all rows side by side, for keys that all of them see."""
    return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def prefix_stats(query: jax.Array, key: jax.Array, value: jax.Array) -> SoftmaxStats:
    """Statistics of every row's queries [B, T, N, H] over the shared keys [1, S, K, H]; rows [B, T, N]."""
    stats = attention_stats(fold_rows(query), key, value)
    return jax.tree.map(lambda x: x.reshape(*query.shape[:2], *x.shape[2:]), stats)


def cascade(
    query: jax.Array, prefix: tuple[jax.Array, jax.Array], suffix: tuple[jax.Array, jax.Array], lengths: jax.Array
) -> jax.Array:
    """Attention of new tokens at the end of rows that begin with a common prefix.

    Args:
      query: [B, T, N, H], of the last T tokens of each row.
      prefix: keys and values [1, S, K, H] that all rows share.
      suffix: keys and values [B, S', K, H] of each row's own tokens, the new ones included.
      lengths: [B], how many of S' count.

    Returns:
      output [B, T, N, H].
    """
    steps = jnp.arange(query.shape[1])[None, :]
    own = attention_stats(
        query, *suffix, is_causal=True, q_positions=lengths[:, None] - query.shape[1] + steps, kv_lengths=lengths
    )
    return finalize(merge(prefix_stats(query, *prefix), own), dtype=query.dtype)[0]


def example(new: int = 3) -> tuple[jax.Array, tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array], jax.Array]:
    """The arguments of `cascade` for four rows of different lengths."""
    keys = jax.random.split(jax.random.key(0), 5)
    query = jax.random.normal(keys[0], (B, new, N, H))
    prefix = (jax.random.normal(keys[1], (1, PREFIX, K, H)), jax.random.normal(keys[2], (1, PREFIX, K, H)))
    suffix = (jax.random.normal(keys[3], (B, SUFFIX, K, H)), jax.random.normal(keys[4], (B, SUFFIX, K, H)))
    return query, prefix, suffix, jnp.array([3, 7, 12, 16])


def in_one_piece(
    query: jax.Array, prefix: tuple[jax.Array, jax.Array], suffix: tuple[jax.Array, jax.Array], lengths: jax.Array
) -> jax.Array:
    """The slow twin: every row gets its own copy of the prefix in front of its keys."""
    rows = len(query)
    key, value = (
        jnp.concatenate([jnp.broadcast_to(shared, (rows, *shared.shape[1:])), own], axis=1)
        for shared, own in zip(prefix, suffix, strict=True)
    )
    total = prefix[0].shape[1] + lengths
    positions = total[:, None] - query.shape[1] + jnp.arange(query.shape[1])[None, :]
    return dot_product_attention(query, key, value, is_causal=True, q_positions=positions, kv_lengths=total)


def main() -> None:
    """The cascade beside its twin, and how many bytes of keys and values each reads."""
    arguments = example()
    difference = abs(cascade(*arguments) - in_one_piece(*arguments)).max()
    size = 2 * K * H * 4
    print(f"largest difference {difference:.1e}")
    print(
        f"keys and values: {size * (PREFIX + B * SUFFIX):,} bytes, in one piece {size * B * (PREFIX + SUFFIX):,} bytes"
    )


if __name__ == "__main__":
    main()
