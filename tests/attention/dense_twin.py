"""Attention in float64 numpy, one query at a time: what every implementation is held against here."""

import numpy as np


def attend(query, key, value, visible, *, bias=None, scale=None, cap=None, sinks=None):
    """Eq. 33.2 by loops. query [B, T, N, H], key [B, S, K, H], value [B, S, K, Hv], visible bool [B, N, T, S].

    Returns output [B, T, N, Hv] and lse [B, T, N]; a row without keys gives 0 and -inf (or its sink).
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (B, T, N, H), (_, S, K, Hv) = query.shape, value.shape
    scale = 1 / np.sqrt(H) if scale is None else scale
    bias = np.zeros((1, 1, 1, 1)) if bias is None else np.asarray(bias, np.float64)
    visible, bias = np.broadcast_to(visible, (B, N, T, S)), np.broadcast_to(bias, (B, N, T, S))
    output, lse = np.zeros((B, T, N, Hv)), np.full((B, T, N), -np.inf)
    for b, t, n in np.ndindex(B, T, N):
        seen = visible[b, n, t]
        keys, values = key[b, seen, n // (N // K)], value[b, seen, n // (N // K)]
        scores = scale * keys @ query[b, t, n] + bias[b, n, t, seen]
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        total = scores if sinks is None else np.append(scores, np.float64(sinks[n]))
        if total.size:
            lse[b, t, n] = np.log(np.sum(np.exp(total - total.max()))) + total.max()
        if scores.size:
            output[b, t, n] = np.exp(scores - lse[b, t, n]) @ values
    return output, lse
