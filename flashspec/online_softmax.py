"""Softmax statistics (m, l, u) of a set of keys: a commutative monoid under union of disjoint sets (section 33.2).

For a non-empty set A of visible keys with scores z_j and values v_j (eq. 33.3):

    m = max z_j        l = sum exp(z_j - m)        u = sum exp(z_j - m) v_j

The empty set is (-inf, 0, 0) and carries `nonempty = False`, so nothing ever subtracts one infinity from another.
The statistics of a union follow from those of its parts (eq. 33.4 and 33.5), in any order and any bracketing.

The output u / l and the log-normaliser m + log l do not change when m is shifted, so the derivative through m is zero
and every function here treats m as a constant.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from jax.typing import ArrayLike, DTypeLike

from flashspec import checks
from flashspec.checks import fail


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftmaxStats:
    """Statistics of one key set for every query row; any leading shape, [B, T, N] in attention."""

    m: jax.Array  # [...] the largest score, -inf when empty
    l: jax.Array  # [...] sum of exp(score - m)
    u: jax.Array  # [..., Hv] the same sum weighted by the values
    nonempty: jax.Array  # [...] bool: at least one key is visible


def stats_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of statistics over inputs of `dtype`: float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def empty_stats(shape: tuple[int, ...], value_size: int, dtype: DTypeLike = jnp.float32) -> SoftmaxStats:
    """The statistics of no keys at all: the identity of `merge`.

    Args:
      shape: shape of the rows, [B, T, N] in attention.
      value_size: Hv.
      dtype: float32 or float64.

    Returns:
      m = -inf, l = 0, u = 0, nonempty = False.
    """
    return SoftmaxStats(
        m=jnp.full(shape, -jnp.inf, dtype),
        l=jnp.zeros(shape, dtype),
        u=jnp.zeros((*shape, value_size), dtype),
        nonempty=jnp.zeros(shape, bool),
    )


def shifted_weights(scores: jax.Array, visible: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest visible score of each row, and exp(z_j - m) for every key (eq. 33.3).

    Args:
      scores: [..., S], float32 or float64. A score of -inf hides its key.
      visible: bool, broadcastable to [..., S], True = may attend; None for all.

    Returns:
      m [...] without gradient; weights [..., S], exactly 0 where hidden; nonempty [...].
    """
    masked = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
    m = jnp.max(lax.stop_gradient(masked), axis=-1, initial=-jnp.inf)
    # A NaN score is not hidden: comparing every score, rather than m, keeps its row from passing for an empty one.
    nonempty = jnp.any(masked != -jnp.inf, axis=-1)
    return m, jnp.exp(masked - _finite(m)[..., None]), nonempty


def stats_of(scores: jax.Array, values: jax.Array, visible: jax.Array | None = None) -> SoftmaxStats:
    """Statistics of one set of keys (eq. 33.3).

    Args:
      scores: [..., S], float32 or float64.
      values: [..., S, Hv], the leading axes those of `scores` or 1.
      visible: [..., S] bool, True = may attend; None for all. Hidden values are not read.

    Returns:
      Statistics with rows [...].
    """
    masked = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
    m, weights, nonempty = shifted_weights(masked)
    # 0 * NaN is NaN: a hidden value has to be replaced, weighting it is not enough.
    values = jnp.where((masked == -jnp.inf)[..., None], 0, values.astype(scores.dtype))
    u = jnp.sum(weights[..., None] * values, axis=-2)
    return SoftmaxStats(m, jnp.sum(weights, axis=-1), u, nonempty)


def merge(a: SoftmaxStats, b: SoftmaxStats) -> SoftmaxStats:
    """Statistics of the union of two *disjoint* key sets.

        m = max(m_a, m_b)    l = e^(m_a - m) l_a + e^(m_b - m) l_b    u likewise        (eq. 33.4, 33.5)

    Associative and commutative in exact arithmetic. `merge(x, empty)` and `merge(empty, x)` are x bit for bit.

    Args:
      a, b: statistics of the same rows over key sets with no key in common.

    Returns:
      Statistics of both sets together.

    Raises:
      ValueError: the shapes of the two differ.
    """
    if a.u.shape != b.u.shape:
        raise fail("b", f"statistics of the same rows as `a`, u of shape {list(a.u.shape)}", list(b.u.shape))
    m = jnp.maximum(lax.stop_gradient(a.m), lax.stop_gradient(b.m))
    scale_a, scale_b = _scale(a.m, m), _scale(b.m, m)
    both = SoftmaxStats(
        m=m,
        l=scale_a * a.l + scale_b * b.l,
        u=scale_a[..., None] * a.u + scale_b[..., None] * b.u,
        nonempty=a.nonempty | b.nonempty,
    )
    return _where(~b.nonempty, a, _where(~a.nonempty, b, both))


def merge_axis(stats: SoftmaxStats, axis: int) -> SoftmaxStats:
    """`merge` along one axis of the rows, whose entries are disjoint parts of one key set (eq. 33.4, 33.5).

    Args:
      stats: statistics with rows [..., parts, ...].
      axis: which axis of `m` holds the parts; negative counts from its end.

    Returns:
      Statistics with that axis gone.

    Raises:
      ValueError: the rows have no such axis.
    """
    if not -stats.m.ndim <= axis < stats.m.ndim:
        raise fail("axis", f"an axis of rows of rank {stats.m.ndim}", axis)
    axis %= stats.m.ndim
    m = jnp.max(lax.stop_gradient(stats.m), axis=axis, initial=-jnp.inf)
    scale = _scale(stats.m, jnp.expand_dims(m, axis))
    return SoftmaxStats(
        m=m,
        l=jnp.sum(scale * stats.l, axis=axis),
        u=jnp.sum(scale[..., None] * stats.u, axis=axis),
        nonempty=jnp.any(stats.nonempty, axis=axis),
    )


def merge_across(stats: SoftmaxStats, axis_name: str | tuple[str, ...]) -> SoftmaxStats:
    """`merge` over a mesh axis (or a `vmap` axis name), each device holding one disjoint part of the keys.

    Args:
      stats: this device's part, rows [...].
      axis_name: name of the axis, inside `jax.shard_map` or `jax.vmap(axis_name=...)`.

    Returns:
      Statistics of all parts, the same on every device. Differentiable.
    """
    m = lax.pmax(lax.stop_gradient(stats.m), axis_name)
    scale = _scale(stats.m, m)
    return SoftmaxStats(
        m=m,
        l=lax.psum(scale * stats.l, axis_name),
        u=lax.psum(scale[..., None] * stats.u, axis_name),
        nonempty=lax.psum(stats.nonempty.astype(jnp.int32), axis_name) > 0,
    )


def finalize(
    stats: SoftmaxStats,
    *,
    sinks: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    empty_rows: str = "zero",
) -> tuple[jax.Array, jax.Array]:
    """The attention output u / l (eq. 33.2) and the log-normaliser m + log l, after all parts have been merged.

    A sink is one more key whose value is 0: it takes part in the normaliser and adds nothing to the sum. It is added
    here and only here, so that parts which are merged first do not count it twice.

    Args:
      stats: statistics with rows [B, T, N].
      sinks: [N] natural-log logits, one for each head, neither scaled nor capped.
      dtype: dtype of the output; the statistics' own by default.
      empty_rows: what becomes of a row that has neither a visible key nor a sink. "zero": output 0, lse -inf and zero
        gradients. "error": refused; when the rows are traced this is a `checkify` check, and the caller has to be
        transformed by `jax.experimental.checkify.checkify`.

    Returns:
      output [B, T, N, Hv] in `dtype`, and lse [B, T, N] in the dtype of the statistics.

    Raises:
      ValueError: a row is empty and `empty_rows` is "error"; or an argument is malformed.
    """
    if sinks is not None:
        stats = merge(stats, _sink_stats(stats, sinks))
    check_rows(stats.nonempty, empty_rows)
    l = jnp.where(stats.nonempty, stats.l, 1)
    output = jnp.where(stats.nonempty[..., None], stats.u / l[..., None], 0)
    lse = jnp.where(stats.nonempty, lax.stop_gradient(stats.m) + jnp.log(l), -jnp.inf)
    return output.astype(dtype or stats.u.dtype), lse


def check_rows(nonempty: jax.Array, empty_rows: str) -> None:
    """Apply the `empty_rows` rule of `finalize` to rows [...] of which `nonempty` says whether they have a key."""
    checks.one_of("empty_rows", empty_rows, ("zero", "error"))
    if empty_rows == "zero":
        return
    if not checks.is_concrete(nonempty):
        checkify.check(jnp.all(nonempty), "`mask`: expected a visible key in every query row, got an empty row")
    elif not np.all(nonempty):
        first = [int(i) for i in np.argwhere(~np.asarray(nonempty))[0]]
        raise fail("mask", "a visible key in every query row", f"an empty row at [B, T, N] = {first}")


def _sink_stats(stats: SoftmaxStats, sinks: ArrayLike) -> SoftmaxStats:
    checks.shape("sinks", sinks, "N", {"N": stats.m.shape[-1]})
    scores = jnp.broadcast_to(jnp.asarray(sinks, stats.m.dtype), stats.m.shape)[..., None]
    return stats_of(scores, jnp.zeros_like(stats.u)[..., None, :])


def _finite(m: jax.Array) -> jax.Array:
    """m, with 0 in place of -inf: any finite shift serves an empty row."""
    return jnp.where(m == -jnp.inf, 0, m)


def _scale(m_part: jax.Array, m: jax.Array) -> jax.Array:
    """e^(m_part - m), and 0 for an empty part."""
    return jnp.exp(lax.stop_gradient(m_part) - _finite(m))


def _where(rows: jax.Array, a: SoftmaxStats, b: SoftmaxStats) -> SoftmaxStats:
    return SoftmaxStats(
        m=lax.stop_gradient(jnp.where(rows, a.m, b.m)),
        l=jnp.where(rows, a.l, b.l),
        u=jnp.where(rows[..., None], a.u, b.u),
        nonempty=jnp.where(rows, a.nonempty, b.nonempty),
    )
