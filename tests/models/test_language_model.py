"""The decoder in the generation loop: identity of equal models, no retrace, shallow models, wrong choices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec import models
from tests.models.examples import assert_close, example

TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, 37, (2, 4)), jnp.int32)


def test_equal_descriptions_are_one_model() -> None:
    config, _ = example("llama")
    again = models.DecoderConfig.from_hf(config.to_hf())
    assert models.as_language_model(config) is models.as_language_model(again)
    assert models.as_language_model(config) != models.as_language_model(config, cache="paged")


def test_no_retrace_for_other_parameters_and_lengths() -> None:
    config, params = example("llama")
    model, traces = models.as_language_model(config), 0

    @jax.jit
    def step(params: object, tokens: jax.Array, cache: object) -> object:
        nonlocal traces
        traces += 1
        return model.apply(params, tokens, cache)

    cache = model.init_cache(2, 12)
    for scale in (1.0, 2.0):
        _, cache = step(jax.tree.map(lambda leaf: leaf * scale, params), TOKENS, cache)  # noqa: B023
    assert traces == 1


def test_the_cache_has_the_model_s_shape_and_dtype() -> None:
    config, _ = example("llama tied, one kv head")
    cache = models.as_language_model(config, jnp.bfloat16).init_cache(3, 10)
    assert [key.shape for key in cache.key] == [(3, 16, 1, 8)] * config.num_layers  # 10, up to a multiple of 8
    assert cache.key[0].dtype == jnp.bfloat16


def test_prefill_computes_no_logits() -> None:
    config, params = example("llama")
    model = models.as_language_model(config)
    assert model.prefill is not None
    arguments = params, TOKENS, jnp.array([4, 2], jnp.int32), model.init_cache(2, 8)
    assert f"[2,4,{config.vocab_size}]" not in str(jax.make_jaxpr(model.prefill)(*arguments))
    assert f"[2,4,{config.vocab_size}]" in str(jax.make_jaxpr(model.apply)(params, TOKENS, arguments[3]))


@pytest.mark.parametrize("name", ["llama", "llama tied, one kv head"])
def test_a_shallow_model_is_the_first_layers(name: str) -> None:
    config, params = example(name)
    small, shared = models.shallow(config, params, 1)
    assert small.num_layers == 1
    assert shared["head"][...] is params["head"][...]
    model, own = models.as_language_model(small), models.as_language_model(config)
    cache = model.init_cache(2, 8)
    logits, _ = jax.jit(model.apply)(shared, TOKENS, cache)

    def first_layers(params: Any, tokens: jax.Array, cache: Any) -> jax.Array:
        decoder = models.merge(config, params)
        decoder.layers = decoder.layers[:1]
        decoder.config = small
        return decoder.logits(decoder.step(tokens, cache, attention=models.language_model.cached_attention)[0])

    assert_close(logits, jax.jit(first_layers)(params, TOKENS, cache))
    whole, _ = jax.jit(own.apply)(params, TOKENS, own.init_cache(2, 8))
    with pytest.raises(AssertionError):
        assert_close(logits, whole)


def test_all_layers_are_the_model_itself() -> None:
    config, params = example("qwen3")
    same, shared = models.shallow(config, params, config.num_layers)
    assert same == config
    assert jax.tree.structure(shared) == jax.tree.structure(params)


@pytest.mark.parametrize("layers", [0, 3])
def test_a_number_of_layers_that_there_is_not(layers: int) -> None:
    config, params = example("llama")
    with pytest.raises(ValueError, match="layers"):
        models.shallow(config, params, layers)


def test_a_window_cache_needs_a_model_with_a_window() -> None:
    for name in ("llama", "gemma 2"):
        with pytest.raises(ValueError, match="whole prefix"):
            models.as_language_model(example(name)[0], cache="window")
    with pytest.raises(ValueError, match="'dense', 'window', 'paged'"):
        models.as_language_model(example("llama")[0], cache="ring")


def test_parameters_of_another_dtype_are_refused() -> None:
    config, params = example("llama")
    model = models.as_language_model(config, jnp.bfloat16)
    with pytest.raises(ValueError, match="dtype bfloat16"):
        model.apply(params, TOKENS, model.init_cache(2, 8))


def test_tokens_of_the_wrong_rank_are_refused() -> None:
    config, params = example("llama")
    model = models.as_language_model(config)
    with pytest.raises(ValueError, match="`tokens`"):
        model.apply(params, TOKENS[0], model.init_cache(1, 8))


def test_the_plan_says_who_computes_the_gated_product() -> None:
    large = dataclasses.replace(example("llama")[0], hidden_size=4096, intermediate_size=14336)
    plan = functools.partial(models.plan_mlp, large, device="NVIDIA H200")
    chosen = {rows: plan(rows, jnp.bfloat16).forward for rows in (1, 192, 8192)}
    assert chosen == {1: "unfused", 192: "unfused", 8192: "hopper"}
    assert "gated product on NVIDIA H200: [16, 4096] x [4096, 2, 14336] bfloat16, silu" in str(plan(16, jnp.bfloat16))
    assert "not hopper: computes in bfloat16 or float16, not in float32" in str(plan(16))
    assert plan(1, jnp.bfloat16, gated_product="hopper").forward == "hopper"
    split = plan(16, jnp.bfloat16, gated_product="hopper", mesh=models.decoder_mesh(1, 2))
    assert split.forward == "unfused"
    assert "not hopper: the model lies on a mesh" in str(split)
    with pytest.raises(ValueError, match="`rows`"):
        plan(0)


def test_a_gated_product_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="`gated_product`: expected one of"):
        models.as_language_model(example("llama")[0], gated_product="cublas")
    for mesh in (None, models.decoder_mesh(1, 1)):
        with pytest.raises(ValueError, match="`gated_product`: expected one of"):
            models.plan_mlp(example("llama")[0], 8, gated_product="cublas", mesh=mesh)


def test_a_plan_for_a_mesh_that_the_model_cannot_lie_on() -> None:
    with pytest.raises(ValueError, match="`mesh`"):
        models.plan_mlp(example("llama")[0], 8, mesh=jax.make_mesh((1,), ("x",)))
