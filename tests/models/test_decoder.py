"""The full forward against numpy, for every family, and against what it must not be."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flashspec import models
from flashspec.attention import dot_product_attention
from flashspec.fusion.backends import BACKENDS
from pallas_kernels.gpu.hopper import matmul_epilogue_config
from tests.fusion import test_hopper
from tests.models import examples, oracle
from tests.models.examples import CONFIGS, assert_close, example, rows, stored

TOKENS = np.random.default_rng(0).integers(0, 37, (2, 9)).astype(np.int32)


def full(name: str, positions: jax.Array | None = None) -> jax.Array:
    return examples.full(name, rows(TOKENS), None if positions is None else rows(positions))


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_is_the_oracle(name: str, tmp_path: Path) -> None:
    config, params = example(name)
    tensors = stored(tmp_path, config, params)
    got = full(name)
    assert got.dtype == jnp.float32
    for row, tokens in zip(got, TOKENS, strict=True):
        assert_close(row, oracle.logits(config, tensors, tokens))


@pytest.mark.parametrize("wrong", oracle.WRONG)
def test_a_planted_bug_is_seen(wrong: str, tmp_path: Path) -> None:
    name = oracle.WRONG[wrong]
    config, params = example(name)
    tensors = stored(tmp_path, config, params)
    with pytest.raises(AssertionError):
        assert_close(full(name)[0], oracle.logits(config, tensors, TOKENS[0], wrong))


def test_logits_depend_on_differences_of_positions_only() -> None:
    shifted = jnp.arange(9, dtype=jnp.int32)[None, :] + jnp.array([[5], [1000]], jnp.int32)
    assert_close(full("llama", positions=shifted), full("llama"), 5e-4)


def test_positions_with_gaps_are_not_slots() -> None:
    gaps = jnp.broadcast_to(2 * jnp.arange(9, dtype=jnp.int32)[None, :], TOKENS.shape)
    with pytest.raises(AssertionError):
        assert_close(full("llama", positions=gaps), full("llama"), 5e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_number_of_parameters(name: str) -> None:
    config, params = example(name)
    assert config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_bfloat16_keeps_norms_and_logits_in_float32() -> None:
    config, params = example("qwen3")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    got = examples.forward(config, params, jnp.asarray(TOKENS))
    assert got.dtype == jnp.float32
    assert_close(got, full("qwen3"), 0.1)
    # The head's products are summed and kept in float32: some logits are no bfloat16 numbers.
    assert (np.asarray(got) != np.asarray(got.astype(jnp.bfloat16).astype(jnp.float32))).any()


@pytest.mark.parametrize("name", ["qwen2", "gemma 3"])
def test_gradients_reach_every_parameter(name: str) -> None:
    config, params = example(name)

    def loss(params: nnx.State) -> jax.Array:
        return jnp.square(examples.forward(config, params, jnp.asarray(TOKENS))).sum()

    assert all(np.abs(np.asarray(leaf)).max() > 0 for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_what_branches_add_passes_through_drop() -> None:
    config, params = example("llama")
    decoder = models.merge(config, params)
    nothing = decoder(jnp.asarray(TOKENS), attention=dot_product_attention, drop=jnp.zeros_like)
    rows = jnp.take(decoder.embed[...], jnp.asarray(TOKENS), axis=0)
    assert_close(nothing, decoder.logits(decoder.norm(rows)))


@pytest.mark.parametrize("name", ["llama", "gemma 3"])
def test_the_gated_product_as_one_operation(name: str) -> None:
    """The same logits; with the gate in the place of what it gates, other ones."""
    config, params = example(name)

    def logits(params: nnx.State) -> jax.Array:
        return models.merge(config, params, gated_product="xla")(jnp.asarray(TOKENS), attention=dot_product_attention)

    assert_close(logits(params), full(name))
    assert "flashspec.fusion.xla" in jax.jit(logits).lower(params).as_text(debug_info=True)
    swapped = jax.tree.map_with_path(
        lambda path, x: x[:, ::-1] if "gate_up" in jax.tree_util.keystr(path) else x, params
    )
    with pytest.raises(AssertionError):
        assert_close(logits(swapped), full(name))


def test_the_gated_product_is_chosen_by_what_the_program_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing changes; where a kernel is known to be faster it is there, in forwards with rows enough."""
    config = models.DecoderConfig("llama", 37, 64, 128, 1, 2, 1, 32)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), examples.random_params(config))

    def logits(rows: int, gated_product: str | None = None) -> Any:
        decoder = models.merge(config, params, gated_product=gated_product)
        return decoder(jnp.zeros((2, rows // 2), jnp.int32), attention=dot_product_attention)

    def programs(rows: int) -> tuple[str, str]:
        return str(jax.make_jaxpr(lambda: logits(rows))()), str(jax.make_jaxpr(lambda: logits(rows, "unfused"))())

    chosen, unfused = programs(16)
    assert chosen == unfused
    test_hopper.use(monkeypatch)
    monkeypatch.setitem(BACKENDS, "hopper", dataclasses.replace(BACKENDS["hopper"], slower=lambda request: None))  # type: ignore[arg-type]
    monkeypatch.setattr(matmul_epilogue_config, "PAIR", (64, 128))
    chosen, unfused = programs(16)
    assert chosen != unfused
    assert test_hopper.SEEN
    assert_close(logits(16), logits(16, "unfused"), 0.1)
    chosen, unfused = programs(6)
    assert chosen == unfused
    jax.clear_caches()
