"""Every family against Hugging Face's own implementation: logits that `tests/golden/make.py` computed and kept."""

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flashspec import models
from tests.models.examples import assert_close, forward

FOLDER = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/golden.npz"))
TOLERANCE = 2e-4


class Golden(NamedTuple):
    """A model and what it has to compute: tokens [B,T] -> logits [B,T,V]."""

    config: models.DecoderConfig
    params: nnx.State
    kept: dict[str, np.ndarray]


@functools.cache
def golden(name: str) -> Golden:
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # a vision tower that is left out
        checkpoint = models.load(FOLDER / name, jnp.float32)
    return Golden(checkpoint.config, checkpoint.params, dict(np.load(FOLDER / name / "golden.npz")))


def logits_at(config: models.DecoderConfig, params: nnx.State, tokens: np.ndarray, start: int) -> np.ndarray:
    """Logits of one forward, the first token at position `start`."""
    positions = np.broadcast_to(np.arange(start, start + tokens.shape[1], dtype=np.int32), tokens.shape)
    return np.asarray(forward(config, params, jnp.asarray(tokens), jnp.asarray(positions)))


def test_every_family_is_here() -> None:
    assert {golden(name).config.family for name in NAMES} == set(models.FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_whole_rows(name: str) -> None:
    config, params, kept = golden(name)
    assert_close(logits_at(config, params, kept["tokens"], 0), kept["logits"], TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_late_positions(name: str) -> None:
    """Far past the context before the scaling, and past every window."""
    config, params, kept = golden(name)
    late = logits_at(config, params, kept["tokens"], int(kept["late_start"]))
    assert_close(late[:1], kept["late"], TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_after_a_prefill_with_padding(name: str) -> None:
    config, params, kept = golden(name)
    model, short = models.as_language_model(config), int(kept["short"])
    tokens = jnp.asarray(kept["tokens"])
    assert model.prefill is not None

    @jax.jit
    def decode(params: Any, tokens: jax.Array, num_valid: jax.Array) -> jax.Array:
        """Prefill each row's first num_valid tokens, then give it the others one by one."""
        cache = model.fill(params, tokens[:, : short - 1], num_valid, 24)

        def step(cache: Any, _: None) -> tuple[Any, jax.Array]:
            following = jnp.take_along_axis(tokens, cache.length[:, None], axis=1)
            logits, cache = model.apply(params, following, cache)
            return cache, logits[:, 0]

        return jax.lax.scan(step, cache, None, length=tokens.shape[1] - short + 1)[1]

    # The first row was prefilled as far as the short one goes; the second starts with two tokens and much padding.
    found = decode(params, tokens, jnp.array([short - 1, 2], jnp.int32))
    assert_close(found[:, 0], kept["logits"][0, short - 1 :], TOLERANCE)
    assert_close(found[: short - 2, 1], kept["padded"][2:], TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str) -> None:
    test_whole_rows(name)
    test_late_positions(name)
    test_token_by_token_after_a_prefill_with_padding(name)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("llama3", {"rope_scaling": None}),
    ("llama3", {"rope_scaling": models.RopeScaling("linear", 8.0)}),
    ("mistral", {"sliding_window": 7}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"full_layers": ()}),
    ("gemma2", {"full_layers": (0, 2)}),
    ("gemma2", {"attention_soft_cap": None}),
    ("gemma2", {"final_soft_cap": None}),
    ("gemma2", {"query_pre_attn_scalar": 8}),
    ("gemma3", {"local_rope_theta": None}),
    ("gemma3", {"rope_scaling": None}),
    ("gemma3_with_images", {"rope_scaling": None}),
    ("gemma3_with_images", {"rope_scaling": models.RopeScaling("linear", 4.0)}),
    ("gemma3_with_images", {"local_rope_theta": 500.0}),
]


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_an_option_left_out_is_seen(name: str, change: dict[str, Any]) -> None:
    config, params, kept = golden(name)
    wrong = dataclasses.replace(config, **change)
    assert wrong != config
    with pytest.raises(AssertionError):
        assert_close(logits_at(wrong, params, kept["tokens"], 0), kept["logits"], TOLERANCE)


@pytest.mark.parametrize(
    ("name", "part"), [("qwen2", "qkv_bias"), ("qwen3", "q_norm"), ("gemma2", "post_mlp_norm"), ("llama3", "gate_up")]
)
def test_a_parameter_misplaced_is_seen(name: str, part: str) -> None:
    config, params, kept = golden(name)

    def turned(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return jnp.roll(leaf, 1, axis=-1) if any(getattr(key, "key", None) == part for key in path) else leaf

    wrong = jax.tree_util.tree_map_with_path(turned, params)
    with pytest.raises(AssertionError):
        assert_close(logits_at(config, wrong, kept["tokens"], 0), kept["logits"], TOLERANCE)
