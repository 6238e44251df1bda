"""Decoding over a cache equals the full forward, whatever the cache, the chunks and the padding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec import models
from flashspec.attention.decode import cached_attention
from flashspec.language_model import LanguageModel
from tests.models import examples
from tests.models.examples import CONFIGS, assert_close, example, rows

TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 37, (2, 13)), jnp.int32)
# Every family decodes over a dense cache in `test_golden.py`, and a paged one is filled in `test_mesh.py`; here are
# other shapes and other caches.
KINDS = [("llama tied, one kv head", "dense"), ("llama, wide heads", "dense"), ("llama", "paged"), ("gemma 2", "paged")]
KINDS += [("mistral", "window"), ("qwen3 with a window", "window")]


def full(name: str) -> jax.Array:
    return examples.full(name, rows(TOKENS))


def language_model(name: str, kind: str, **options: Any) -> tuple[LanguageModel, Any]:
    config, params = example(name)
    return models.as_language_model(config, cache=kind, draft_length=3, page_size=4, **options), params


def decode(model: LanguageModel, params: Any, steps: list[int], cache: Any = None) -> jax.Array:
    """Logits of `TOKENS`, appended so many at a time."""
    cache = model.init_cache(2, 16) if cache is None else cache
    parts, apply = [], jax.jit(model.apply)
    for start, count in zip(np.cumsum([0, *steps[:-1]]), steps, strict=True):
        logits, cache = apply(params, TOKENS[:, start : start + count], cache)
        parts.append(logits)
    return jnp.concatenate(parts, axis=1)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_token_by_token_is_the_full_forward(name: str, kind: str) -> None:
    model, params = language_model(name, kind)
    assert_close(decode(model, params, [1] * 13), full(name))


def test_several_tokens_at_a_time() -> None:
    model, params = language_model("mistral", "window")
    assert_close(decode(model, params, [4, 1, 4, 4]), full("mistral"))


def test_many_tokens_at_a_time() -> None:
    config, params = example("llama")
    tokens = jnp.tile(TOKENS, (1, 2))
    model = models.as_language_model(config)
    logits, cache = jax.jit(model.apply)(params, tokens, model.init_cache(2, 30))
    assert_close(logits, examples.full("llama", rows(tokens)))
    assert cache.length.tolist() == [26, 26]


def test_prefill_ignores_padding() -> None:
    model, params = language_model("mistral", "window")
    lengths = jnp.array([9, 4], jnp.int32)
    caches = []
    for padding in (0, 36):
        inside = jnp.arange(12, dtype=jnp.int32)[None, :] < lengths[:, None]
        padded = jnp.where(inside, TOKENS[:, :12], padding)
        caches.append(jax.jit(model.prefill)(params, padded, lengths, model.init_cache(2, 16)))  # type: ignore[arg-type]
    following = jnp.stack([TOKENS[0, 9:11], TOKENS[1, 4:6]])
    apply = jax.jit(model.apply)
    (first, cache), (second, _) = (apply(params, following, cache) for cache in caches)
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
    wanted = full("mistral")
    assert_close(first, jnp.stack([wanted[0, 9:11], wanted[1, 4:6]]))
    assert cache.length.tolist() == [11, 6]


def test_a_prefill_of_padding_as_text_is_seen() -> None:
    model, params = language_model("llama", "dense")
    assert model.prefill is not None
    prefill, apply = jax.jit(model.prefill), jax.jit(model.apply)
    right, wrong = (
        prefill(params, TOKENS[:, :6], jnp.array(lengths, jnp.int32), model.init_cache(2, 16))
        for lengths in ([6, 4], [6, 6])
    )
    following = jnp.stack([TOKENS[0, 6:8], TOKENS[1, 4:6]])
    wanted = jnp.stack([full("llama")[0, 6:8], full("llama")[1, 4:6]])
    assert_close(apply(params, following, right)[0], wanted)
    with pytest.raises(AssertionError):
        assert_close(apply(params, following, wrong)[0], wanted)


@pytest.mark.parametrize("kind", ["dense", "paged", "window"])
def test_a_rollback_leaves_no_trace(kind: str) -> None:
    model, params = language_model("mistral", kind)
    apply = jax.jit(model.apply)
    _, cache = apply(params, TOKENS[:, :3], model.init_cache(2, 16))
    _, cache = apply(params, TOKENS[:, 9:12], cache)
    cache = model.rollback(cache, jnp.array([3, 3], jnp.int32))
    logits, _ = apply(params, TOKENS[:, 3:6], cache)
    assert_close(logits, full("mistral")[:, 3:6])


def test_positions_come_from_the_cache() -> None:
    model, params = language_model("llama", "dense")
    apply = jax.jit(model.apply)
    _, cache = apply(params, TOKENS[:, :5], model.init_cache(2, 16))
    off_by_one = cached_shifted(params, cache)
    assert_close(apply(params, TOKENS[:, 5:6], cache)[0], full("llama")[:, 5:6])
    with pytest.raises(AssertionError):
        assert_close(off_by_one, full("llama")[:, 5:6])


def cached_shifted(params: Any, cache: Any) -> jax.Array:
    """The next token's logits when its rotation is that of the position after its own."""
    shifted = models.decoder.rotary_angles

    def apply(params: Any, tokens: jax.Array, cache: Any) -> jax.Array:
        decoder = models.merge(CONFIGS["llama"], params)
        return decoder.logits(decoder.step(tokens, cache, attention=cached_attention)[0])

    def one_late(positions: jax.Array, per_position: np.ndarray) -> tuple[jax.Array, jax.Array]:
        return shifted(positions + 1, per_position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.decoder, "rotary_angles", one_late)
        return jax.jit(apply)(params, TOKENS[:, 5:6], cache)


def test_a_window_prefill_goes_in_chunks_that_fit() -> None:
    model, params = language_model("qwen3 with a window", "window")
    cache = model.init_cache(2, 16)
    assert cache.key[0].shape[1] == 8  # 2 + 4 needed
    assert model.prefill is not None
    cache = jax.jit(model.prefill)(params, TOKENS[:, :12], jnp.array([12, 12], jnp.int32), cache)
    assert_close(jax.jit(model.apply)(params, TOKENS[:, 12:], cache)[0], full("qwen3 with a window")[:, 12:])


def test_float64(x64: None) -> None:
    config, params = example("llama")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    model = models.as_language_model(config, jnp.float64)
    logits = decode(model, wide, [1] * 13, model.init_cache(2, 16))
    assert logits.dtype == jnp.float64
    assert_close(logits, examples.forward(config, wide, TOKENS), 1e-7)
