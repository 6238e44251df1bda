"""Logits to the distribution that is actually sampled from: one function for draft, verify, bonus and plain rows."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from flashspec import checks
from flashspec.sampling.params import SamplingParams

# The codes of a position that has no distribution; they are finish reasons too.
FINE = 0
NONFINITE = 2
NO_ADMISSIBLE = 3


def probabilities(logits: ArrayLike, params: SamplingParams, *, suppress: Array | None = None) -> tuple[Array, Array]:
    """The distribution that is sampled from, in float32.

    In this order: bias, allowed tokens and suppression on the raw logits; temperature; top-k; top-p on what is left,
    keeping the token that crosses; min-p. Temperature 0 is the one-hot of the first maximum. One compiled program
    serves rows with different settings; it sorts only when some row asks for top-k or top-p.

    Args:
      logits: [B, V] or [B, T, V], any floating dtype.
      params: settings that hold for every position of a row.
      suppress: bool, True where a token is ruled out at this position (a stop token before the minimum length):
        [B, V], or [B, T, V] for logits of that shape.

    Returns:
      probs, float32 of the shape of `logits`, and flags, int32 without the last axis: 0 where the position is fine,
      `NONFINITE` = 2 where the logits hold NaN or +inf, or nothing but -inf, `NO_ADMISSIBLE` = 3 where every token is
      ruled out. The probabilities of a flagged position are all 0.

    Raises:
      ValueError: a shape, dtype or (concrete) setting that does not fit.
    """
    logits = checks.array("logits", logits)
    if logits.ndim not in (2, 3):
        raise checks.fail("logits", "shape [B, V] or [B, T, V]", f"shape {list(logits.shape)}")
    checks.floating("logits", logits)
    batch, vocab_size = logits.shape[0], checks.at_least("V of `logits`", logits.shape[-1], 1)
    params.check(batch, vocab_size)
    if suppress is not None:
        if suppress.shape not in (logits.shape, (batch, vocab_size)):
            raise checks.fail("suppress", f"shape {[batch, vocab_size]} or {list(logits.shape)}", list(suppress.shape))
        checks.boolean("suppress", suppress)
    return _probabilities(logits, params, suppress)


def nonfinite(logits: Array) -> Array:
    """Where logits cannot make a distribution: a NaN, a +inf, or nothing but -inf.

    Args:
      logits: [..., V].

    Returns:
      bool [...].
    """
    return jnp.any(jnp.isnan(logits) | (logits == jnp.inf), axis=-1) | jnp.all(logits == -jnp.inf, axis=-1)


# Compiled as one unit, so that a call outside jit does not compile its branches anew each time.
@jax.jit
def _probabilities(logits: Array, params: SamplingParams, suppress: Array | None) -> tuple[Array, Array]:
    admitted, flags = _admitted(logits.astype(jnp.float32), params, suppress)
    temperature = _by_row(params.temperature, jnp.float32, logits.ndim)
    # Dividing by a subnormal temperature would be dividing by 0 where those are flushed.
    greedy = temperature < jnp.finfo(jnp.float32).tiny
    maximum = jnp.max(admitted, axis=-1, keepdims=True)
    tempered = functools.partial(_weights, maximum=maximum, temperature=jnp.where(greedy, 1, temperature))
    weights = _truncate(admitted, tempered, params, greedy)
    # The most likely token weighs exactly 1.
    weights = jnp.where(weights >= _by_row(params.min_p, jnp.float32, logits.ndim), weights, 0)
    weights = jnp.where(greedy, _first(admitted == maximum), weights)
    probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where((flags == FINE)[..., None], probs, 0), flags


def _admitted(logits: Array, params: SamplingParams, suppress: Array | None) -> tuple[Array, Array]:
    """Logits with the bias added and -inf where a token is ruled out, and the flags; all 0 where flagged."""
    invalid = nonfinite(logits)
    if params.logit_bias is not None:
        logits = logits + _by_token(jnp.asarray(params.logit_bias).astype(jnp.float32), logits.ndim)
        invalid |= jnp.any(jnp.isnan(logits) | (logits == jnp.inf), axis=-1)
    if params.allowed_tokens is not None:
        logits = jnp.where(_by_token(jnp.asarray(params.allowed_tokens), logits.ndim), logits, -jnp.inf)
    if suppress is not None:
        logits = jnp.where(_by_token(suppress, logits.ndim), -jnp.inf, logits)
    none_left = jnp.all(logits == -jnp.inf, axis=-1)
    flags = jnp.where(invalid, NONFINITE, jnp.where(none_left, NO_ADMISSIBLE, FINE)).astype(jnp.int32)
    return jnp.where((flags == FINE)[..., None], logits, 0), flags


def _weights(logits: Array, maximum: Array, temperature: Array) -> Array:
    """exp((logits - maximum) / temperature): the largest weighs exactly 1, and no temperature overflows."""
    return jnp.where(logits == -jnp.inf, 0, jnp.exp((logits - maximum) / temperature))


def _truncate(logits: Array, tempered: Callable[[Array], Array], params: SamplingParams, greedy: Array) -> Array:
    """The weights of the logits after top-k, then top-p on what is left.

    Both keep a prefix of one order: larger logit first, then lower id. So a sort needs to tell only the least logit
    kept and how many of its equals stay, and sorting bare integers is several times faster than sorting (logit, id).
    """
    vocab_size = logits.shape[-1]
    weights = tempered(logits)
    if params.top_k is None and params.top_p is None:
        return weights
    top_k = _by_row(0 if params.top_k is None else params.top_k, jnp.int32, logits.ndim)
    top_p = _by_row(1.0 if params.top_p is None else params.top_p, jnp.float32, logits.ndim)
    most = jnp.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)

    def cut() -> Array:
        keys = _ordered_bits(logits)
        falling = ~lax.sort(~keys, dimension=-1, is_stable=False)
        mass = jnp.cumsum(jnp.where(_token_ids(logits) < most, tempered(_ordered_logits(falling)), 0), axis=-1)
        before = jnp.concatenate([jnp.zeros_like(mass[..., :1]), mass[..., :-1]], axis=-1)
        reached = jnp.sum(before < top_p * mass[..., -1:], axis=-1, keepdims=True, dtype=jnp.int32)
        kept = jnp.maximum(jnp.where(top_p < 1, jnp.minimum(reached, most), most), 1)
        least = jnp.take_along_axis(falling, kept - 1, axis=-1)
        tied = keys == least
        ties_kept = kept - jnp.sum(keys > least, axis=-1, keepdims=True, dtype=jnp.int32)
        first_ties = tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= ties_kept)
        return jnp.where((keys > least) | first_ties, weights, 0)

    asked = jnp.any(((most < vocab_size) | (top_p < 1)) & ~greedy)
    return lax.cond(asked, cut, lambda: weights)


def _ordered_bits(values: Array) -> Array:
    """int32 in the same order as float32 `values`; -0 and +0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _ordered_logits(keys: Array) -> Array:
    """The inverse of `_ordered_bits`."""
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ jnp.int32(0x7FFFFFFF), keys), jnp.float32)


def _first(candidates: Array) -> Array:
    """The one-hot of the first candidate of each position. (An argmax is several times slower on a CPU.)"""
    token = _token_ids(candidates)
    first = jnp.min(jnp.where(candidates, token, candidates.shape[-1]), axis=-1, keepdims=True)
    return (token == first).astype(jnp.float32)


def _token_ids(logits: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


def _by_row(value: ArrayLike, dtype: DTypeLike, ndim: int) -> Array:
    """A scalar or [B] with trailing axes of size 1, to broadcast against [B, V] or [B, T, V]."""
    return jnp.asarray(value).astype(dtype).reshape(-1, *[1] * (ndim - 1))


def _by_token(value: Array, ndim: int) -> Array:
    """[V], [B, V] or [B, T, V] with axes of size 1 put in, to broadcast against [B, V] or [B, T, V]."""
    rows = value[None] if value.ndim == 1 else value
    return rows if rows.ndim == ndim else rows[:, None]
