"""Attention kernels on a GPU: no worse than twice the plain formula's error, forward and backward.

The suite runs over every family of kernels: Hopper's, and the portable ones twice, as the GPU at hand would run them
and as one without a copy engine. Those before Hopper copy by `cp.async`, which later ones can as well.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mosaic

from flashspec.attention import Ampere, Hopper, ampere, attention_stats, dot_product_attention, plan_attention
from flashspec.masks import Contiguous
from flashspec.online_softmax import finalize, merge
from pallas_kernels.gpu.hopper import attention_backward_config, attention_forward_config
from pallas_kernels.gpu.hopper.attention_backward_config import BackwardShape
from pallas_kernels.gpu.hopper.attention_forward_config import AttentionShape
from tests.contracts.attention_oracle import Case, assert_no_worse, oracle, random_case, run

pytestmark = pytest.mark.gpu

# B, T, S, N, K, H, Hv: lengths that are no multiple of a block or of 8, groups, one key/value head, all head sizes.
SIZES = {
    "64": (2, 136, 200, 4, 2, 64, 64),
    "128": (1, 150, 261, 4, 4, 128, 128),
    "256": (1, 130, 141, 2, 1, 256, 256),
    "192": (1, 90, 150, 2, 2, 192, 136),
    "odd head": (2, 77, 90, 3, 1, 80, 80),
    "wide and narrow": (1, 70, 133, 4, 1, 128, 64),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"positions": "causal", "sinks": True},
    "window": {"positions": "causal window", "soft_cap": 1.5},
    "lengths": {"positions": "window", "lengths": True, "scale": -0.2},
    "segments": {"segments": True, "lengths": True},
}


class Family(NamedTuple):
    """Kernels for one kind of GPU.

    Args:
      name: of the implementation.
      settings: makes its settings, such as `Hopper`.
      copying: "cp.async" where tiles are to be copied without a copy engine, else "".
    """

    name: str
    settings: Any
    copying: str = ""


FAMILIES = (Family("hopper", Hopper), Family("ampere", Ampere), Family("ampere", Ampere, "cp.async"))


@pytest.fixture(params=FAMILIES, ids=lambda family: " ".join(filter(None, (family.name, family.copying))))
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """Whose kernels run. What was traced for one way of copying must not be found when the other is meant."""
    if request.param.copying == "cp.async":
        monkeypatch.setattr(ampere, "COPY_ENGINE", 99)
        monkeypatch.setattr(mosaic, "get_arch", lambda: mosaic.Arch(8, 0))
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def gpu_case(seed: int, sizes: tuple[int, ...], dtype: Any = jnp.bfloat16, **options: Any) -> Case:
    case = random_case(seed, dtype, sizes=sizes, **options)
    if "q_positions" in case.arguments:
        case.arguments["q_positions"] = Contiguous(case.arguments["q_positions"][:, 0].astype(np.int32))
        if case.arguments["window"] is not None:
            case.arguments["window"] = (70, 1)
    case.g_output = np.asarray(jnp.asarray(case.g_output, dtype), float)
    case.g_lse = np.zeros_like(case.g_lse)
    return case


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", ["64", "128", "256"])
def test_options(sizes: str, options: str, family: Family) -> None:
    case = gpu_case(0, SIZES[sizes], **OPTIONS[options])
    got = run(case, family.name)
    assert_no_worse(got, case)
    np.testing.assert_allclose(got.lse, oracle(case).lse, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("sizes", ["192", "odd head", "wide and narrow"])
def test_sizes(sizes: str, family: Family) -> None:
    case = gpu_case(1, SIZES[sizes], positions="causal")
    assert_no_worse(run(case, family.name), case)


def test_one_query_and_one_key(family: Family) -> None:
    """The output is the value, and its gradient the output's; those of query and key are 0."""
    case = gpu_case(1, (2, 1, 1, 2, 1, 64, 64))
    got = run(case, family.name)
    np.testing.assert_array_equal(np.asarray(got.output, float), np.repeat(case.arguments["value"], 2, 2).astype(float))
    want = case.g_output.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(np.asarray(got.gradients["value"], float), want, rtol=2**-7, atol=2**-7)
    for name in ("query", "key"):
        np.testing.assert_allclose(np.asarray(got.gradients[name], float), 0, atol=2**-6)


# One of few blocks, with default positions; one of many, over several of which the window goes.
@pytest.mark.parametrize(("batch", "length", "left"), [(2, 200, 100), (1, 700, 300)])
def test_float16_and_default_positions(batch: int, length: int, left: int, family: Family) -> None:
    case = gpu_case(2, (batch, length, length, 4, 2, 128, 128), np.float16)
    case.arguments |= {"is_causal": True, "window": (left, 0)}
    got = run(case, family.name)
    assert_no_worse(got, case)
    case.arguments["window"] = (left - 1, 0)
    with pytest.raises(AssertionError):
        assert_no_worse(got, case)


def test_large_logits(family: Family) -> None:
    case = gpu_case(3, SIZES["128"])
    case.arguments["scale"] = 20.0
    got = run(case, family.name)
    assert np.isfinite(np.asarray(got.output, float)).all()
    np.testing.assert_allclose(got.lse, oracle(case).lse, rtol=1e-3)


def test_what_nobody_sees_touches_nothing(family: Family) -> None:
    case = gpu_case(4, SIZES["64"], positions="causal", sinks=True)
    case.arguments |= {"kv_lengths": np.array([131, 0]), "q_lengths": np.array([130, 136])}
    clean = run(case, family.name)
    copied = {name: case.arguments[name].copy() for name in ("query", "key", "value")}
    dirty = dataclasses.replace(case, arguments=case.arguments | copied)
    dirty.arguments["key"][0, 131:], dirty.arguments["value"][0, 131:] = np.nan, np.nan
    dirty.arguments["key"][1], dirty.arguments["query"][0, 130:] = np.nan, np.inf
    got = run(dirty, family.name)
    np.testing.assert_array_equal(got.output, clean.output)
    np.testing.assert_array_equal(got.lse, clean.lse)
    for name, gradient in got.gradients.items():
        assert np.isfinite(np.asarray(gradient, float)).all(), name
    assert not np.asarray(got.output, float)[1].any()
    np.testing.assert_allclose(got.lse[1], np.broadcast_to(case.arguments["sinks"], got.lse[1].shape), rtol=1e-5)


def test_statistics_merge_into_the_whole(family: Family) -> None:
    case = gpu_case(5, SIZES["128"])
    query, key, value = (jnp.asarray(case.arguments[name]) for name in ("query", "key", "value"))
    parts = [
        attention_stats(query, key[:, s], value[:, s], implementation=family.name)
        for s in (slice(0, 64), slice(64, None))
    ]
    output, lse = finalize(merge(*parts))
    want = oracle(case)
    assert np.linalg.norm(output - want.output) <= 5e-3 * np.linalg.norm(want.output)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-4, atol=1e-4)
    alone, _ = finalize(parts[1])
    assert np.linalg.norm(alone - want.output) > 5e-3 * np.linalg.norm(want.output)


def test_vmap_equals_a_loop_and_runs_agree(family: Family) -> None:
    case = gpu_case(6, SIZES["64"])
    query, key, value = (jnp.asarray(case.arguments[name]) for name in ("query", "key", "value"))
    call = jax.jit(lambda q: dot_product_attention(q, key, value, implementation=family.name))
    stacked = jnp.stack([query, 2 * query])
    both = jax.jit(jax.vmap(call))(stacked)
    for i in range(2):
        np.testing.assert_array_equal(np.asarray(both[i], float), np.asarray(call(stacked[i]), float))
    np.testing.assert_array_equal(np.asarray(call(query), float), np.asarray(call(query), float))


@pytest.mark.parametrize(
    "sizes", [(2, 1500, 4, 2, 64), (2, 1500, 4, 2, 128), (1, 1500, 4, 4, 128), (1, 1500, 2, 1, 256)]
)
def test_deterministic_gradients_are_bit_equal_from_run_to_run(sizes: tuple[int, ...], family: Family) -> None:
    """Enough blocks of keys for each query that additions in whatever order they come would differ."""
    B, T, N, K, H = sizes
    case = gpu_case(7, (B, T, T, N, K, H, H), positions="causal")
    settings = family.settings(deterministic=True)
    runs = [run(case, settings).gradients for _ in range(8)]
    assert_no_worse(run(case, settings), case)
    for other in runs[1:]:
        for name, gradient in runs[0].items():
            np.testing.assert_array_equal(np.asarray(other[name], float), np.asarray(gradient, float))


def test_the_default_gradients_are_not_bit_equal(family: Family) -> None:
    """The wrong variant of the test above: dQ is added in whatever order thread blocks come."""
    case = gpu_case(7, (2, 1500, 1500, 4, 4, 128, 128))
    runs = [np.asarray(run(case, family.name).gradients["query"], float) for _ in range(8)]
    assert any((other != runs[0]).any() for other in runs)


@pytest.mark.parametrize("sizes", ["64", "128", "256"])
def test_settings_change_no_result(sizes: str) -> None:
    """All candidates of a search on Hopper that may be picked by hand, here one from each end."""
    case = gpu_case(8, SIZES[sizes], positions="causal window", sinks=True)
    shape = AttentionShape(*SIZES[sizes])._replace(T=152, S=264)
    forward = tuple(attention_forward_config.candidates(shape))
    for deterministic in (False, True):
        backward = attention_backward_config.candidates(BackwardShape(*shape), deterministic=deterministic)
        for one, other in ((forward[0], backward[-1]), (forward[-1], backward[len(backward) // 2])):
            assert_no_worse(run(case, Hopper(one, other, deterministic=deterministic)), case)


def test_many_heads(family: Family) -> None:
    """B * N beyond 65,535, where a grid of two axes ends."""
    pairs = zip(jax.random.split(jax.random.key(0), 3), (2**16, 2**14, 2**14), strict=True)
    query, key, value = (jax.random.normal(seed, (2, 8, heads, 64), jnp.bfloat16) for seed, heads in pairs)
    call = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True, implementation=family.name))
    got, part = call(query, key, value), slice(-64, None)
    want = call(query[:, :, part], key[:, :, -16:], value[:, :, -16:])
    np.testing.assert_array_equal(np.asarray(got[:, :, part], float), np.asarray(want, float))


def test_the_program_holds_the_kernels_that_the_plan_names(family: Family) -> None:
    shape: Any = jnp.ones((2, 128, 4, 64), jnp.bfloat16)
    plan = plan_attention(shape, shape, shape, is_causal=True, implementation=family.name)
    assert (plan.forward.implementation, plan.backward.implementation) == (family.name, family.name)

    def total(q: Any) -> Any:
        output = dot_product_attention(q, shape, shape, is_causal=True, implementation=family.name)
        return output.astype(jnp.float32).sum()

    program = jax.jit(jax.grad(total)).lower(shape).compile().as_text()
    for mark in ("flashspec_{}_attention_forward", "flashspec_{}_attention_backward", "flashspec.attention.{}"):
        assert mark.format(family.name) in program


def test_hopper_is_the_default_where_it_runs() -> None:
    shape: Any = jnp.ones((2, 128, 4, 64), jnp.bfloat16)
    plan = plan_attention(shape, shape, shape, is_causal=True)
    assert (plan.forward.implementation, plan.backward.implementation) == ("hopper", "hopper")
    call = jax.jit(lambda q: dot_product_attention(q, shape, shape, is_causal=True))
    assert "flashspec.attention.hopper" in call.lower(shape).compile().as_text()
