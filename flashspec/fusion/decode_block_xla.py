"""The twin of the fused decoder step: the same arithmetic, one operation after another, on XLA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashspec.fusion.decode_block_request import BlockArrays, BlockForm, BlockRequest, HeadWeights, Places, start
from flashspec.fusion.request import ACTIVATIONS


def decode_block(request: BlockRequest, arrays: BlockArrays) -> tuple[Any, ...]:
    """(stream, query, key, value) as `flashspec.fusion.decode_block.decode_block` gives them."""
    form, rows, mlp = request.form, request.shape.rows, arrays.mlp
    x = arrays.stream.residual[:rows]
    if mlp is not None:
        assert arrays.attended is not None
        x = x + product(arrays.attended, mlp.out)
        gate_up = product(norm(x, mlp.norm, form), mlp.gate_up)
        x = x + product(ACTIVATIONS[form.activation](gate_up[:, 0]) * gate_up[:, 1], mlp.down)
    stream = start(x)
    if arrays.heads is None:
        return stream, None, None, None
    assert arrays.places is not None
    assert arrays.key is not None
    assert arrays.value is not None
    query, key, value = project(norm(x, arrays.heads.norm, form), arrays.heads, arrays.places, form)
    return stream, query, _write(arrays.key, key, arrays.places), _write(arrays.value, value, arrays.places)


def product(x: Array, kernel: Array) -> Array:
    """x [rows, inputs] times kernel [inputs, ...]; the highest precision unless they are 16-bit floats."""
    precision = "highest" if kernel.dtype.itemsize > 2 else None
    return jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), precision)


def norm(x: Array, scale: Array, form: BlockForm) -> Array:
    """scale * x / sqrt(mean(x^2) + eps) over the last axis, in float32 or better and rounded where models round."""
    work = x.astype(np.promote_types(x.dtype, np.float32))
    work = work * jax.lax.rsqrt(jnp.mean(jnp.square(work), axis=-1, keepdims=True) + form.eps)
    scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
    if form.unit_offset:
        return (work * (1 + scale.astype(work.dtype))).astype(x.dtype)
    return work.astype(x.dtype) * scale


def project(x: Array, weights: HeadWeights, places: Places, form: BlockForm) -> tuple[Array, Array, Array]:
    """Query [rows, N, H], key and value [rows, K, H] of normalised x, with positions applied."""
    K, G, H = form.heads
    fused = product(x, weights.qkv)
    if weights.bias is not None:
        fused = fused + weights.bias[None, :]
    fused = fused.reshape(-1, K, G + 2, H)
    turned = fused[:, :, : G + 1]
    if weights.query_norm is not None:
        assert weights.key_norm is not None
        query, key = norm(turned[:, :, :G], weights.query_norm, form), norm(turned[:, :, G:], weights.key_norm, form)
        turned = jnp.concatenate([query, key], axis=2)
    work = np.promote_types(x.dtype, np.float32)
    cos, sin = (angle[:, None, None, :].astype(work) for angle in (places.cos, places.sin))
    first, second = jnp.split(turned.astype(work), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned[:, :, :G].reshape(-1, K * G, H), turned[:, :, G], fused[:, :, G + 1]


def _write(layer: Array, new: Array, places: Places) -> Array:
    index = places.lead, places.slot
    return layer.at[index].set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)
