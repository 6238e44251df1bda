"""Draws by inverse CDF from one uniform a row, and the keys that the uniforms come from.

Each row owns a key, and everything that is drawn for it comes from that key alone. So a row draws the same whatever
its batch neighbours, its slot or the padding, once its key is fixed.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from flashspec import checks


def row_keys(key: Array, batch: int) -> Array:
    """One key for each row: the caller's own, or a scalar key with the row's index folded in.

    Args:
      key: a typed key (`jax.random.key`), scalar or [B]. Pass [B] to tie a row's draws to a request instead of to its
        index in the batch.
      batch: B.

    Returns:
      Typed keys [B].

    Raises:
      ValueError: not a typed key, or neither scalar nor [B].
      NotImplementedError: a generator other than threefry2x32, whose draws depend on the batch that they are made in.
    """
    if not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key):
        raise checks.fail("key", "a typed key, as from jax.random.key", f"dtype {jnp.result_type(key)}")
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise NotImplementedError(f"`key`: rows draw independently with threefry2x32, not {jax.random.key_impl(key)}")
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch, dtype=jnp.int32))
    checks.shape("key", key, "B", {"B": batch})
    return key


def fold(keys: Array, data: ArrayLike) -> Array:
    """Fold a number into each row's key: a round's counter, a position, a purpose.

    Args:
      keys: typed keys [B].
      data: non-negative integers, scalar or [B].

    Returns:
      Typed keys [B].
    """
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(jnp.asarray(data), keys.shape))


def uniform(keys: Array) -> Array:
    """One uniform a row, in [0, 1).

    Args:
      keys: typed keys [B].

    Returns:
      float32 [B], multiples of 2^-23.
    """
    return jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(keys)


def inverse_cdf(weights: Array, u: Array) -> Array:
    """The token that u selects: the first x with cumsum(r)[x] > u sum(r) and r[x] > 0, for weights r.

    Never a token of weight 0, even where rounding puts u sum(r) at or above the last partial sum: then the last token
    of positive weight.

    Args:
      weights: [..., V], at least 0, need not sum to 1.
      u: [...] in [0, 1).

    Returns:
      int32 [...]; 0 where no weight is positive.
    """
    positive = weights > 0
    mass = jnp.cumsum(weights, axis=-1)
    hit = positive & (mass > u.astype(weights.dtype)[..., None] * mass[..., -1:])
    token = lax.broadcasted_iota(jnp.int32, weights.shape, weights.ndim - 1)
    first = jnp.min(jnp.where(hit, token, weights.shape[-1]), axis=-1)
    last = jnp.max(jnp.where(positive, token, 0), axis=-1)
    return jnp.minimum(first, last)


def draw(keys: Array, probs: Array) -> Array:
    """One token a row from its distribution.

    Args:
      keys: typed keys [B].
      probs: [B, V], at least 0.

    Returns:
      int32 [B].
    """
    return inverse_cdf(probs, uniform(keys))
