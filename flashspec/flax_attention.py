"""This library's attention in Flax's attention modules, of nnx and of linen, for training and decoding.

    layer = nnx.MultiHeadAttention(8, 512, attention_fn=flax_attention.attention_fn, decode=False, rngs=rngs)
    layer = linen.MultiHeadDotProductAttention(8, attention_fn=flax_attention.attention_fn)
    flax_attention.replace_attention(model)  # every nnx layer of a model that is there already

What the two compute alike, and where they mean something else:

    what a layer passes            Flax                                    here
    mask, False at some keys       finfo.min in place of their scores      those keys are not there
    mask, False at every key       the mean of all values                  0, and gradients of 0
    bias of -inf at some keys      those keys have weight 0                the same
    bias of -inf at every key      NaN                                     0, and gradients of 0
    bias of finfo.min              added to the score, which it absorbs    the same: it is finite, so no mask
    broadcast_dropout              one mask for all rows and heads         the same, of other bits
    is_causal with T != S          query i sees keys up to i               refused as ambiguous
    float32 products               the backend's default precision         the highest
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype
from jax import Array
from jax.typing import ArrayLike

from flashspec.attention import dot_product_attention
from flashspec.checks import fail


def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    **options: Any,
) -> Array:
    """`dot_product_attention` with the arguments of Flax's function of that name, for `attention_fn=`.

    Args:
      query: [..., T, N, H] with any number of batch axes.
      key: [..., S, K, H]; K divides N.
      value: [..., S, K, Hv].
      bias: broadcastable to [..., N, T, S]; added to the scaled scores.
      mask: broadcastable to [..., N, T, S], bool or numbers; anything but 0 may attend.
      broadcast_dropout: one dropout mask for all rows and heads.
      dropout_rng: the key that dropout is drawn from, typed or raw.
      dropout_rate: probability of dropping a weight.
      deterministic: no dropout.
      dtype: of the computation; by default what the operands promote to.
      precision: accepted, and met: float32 is multiplied at the highest precision, and 16-bit products are exact.
      module: must be None: weights are never formed, so that none can be sown.
      is_causal: a query sees keys up to its own position.
      force_fp32_for_softmax: accepted, and met: it always is in float32 or better.
      qk_attn_weights_einsum, attn_weights_value_einsum: must be None.
      **options: further arguments of `dot_product_attention`, by `functools.partial`: window, logits_soft_cap,
        implementation and so on.

    Returns:
      [..., T, N, Hv].

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: weights are to be sown, or products to be replaced; or no implementation can run the call.
    """
    del precision, force_fp32_for_softmax
    _refuse(module, qk_attn_weights_einsum=qk_attn_weights_einsum, attn_weights_value_einsum=attn_weights_value_einsum)
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    batch = query.shape[:-3]
    for name, array in (("key", key), ("value", value)):
        if array.shape[:-3] != batch:
            raise fail(name, f"the query's batch axes {list(batch)}", list(array.shape))
    if dropout_rate > 0 and not deterministic:
        options |= {
            "dropout_rate": dropout_rate,
            "dropout_key": _typed(dropout_rng),
            "dropout_broadcast": ("batch", "head") if broadcast_dropout else (),
        }
    query, key, value = (array.reshape(math.prod(batch), *array.shape[-3:]) for array in (query, key, value))
    bias = None if bias is None else _rank_4("bias", bias, batch)
    mask = None if mask is None else _allowed(_rank_4("mask", mask, batch))
    output = dot_product_attention(query, key, value, bias, mask, is_causal=is_causal, **options)
    return output.reshape(*batch, *output.shape[1:])


def replace_attention(model: nnx.Module, **options: Any) -> int:
    """Let every `nnx.MultiHeadAttention` of a model use this library's attention, with the parameters that it has.

    Args:
      model: changed in place.
      **options: as those of `attention_fn`, for every layer.

    Returns:
      How many layers it has.

    Raises:
      ValueError: there are none, or one has an attention function of its own (such as one with rotary positions), whose
        work would be lost.
    """
    layers = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.MultiHeadAttention)]
    if not layers:
        raise fail("model", "a model with layers of nnx.MultiHeadAttention", type(model).__name__)
    for path, layer in layers:
        own = layer.attention_fn
        if own is not nnx.dot_product_attention and getattr(own, "func", own) is not attention_fn:
            raise fail("model", f"Flax's own attention in {'.'.join(map(str, path)) or 'it'}", own)
    for _, layer in layers:
        layer.attention_fn = functools.partial(attention_fn, **options) if options else attention_fn
    return len(layers)


def _refuse(module: Any, **products: Any) -> None:
    """What Flax's function can do and this one cannot."""
    reasons = [f"{name}: products inside a fused kernel cannot be replaced" for name in products if products[name]]
    if module is not None:
        reasons.append("sow_weights: attention weights are never formed; sow them with Flax's own attention")
    if reasons:
        raise NotImplementedError("; ".join(reasons))


def _rank_4(name: str, array: ArrayLike, batch: tuple[int, ...]) -> Array:
    """A bias or mask, broadcastable to [*batch, N, T, S], with its batch axes as one."""
    array = jnp.asarray(array)
    missing = len(batch) + 3 - array.ndim
    if missing < 0:
        raise fail(
            name, f"at most rank {len(batch) + 3}, broadcastable to [..., N, T, S]", f"shape {list(array.shape)}"
        )
    shape = (1,) * missing + array.shape
    if any(size not in (1, whole) for size, whole in zip(shape, batch, strict=False)):
        raise fail(name, f"batch axes that broadcast to {list(batch)}", f"shape {list(array.shape)}")
    if len(batch) != 1:
        rows = batch if math.prod(shape[: len(batch)]) > 1 else (1,) * len(batch)
        array = jnp.broadcast_to(array.reshape(shape), (*rows, *shape[-3:]))
        return array.reshape(math.prod(rows), *shape[-3:])
    return array.reshape(shape)


def _allowed(mask: Array) -> Array:
    """A mask as bool; Flax's own makers of masks give numbers."""
    return mask if mask.dtype == jnp.bool_ else mask != 0


def _typed(key: Array | None) -> Array:
    """A typed key, also of the raw kind that linen may hand out."""
    if key is None:
        raise fail("dropout_rng", "a key, because dropout_rate > 0 and deterministic is False", None)
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
