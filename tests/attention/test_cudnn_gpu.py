"""cuDNN on the calls that it is allowed to take: as exact as the plain formula, forward and backward, and really it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.attention import dot_product_attention, plan_attention
from flashspec.attention.backends import scope
from tests.contracts.attention_oracle import Case, assert_no_worse, random_case, run

pytestmark = pytest.mark.gpu

SIZES = [(2, 64, 64, 4, 2, 64, 64), (1, 34, 34, 4, 4, 128, 128)]
OPTIONS: list[dict[str, Any]] = [{}, {"is_causal": True}, {"is_causal": True, "window": (5, 0)}, {"scale": 0.3}]
RECTANGLE = (2, 16, 48, 4, 1, 64, 64)


def output_case(seed: int, dtype: Any, sizes: tuple[int, ...], **options: Any) -> Case:
    """A call of which only the output matters."""
    case = random_case(seed, dtype, sizes=sizes)
    return Case(case.arguments | options, case.g_output, np.zeros_like(case.g_lse))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"is_causal": True, "window": (5, 0)}, {"scale": 0.3}], ids=str
)
@pytest.mark.parametrize("sizes", SIZES)
def test_cudnn_against_the_oracle(sizes: tuple[int, ...], options: dict[str, Any], dtype: Any) -> None:
    case = output_case(0, dtype, sizes, **options)
    assert_no_worse(run(case, "cudnn", return_lse=False), case)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_cudnn_with_other_keys_than_queries(dtype: Any) -> None:
    case = output_case(1, dtype, RECTANGLE)
    assert_no_worse(run(case, "cudnn", return_lse=False), case)


def test_the_oracle_notices_a_shorter_window() -> None:
    case = output_case(0, jnp.bfloat16, SIZES[0], is_causal=True, window=(5, 0))
    got = run(case, "cudnn", return_lse=False)
    case.arguments["window"] = (4, 0)
    with pytest.raises(AssertionError):
        assert_no_worse(got, case)


def operands(*lead: int) -> list[jax.Array]:
    shapes = (2, 64, 4, 64), (2, 64, 2, 64), (2, 64, 2, 64)
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (*lead, *shape), jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def test_the_default_is_cudnn_and_the_program_holds_it() -> None:
    args = operands()
    plan = plan_attention(*args, is_causal=True)
    assert plan.forward.implementation == plan.backward.implementation == "cudnn"
    text = jax.jit(functools.partial(dot_product_attention, is_causal=True)).lower(*args).compile().as_text()
    assert scope("cudnn") in text
    assert "__cudnn$fmha" in text
    assert scope("blockwise") not in text
    assert scope("reference") not in text


def test_cudnn_under_vmap_over_any_axis() -> None:
    call = functools.partial(dot_product_attention, implementation="cudnn", is_causal=True)
    gradient = jax.grad(lambda *a: jnp.sum(call(*a).astype(jnp.float32)), argnums=(0, 1, 2))
    stacked = operands(3)
    got = jax.vmap(gradient, in_axes=(1, 2, 0))(
        *(jnp.moveaxis(x, 0, axis) for x, axis in zip(stacked, (1, 2, 0), strict=True))
    )
    for i in range(3):
        for x, y in zip(got, gradient(*(x[i] for x in stacked)), strict=True):
            np.testing.assert_allclose(np.asarray(x[i], np.float32), np.asarray(y, np.float32), rtol=0.02, atol=0.02)
