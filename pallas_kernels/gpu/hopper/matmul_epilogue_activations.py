"""Activations inside of a Hopper kernel, of the few fast instructions that the chip has: 2^x and 1 / sqrt(x)."""

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array, lax

LOG2E = math.log2(math.e)


def _reciprocal(x: Array) -> Array:
    """1 / x for x > 0, to 2^-22: a division would take ten instructions."""
    root = lax.rsqrt(x)
    return root * root


def _sigmoid(z: Array) -> Array:
    return _reciprocal(1 + jnp.exp2(z * -LOG2E))


def _gelu_tanh(z: Array) -> Array:
    """z (1 + tanh(u)) / 2 = z sigmoid(2 u), with u = sqrt(2 / pi) (z + 0.044715 z^3)."""
    scale = -2 * LOG2E * math.sqrt(2 / math.pi)
    return z * _reciprocal(1 + jnp.exp2(z * (scale + (scale * 0.044715) * (z * z))))


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu_tanh": _gelu_tanh,
    "silu": lambda z: z * _sigmoid(z),
    "relu": lambda z: jnp.maximum(z, 0),
    "sigmoid": _sigmoid,
    "tanh": lambda z: 1 - 2 * _reciprocal(1 + jnp.exp2(z * (2 * LOG2E))),
}
