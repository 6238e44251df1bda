"""Activations inside of a Hopper kernel, by the one instruction that the chip has for a hyperbolic tangent.

A multiprocessor computes 16 of those a cycle, and eight times as many products: a tail with one of them, and with few
products around it, is what a kernel can hide behind its matrix products. They act on h = z / 2, since

    silu(z) = z / (1 + e^-z) = h + h tanh(h),      gelu_tanh(z) = h + h tanh(sqrt(2 / pi) (z + 0.044715 z^3)),

and the halving goes into the addition of the bias.

The instruction, `tanh.approx.f32`, has a relative error of up to 2^-11. What it leaves in h + h tanh(u) is therefore
up to |h| 2^-11 = 2^-12 |z|: no more than rounding z to float16 would, whose half unit in the last place is from 2^-12
to 2^-11 of |z|, and an eighth of what rounding it to bfloat16 would. That is an absolute error: far below zero, where
both functions vanish, it is large beside them.
"""

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array, lax

type Activation = Callable[[Array], Array]


def _gelu_tanh(h: Array) -> Array:
    scale = 2 * math.sqrt(2 / math.pi)
    return h + h * lax.tanh(h * (scale + (4 * 0.044715 * scale) * (h * h)))


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_tanh": _gelu_tanh,
    "silu": lambda h: h + h * lax.tanh(h),
    "relu": lambda h: 2 * jnp.maximum(h, 0),
    "sigmoid": lambda h: 0.5 + 0.5 * lax.tanh(h),
    "tanh": lambda h: lax.tanh(2 * h),
}
