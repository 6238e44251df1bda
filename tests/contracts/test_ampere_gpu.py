"""The portable kernels on a GPU: no worse than twice the plain formula's error, forward and backward.

Each case runs as the GPU at hand would, and as one without a copy engine: those before Hopper copy by `cp.async`, which
later ones can as well.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mosaic

from flashspec.attention import Ampere, ampere, attention_stats, dot_product_attention, plan_attention
from flashspec.online_softmax import finalize, merge
from tests.contracts.attention_oracle import assert_no_worse, oracle, run
from tests.contracts.test_hopper_gpu import OPTIONS, SIZES, gpu_case

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["copy engine", "cp.async"], autouse=True)
def copying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How tiles are copied. What was traced for one way must not be found when the other is meant."""
    if request.param == "cp.async":
        monkeypatch.setattr(ampere, "COPY_ENGINE", 99)
        monkeypatch.setattr(mosaic, "get_arch", lambda: mosaic.Arch(8, 0))
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", ["64", "128", "256"])
def test_options(sizes: str, options: str) -> None:
    case = gpu_case(0, SIZES[sizes], **OPTIONS[options])
    got = run(case, "ampere")
    assert_no_worse(got, case)
    np.testing.assert_allclose(got.lse, oracle(case).lse, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("sizes", ["192", "odd head", "wide and narrow"])
def test_sizes(sizes: str) -> None:
    case = gpu_case(1, SIZES[sizes], positions="causal")
    assert_no_worse(run(case, "ampere"), case)


def test_one_query_and_one_key() -> None:
    """The output is the value, and its gradient the output's."""
    case = gpu_case(1, (2, 1, 1, 2, 1, 64, 64))
    got = run(case, "ampere")
    np.testing.assert_array_equal(np.asarray(got.output, float), np.repeat(case.arguments["value"], 2, 2).astype(float))
    want = case.g_output.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(np.asarray(got.gradients["value"], float), want, rtol=2**-7, atol=2**-7)


def test_float16_and_many_blocks() -> None:
    case = gpu_case(2, (1, 700, 700, 4, 2, 128, 128), np.float16)
    case.arguments |= {"is_causal": True, "window": (300, 0)}
    got = run(case, "ampere")
    assert_no_worse(got, case)
    case.arguments["window"] = (299, 0)
    with pytest.raises(AssertionError):
        assert_no_worse(got, case)


def test_large_logits() -> None:
    case = gpu_case(3, SIZES["128"])
    case.arguments["scale"] = 20.0
    got = run(case, "ampere")
    assert np.isfinite(np.asarray(got.output, float)).all()
    np.testing.assert_allclose(got.lse, oracle(case).lse, rtol=1e-3)


def test_what_nobody_sees_touches_nothing() -> None:
    case = gpu_case(4, SIZES["64"], positions="causal", sinks=True)
    case.arguments |= {"kv_lengths": np.array([131, 0]), "q_lengths": np.array([130, 136])}
    clean = run(case, "ampere")
    copied = {name: case.arguments[name].copy() for name in ("query", "key", "value")}
    dirty = dataclasses.replace(case, arguments=case.arguments | copied)
    dirty.arguments["key"][0, 131:], dirty.arguments["value"][0, 131:] = np.nan, np.nan
    dirty.arguments["key"][1], dirty.arguments["query"][0, 130:] = np.nan, np.inf
    got = run(dirty, "ampere")
    np.testing.assert_array_equal(got.output, clean.output)
    np.testing.assert_array_equal(got.lse, clean.lse)
    for name, gradient in got.gradients.items():
        assert np.isfinite(np.asarray(gradient, float)).all(), name
    assert not np.asarray(got.output, float)[1].any()


def test_statistics_merge_into_the_whole() -> None:
    case = gpu_case(5, SIZES["128"])
    query, key, value = (jnp.asarray(case.arguments[name]) for name in ("query", "key", "value"))
    parts = [
        attention_stats(query, key[:, s], value[:, s], implementation="ampere") for s in (slice(0, 64), slice(64, None))
    ]
    output, lse = finalize(merge(*parts))
    want = oracle(case)
    assert np.linalg.norm(output - want.output) <= 5e-3 * np.linalg.norm(want.output)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-4, atol=1e-4)
    alone, _ = finalize(parts[1])
    assert np.linalg.norm(alone - want.output) > 5e-3 * np.linalg.norm(want.output)


def test_vmap_equals_a_loop_and_runs_agree() -> None:
    case = gpu_case(6, SIZES["64"])
    query, key, value = (jnp.asarray(case.arguments[name]) for name in ("query", "key", "value"))
    call = jax.jit(lambda q: dot_product_attention(q, key, value, implementation="ampere"))
    stacked = jnp.stack([query, 2 * query])
    both = jax.jit(jax.vmap(call))(stacked)
    for i in range(2):
        np.testing.assert_array_equal(np.asarray(both[i], float), np.asarray(call(stacked[i]), float))


def test_deterministic_gradients_are_bit_equal_from_run_to_run() -> None:
    case = gpu_case(7, (2, 1500, 1500, 4, 2, 128, 128), positions="causal")
    runs = [run(case, Ampere(deterministic=True)).gradients for _ in range(5)]
    assert_no_worse(run(case, Ampere(deterministic=True)), case)
    for other in runs[1:]:
        for name, gradient in other.items():
            np.testing.assert_array_equal(np.asarray(gradient, float), np.asarray(runs[0][name], float))


def test_the_default_gradients_are_not_bit_equal() -> None:
    """The wrong variant of the test above: dQ is added in whatever order thread blocks come."""
    case = gpu_case(7, (2, 1500, 1500, 4, 4, 128, 128))
    runs = [np.asarray(run(case, "ampere").gradients["query"], float) for _ in range(8)]
    assert any((other != runs[0]).any() for other in runs)


def test_many_heads() -> None:
    """B * N beyond 65,535, where a grid of two axes ends."""
    pairs = zip(jax.random.split(jax.random.key(0), 3), (2**16, 2**14, 2**14), strict=True)
    query, key, value = (jax.random.normal(seed, (2, 8, heads, 64), jnp.bfloat16) for seed, heads in pairs)
    call = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True, implementation="ampere"))
    got, part = call(query, key, value), slice(-64, None)
    want = call(query[:, :, part], key[:, :, -16:], value[:, :, -16:])
    np.testing.assert_array_equal(np.asarray(got[:, :, part], float), np.asarray(want, float))


def test_the_program_holds_the_kernels_that_the_plan_names() -> None:
    shape: Any = jnp.ones((2, 128, 4, 64), jnp.bfloat16)
    plan = plan_attention(shape, shape, shape, is_causal=True, implementation="ampere")
    assert (plan.forward.implementation, plan.backward.implementation) == ("ampere", "ampere")

    def total(q: Any) -> Any:
        return dot_product_attention(q, shape, shape, is_causal=True, implementation="ampere").astype(jnp.float32).sum()

    program = jax.jit(jax.grad(total)).lower(shape).compile().as_text()
    assert "flashspec_ampere_attention_forward" in program
    assert "flashspec_ampere_attention_backward" in program
    assert "flashspec.attention.ampere" in program
