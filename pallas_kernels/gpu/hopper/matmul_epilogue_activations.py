"""Activations inside of a Hopper kernel, of the few fast instructions that the chip has: 2^x and 1 / sqrt(x).

A multiprocessor computes 16 of those a cycle, and eight times as many products: arrays that are worked on together
share the one reciprocal of their product.
"""

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array, lax

type Activation = Callable[[list[Array]], list[Array]]

LOG2E = math.log2(math.e)
MOST = 60.0  # of an exponent: two such powers of two have a product in float32, and 1 / 2^60 is as good as 0


def _sigmoids(exponents: list[Array]) -> list[Array]:
    """1 / (1 + 2^t) for one or two arrays, to 2^-21: a division each would take ten instructions."""
    powers = [jnp.exp2(jnp.minimum(t, MOST)) for t in exponents]
    if len(powers) == 1:
        return [_reciprocal(1 + powers[0])]
    a, b = powers
    # Of a sum of 1 and an absolute value, so that the compiler makes no case for tiny numbers.
    inverse = _reciprocal(1 + jnp.abs(a * (1 + b) + b))
    return [inverse * (1 + b), inverse * (1 + a)]


def _reciprocal(x: Array) -> Array:
    root = lax.rsqrt(x)
    return root * root


def _times_sigmoid(zs: list[Array], exponents: list[Array]) -> list[Array]:
    return [z * sigmoid for z, sigmoid in zip(zs, _sigmoids(exponents), strict=True)]


def _gelu_tanh(zs: list[Array]) -> list[Array]:
    """z (1 + tanh(u)) / 2 = z sigmoid(2 u), with u = sqrt(2 / pi) (z + 0.044715 z^3)."""
    scale = -2 * LOG2E * math.sqrt(2 / math.pi)
    return _times_sigmoid(zs, [z * (scale + (scale * 0.044715) * (z * z)) for z in zs])


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_tanh": _gelu_tanh,
    "silu": lambda zs: _times_sigmoid(zs, [z * -LOG2E for z in zs]),
    "relu": lambda zs: [jnp.maximum(z, 0) for z in zs],
    "sigmoid": lambda zs: _sigmoids([z * -LOG2E for z in zs]),
    "tanh": lambda zs: [1 - 2 * sigmoid for sigmoid in _sigmoids([z * (2 * LOG2E) for z in zs])],
}
