"""Speculative sampling at one prefix: eqs. 33.10 to 33.13, as functions of a target law p and a draft law q.

`draft_probs` and `target_probs` must be what is actually sampled from, after temperature, cuts and masks.
"""

import jax.numpy as jnp
from jax import Array
from jax.experimental import checkify
from jax.typing import ArrayLike
from jaxtyping import Float

from flashspec import checks


def acceptance_probability(target_probs: ArrayLike, draft_probs: ArrayLike) -> Array:
    """Probability that a drafted token is kept.

    a(x) = min(1, p(x) / q(x))                                                                           (eq. 33.10)

    A token with q(x) = 0 is never drafted and no ratio is formed for it; its entry is 1 where p(x) > 0, else 0.

    Args:
      target_probs: p [..., V].
      draft_probs: q [..., V].

    Returns:
      a [..., V], in the probabilities' dtype.

    Source: chapter 33.5.
    """
    p, q = _laws(target_probs, draft_probs)
    return jnp.where((q <= p) & (p > 0), 1, p / jnp.where(q > 0, q, 1))


def acceptance_rate(target_probs: ArrayLike, draft_probs: ArrayLike) -> Array:
    """Probability that a draft x ~ q is kept: 1 less the total variation distance of p and q.

    A = sum_x min(p(x), q(x)) = 1 - (1/2) sum_x |p(x) - q(x)|                                            (eq. 33.11)

    Args:
      target_probs: p [..., V].
      draft_probs: q [..., V].

    Returns:
      A [...].

    Source: chapter 33.5, exercise 33.8.
    """
    return jnp.minimum(*_laws(target_probs, draft_probs)).sum(axis=-1)


def residual_distribution(target_probs: ArrayLike, draft_probs: ArrayLike) -> Array:
    """Distribution of the token that replaces a rejected draft.

    r(x) = [p(x) - q(x)]_+ / Z,  Z = sum_x [p(x) - q(x)]_+                                               (eq. 33.12)

    Z is summed from the residual itself and not taken as 1 - A, which rounding would make another number. Where Z = 0,
    a rejection has probability 0 in exact arithmetic; rounding may still cause one, and the answer then is p.

    Args:
      target_probs: p [..., V].
      draft_probs: q [..., V]; all zero where nothing was drafted, which makes the residual p.

    Returns:
      r [..., V].

    Source: chapter 33.5.
    """
    weights = residual_weights(*_laws(target_probs, draft_probs))
    return weights / weights.sum(axis=-1, keepdims=True)


def output_law(target_probs: ArrayLike, draft_probs: ArrayLike) -> Array:
    """Law of the token that the chain rule puts out at one prefix; in exact arithmetic it is p.

    min(p(x), q(x)) + Z r(x) = p(x)                                                                      (eq. 33.13)

    Here Z is 1 - A, how often a draft is rejected, and r has a normaliser of its own: rounding shows in the sum.

    Args:
      target_probs: p [..., V].
      draft_probs: q [..., V].

    Returns:
      The law [..., V], summed from its two terms.

    Source: chapter 33.5.
    """
    p, q = _laws(target_probs, draft_probs)
    return jnp.minimum(p, q) + (1 - acceptance_rate(p, q)[..., None]) * residual_distribution(p, q)


def _laws(target_probs: ArrayLike, draft_probs: ArrayLike) -> tuple[Array, Array]:
    return checks.array("target_probs", target_probs), checks.array("draft_probs", draft_probs)


def residual_weights(p: Float[Array, "*R V"], q: Float[Array, "*R V"]) -> Float[Array, "*R V"]:
    """[p - q]_+, or p where that is 0 everywhere: eq. 33.12 before it is normalised."""
    weights = jnp.maximum(p - q, 0)
    return jnp.where((weights > 0).any(axis=-1, keepdims=True), weights, p)


def check_distributions(name: str, probs: Array, tolerance: float = 1e-3) -> None:
    """Check that every row of `probs` is a distribution: no entry negative or NaN, sums within `tolerance` of 1.

    Args:
      name: the argument's name, for the message.
      probs: [..., V].
      tolerance: allowed distance of a sum from 1; V float32 roundings fit well inside the default.

    Raises:
      ValueError: a row fails and `probs` is concrete. When it is traced, the check is a `checkify.check`: the caller
        must be transformed by `jax.experimental.checkify.checkify`, and the error is in what that returns.
    """
    total = probs.astype(working_dtype(probs)).sum(axis=-1)
    good = (probs >= 0).all() & (jnp.abs(total - 1) <= tolerance).all()
    expected = f"rows that are nonnegative and sum to 1 within {tolerance}"
    if not checks.is_concrete(good):
        checkify.check(good, f"`{name}`: expected {expected}")
    elif not good:
        worst = float(jnp.abs(total - 1).max()) if total.size else 0.0
        raise checks.fail(name, expected, f"smallest entry {float(probs.min())}, sums up to {worst} away from 1")


def working_dtype(*arrays: Array) -> jnp.dtype:
    """float64 as soon as one array is, so that no given uniform is rounded up to 1; else float32."""
    return jnp.dtype(jnp.float64 if any(array.dtype == jnp.float64 for array in arrays) else jnp.float32)
