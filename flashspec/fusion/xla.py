"""A matmul with its tail as XLA fuses it: sums in float32 that never become 16-bit before the tail has run."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.fusion.request import EpilogueOperands, EpilogueRequest


def xla_epilogue(
    request: EpilogueRequest, operands: EpilogueOperands, total: Callable[[jax.Array], jax.Array] = lambda z: z
) -> jax.Array:
    """phi(x W + b), or phi(x W_g + b_g) * (x W + b); + residual; rounded once, at the end.

    `total` makes whole products of those of a part of the contraction.
    """
    operands = operands.apart()

    def affine(weights: jax.Array, bias: jax.Array | None) -> jax.Array:
        z = total(product(operands.x, weights))
        return z if bias is None else z + bias.astype(z.dtype).reshape((1,) * (z.ndim - 1) + (-1,))

    y = affine(operands.w, operands.bias)
    if operands.gate is None:
        y = request.activate(y)
    else:
        y = request.activate(affine(operands.gate, operands.gate_bias)) * y
    if operands.residual is not None:
        y = y + operands.residual.astype(y.dtype)
    return y.astype(request.dtype)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w with sums and result in float32, or float64 for float64."""
    if x.dtype.itemsize > 2:
        return jnp.matmul(x, w, precision="highest")
    return _half_product(x, w)


@jax.custom_vjp
def _half_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, preferred_element_type=np.float32)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _half_product(x, w), (x, w)


def _backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient is rounded to the operands' dtype: float32 times 16 bits would leave the fast matrix units."""
    x, w = kept
    gradient = gradient.astype(x.dtype)
    dot = functools.partial(jnp.tensordot, preferred_element_type=np.float32)
    leading = list(range(x.ndim - 1))
    return dot(gradient, w, axes=(-1, 1)).astype(x.dtype), dot(x, gradient, axes=(leading, leading)).astype(w.dtype)


_half_product.defvjp(_forward, _backward)
