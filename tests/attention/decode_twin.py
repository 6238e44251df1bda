"""What the Hopper decode kernel computes, as a page of plain jnp over the operands that the kernel takes."""

import jax.numpy as jnp


def decode(call, o):
    """Output and lse, or m, l and u, as `attention_decode.decode`; float32 throughout."""
    B, T, N, H = o.query.shape
    key, value = o.key, o.value
    if o.page_table is not None:
        table = jnp.clip(o.page_table, 0, key.shape[0] - 1)
        key, value = (x[table].reshape(B, -1, *x.shape[2:]) for x in (key, value))
    S, K = key.shape[1:3]
    at = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S)) if o.positions is None else o.positions
    real = jnp.full(B, T, jnp.int32) if o.real is None else o.real
    seen = visible(call, o, at, real)
    key, value = (jnp.where(seen.any(axis=1)[:, :, None, None], x, 0).astype(jnp.float32) for x in (key, value))
    query = o.query.astype(jnp.float32).reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->btkgs", query, key) * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
    scores = jnp.where(seen[:, :, None, None, :], scores, -jnp.inf)
    m = scores.max(axis=-1)
    weights = jnp.exp(scores - jnp.where(m == -jnp.inf, 0, m)[..., None])
    l, u = weights.sum(axis=-1), jnp.einsum("btkgs,bskh->btkgh", weights, value)
    m, l, u = m.reshape(B, T, N), l.reshape(B, T, N), u.reshape(B, T, N, H)
    if call.statistics:
        return m, l, u
    return finish(m, l, u, o.sinks, o.query.dtype)


def visible(call, o, at, real):
    """bool [B, T, S]."""
    T = o.query.shape[1]
    token = jnp.arange(T, dtype=jnp.int32)[None, :, None]
    first, at = (o.length - real)[:, None, None], at[:, None, :]
    live = token < real[:, None, None]
    if not call.is_tree:
        seen = at <= first + token
        return live & (seen if call.left is None else seen & (at >= first + token - call.left))
    new = at - first
    bits = jnp.right_shift(o.ancestors[:, :, None], jnp.clip(new, 0, 31)) & 1
    return live & jnp.where(new < 0, at >= o.oldest[:, :, None], (new < T) & (bits == 1))


def finish(m, l, u, sinks, dtype):
    shift = jnp.where(m == -jnp.inf, 0, m)
    if sinks is not None:
        shift = jnp.maximum(m, sinks[None, None, :])
        scale = jnp.exp(m - shift)
        l, u = l * scale + jnp.exp(sinks[None, None, :] - shift), u * scale[..., None]
    some = l > 0
    l = jnp.where(some, l, 1)
    return (u / l[..., None]).astype(dtype), jnp.where(some, shift + jnp.log(l), -jnp.inf)
