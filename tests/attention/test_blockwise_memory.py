"""Memory of the compiled program at the chapter's size, T = S = 8192 (section 33.3): no score matrix, nor half of one.

At 2 bytes an element one head's scores are 128 MiB, those of 32 heads 4 GiB. Nothing is run: XLA says what it needs.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from flashspec.attention.blockwise import blockwise_attention
from flashspec.attention.reference import reference_attention
from flashspec.attention.request import make_request

MIB = 2**20
H = 64


def temporary_bytes(implementation, length, heads, dtype, backward, **options):
    """What the compiled program allocates beside arguments and results."""

    def output(q, k, v):
        return implementation(*make_request(q, k, v, **options))[0]

    def slopes(q, k, v):
        return jax.grad(lambda *x: jnp.sum(output(*x)).astype(jnp.float32), (0, 1, 2))(q, k, v)

    x = jax.ShapeDtypeStruct((1, length, heads, H), dtype)
    compiled = jax.jit(slopes if backward else output).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_head_stays_far_below_a_score_matrix(dtype, backward):
    assert temporary_bytes(blockwise_attention, 8192, 1, dtype, backward) < 128 * MIB / 8


def test_the_explicit_scores_are_what_the_bound_rejects():
    """Wrong variant: the reference holds them."""
    assert 8192 * 8192 == 67_108_864
    assert temporary_bytes(reference_attention, 8192, 1, "float16", False) > 128 * MIB


@pytest.mark.parametrize("backward", [pytest.param(False, marks=pytest.mark.slow), True])
def test_growth_is_linear_for_32_heads(backward):
    measure = functools.partial(temporary_bytes, heads=32, dtype="float16", backward=backward, is_causal=True)
    sizes = [measure(blockwise_attention, length) for length in (2048, 4096, 8192)]
    assert sizes[2] < 4096 * MIB / 8
    assert all(long < 2.1 * short for short, long in itertools.pairwise(sizes))


def test_quadratic_growth_is_what_that_rejects():
    sizes = [temporary_bytes(reference_attention, length, 32, "float16", False) for length in (2048, 4096, 8192)]
    assert sizes[2] > 4096 * MIB
    assert not any(long < 2.1 * short for short, long in itertools.pairwise(sizes))


def test_a_bias_of_the_caller_is_read_in_tiles():
    """A [T, S] bias is the caller's memory, and its gradient the result's; no third array of that size appears."""
    length, bias_bytes = 2048, 4 * 2048 * 2048

    def slopes(q, k, v, bias):
        return jax.grad(lambda *x: jnp.sum(blockwise_attention(*make_request(*x))[0]), (0, 1, 2, 3))(q, k, v, bias)

    x = jax.ShapeDtypeStruct((1, length, 1, H), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 1, length, length), jnp.float32)
    compiled = jax.jit(slopes).lower(x, x, x, bias).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * bias_bytes
