"""Attention of rows that share a prefix: its keys are read once for all of them, and each row's own keys for it alone.

The two parts are disjoint, so that their statistics merge (eq. 33.4 and 33.5). Keys that lie in both would count twice.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.attention.api import attention_stats
from flashspec.attention.decode import decode_stats
from flashspec.attention.settings import AttentionImplementation
from flashspec.attention.views import View
from flashspec.online_softmax import SoftmaxStats, empty_stats, finalize, merge


def cascade_attention(
    query: ArrayLike,
    prefix_key: ArrayLike,
    prefix_value: ArrayLike,
    view: View,
    *,
    q_lengths: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    implementation: AttentionImplementation = None,
    return_lse: bool = False,
) -> Any:
    """Attention of 1 to 16 new tokens over a common prefix and, after it, over each row's own positions.

        output = finalize(merge(statistics of the prefix, statistics of the view))        (eq. 33.2, 33.4 and 33.5)

    It equals `decode_attention` over a cache in which every row holds the prefix and then its own positions, but for
    rounding. The B T queries read the prefix as one batch row.

    Args:
      query: [B, T, N, H]; every query sees all of the prefix.
      prefix_key: [P, K, H], in the query's dtype; positions before those of the view. P may be 0.
      prefix_value: [P, K, Hv].
      view: each row's own positions, without the prefix, which already holds the keys of the queries; `view.length`
        does not count the prefix.
      implementation: as in `decode_attention`, of the view's part; the prefix takes what is best for its size.
      The others are those of `decode_attention`.

    Returns:
      output [B, T, N, Hv] in the query's dtype; with `return_lse` also lse [B, T, N] in float32 (float64 for float64).

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call.
    """
    checks.flag("return_lse", return_lse)
    query = checks.array("query", query)
    sizes = checks.shape("query", query, "B T N H")
    sizes = checks.shape("prefix_key", prefix_key, "P K H", sizes)
    checks.shape("prefix_value", prefix_value, "P K Hv", sizes)
    numbers: dict[str, Any] = {"scale": scale, "logits_soft_cap": logits_soft_cap}
    own = decode_stats(query, view, q_lengths=q_lengths, tree_mask=tree_mask, implementation=implementation, **numbers)
    prefix = _prefix_stats(query, jnp.asarray(prefix_key), jnp.asarray(prefix_value), **numbers)
    if q_lengths is not None:
        prefix = _without_padding(prefix, jnp.asarray(q_lengths))
    output, lse = finalize(merge(prefix, own), sinks=sinks, dtype=query.dtype)
    return (output, lse) if return_lse else output


def _prefix_stats(query: Array, key: Array, value: Array, **numbers: Any) -> SoftmaxStats:
    """Statistics of all queries over the prefix, which they read as the queries of one row."""
    B, T = query.shape[:2]
    together = query.reshape(1, B * T, *query.shape[2:])
    stats = attention_stats(together, key[None], value[None], **numbers)
    return jax.tree.map(lambda x: x.reshape(B, T, *x.shape[2:]), stats)


def _without_padding(stats: SoftmaxStats, q_lengths: Array) -> SoftmaxStats:
    """The statistics with queries from `q_lengths` on as empty rows, whatever they hold."""
    rows = stats.m.shape
    real = jnp.arange(rows[1])[None, :, None] < q_lengths[:, None, None]
    empty = empty_stats(rows, stats.u.shape[-1], stats.u.dtype)
    return SoftmaxStats(
        *(
            jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 3)), x, y)
            for x, y in zip(jax.tree.leaves(stats), jax.tree.leaves(empty), strict=True)
        )
    )
