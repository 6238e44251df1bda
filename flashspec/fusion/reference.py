"""The slow twin of a matmul with its tail: one step after another, in float32 or better from the start."""

import jax
import jax.numpy as jnp

from flashspec.fusion.request import EpilogueOperands, EpilogueRequest


def reference_epilogue(request: EpilogueRequest, operands: EpilogueOperands) -> jax.Array:
    """phi(x W + b), or phi(x W_g + b_g) * (x W + b); + residual; rounded once, at the end."""
    operands = operands.apart()

    def exact(array: jax.Array) -> jax.Array:
        return array.astype(request.work_dtype)

    def affine(weights: jax.Array, bias: jax.Array | None) -> jax.Array:
        product = jnp.matmul(exact(operands.x), exact(weights), precision="highest")
        return product if bias is None else product + jnp.broadcast_to(exact(bias), product.shape)

    z = affine(operands.w, operands.bias)
    if operands.gate is None:
        y = request.activate(z)
    else:
        y = request.activate(affine(operands.gate, operands.gate_bias)) * z
    if operands.residual is not None:
        y = y + exact(operands.residual)
    return y.astype(request.dtype)
