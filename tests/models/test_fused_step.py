"""A step of whole layers, or of all that lies between two attentions, as one operation equals that of products."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec import models
from flashspec.attention.decode import cached_attention
from flashspec.fusion import decode_block as operation
from flashspec.generate import generate
from flashspec.language_model import LanguageModel
from flashspec.models import fused_step, language_model
from flashspec.sampling import SamplingParams
from pallas_kernels.gpu.hopper.decode_block_config import PHASES
from tests.fusion import block_stand_in
from tests.models.examples import assert_close, example, random_params
from tests.mutants import mutant

TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 37, (2, 13)), jnp.int32)
REAL = jnp.array([8, 5], jnp.int32)
SIZES = (37, 128, 128, 2, 4, 2, 64)
TAKEN = {
    "llama": models.DecoderConfig("llama", *SIZES),
    "qwen2": models.DecoderConfig("qwen2", *SIZES),
    "qwen3": models.DecoderConfig("qwen3", *SIZES, tie_embeddings=True),
    "mistral": models.DecoderConfig("mistral", *SIZES, sliding_window=4),
}


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    block_stand_in.use(monkeypatch)
    yield
    operation._execute.clear_cache()


def decode(model: LanguageModel, params: Any) -> tuple[jax.Array, Any]:
    """A prefill of 8 tokens a row of which some are real, then logits of 3 more; compiled anew for every call."""
    prefill: Any = model.prefill
    cache = jax.jit(lambda *given: prefill(*given))(params, TOKENS[:, :8], REAL, model.init_cache(2, 128))
    return jax.jit(lambda *given: model.apply(*given))(params, TOKENS[:, 8:11], cache)


SLOW = [("mistral", "window"), ("qwen2", "dense"), ("qwen3", "paged"), ("qwen3 with a window", "dense")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "dense"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_the_twin_steps_like_the_decoder(name: str, kind: str) -> None:
    """In float32; the prefill of 2 x 8 tokens is fused as well."""
    config, params = example(name)
    found = []
    for implementation in (None, ("hopper", "xla")):
        model = models.as_language_model(config, cache=kind, draft_length=3, page_size=4, decode_block=implementation)
        found.append(decode(model, params))
    (want, cache), (got, own) = found
    assert_close(got, want)
    for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(cache), strict=True):
        assert_close(x, y) if jnp.issubdtype(x.dtype, jnp.floating) else np.testing.assert_array_equal(x, y)


def in_bfloat16(name: str) -> tuple[models.DecoderConfig, Any]:
    """Parameters whose activations stay near 1."""
    small = random_params(TAKEN[name])
    return TAKEN[name], jax.tree.map(
        lambda x: (x * (2 * x.shape[0] ** -0.5 if x.ndim > 1 else 1)).astype(jnp.bfloat16), small
    )


@functools.cache
def exact(name: str) -> tuple[np.ndarray, float]:
    """Logits in float32, and how far those of the decoder's own step in bfloat16 are from them."""
    config, params = in_bfloat16(name)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    want, _ = decode(models.as_language_model(config), wide)
    plain, _ = decode(models.as_language_model(config, jnp.bfloat16), params)
    return np.asarray(want), distance(plain, np.asarray(want))


def distance(got: jax.Array, want: np.ndarray) -> float:
    """Root mean square of what is between them, over the largest."""
    return float(np.sqrt(np.mean((np.asarray(got) - want) ** 2)) / np.abs(want).max())


def compare(name: str, cache: str = "dense") -> set[bool]:
    """Logits and lengths; returns whether the launches had attention within."""
    (want, plain), (config, params) = exact(name), in_bfloat16(name)
    how: dict[str, Any] = {"cache": cache, "page_size": 4, "decode_block": "hopper"}
    got, held = decode(models.as_language_model(config, jnp.bfloat16, **how), params)
    assert held.length.tolist() == [11, 8]
    assert plain < 1e-2
    assert distance(got, want) < 1.5 * plain
    assert {plan.shape.rows for plan in block_stand_in.SEEN} == {16, 6}
    return {plan.attention is not None for plan in block_stand_in.SEEN}


WHOLE = ("llama", "qwen2", "qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_launches_of_whole_layers_are_as_near_to_float32_as_the_decoder(name: str, standing_in: None) -> None:
    assert compare(name) == {True}
    layers = TAKEN[name].num_layers
    assert [(plan.phases, plan.layers) for plan in block_stand_in.SEEN] == [(PHASES, layers)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_launches_between_attentions_are_as_near_to_float32_as_the_decoder(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_stand_in.use(monkeypatch, whole_layers=False)
    assert compare(name) == {False}
    operation._execute.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cache"), [("llama", "paged"), ("mistral", "dense"), ("mistral", "window")])
def test_what_has_no_attention_within(name: str, cache: str, standing_in: None) -> None:
    """It is not plain causal attention over a dense cache."""
    assert compare(name, cache) == {False}


def of_one_s_own(*args: Any, **options: Any) -> jax.Array:
    return cached_attention(*args, **options)


@pytest.mark.parametrize(
    ("rows", "attention", "within"),
    [(2, cached_attention, True), (1, cached_attention, True), (2, of_one_s_own, False)],
)
def test_who_attends(rows: int, attention: Any, within: bool, standing_in: None) -> None:
    """An attention of one's own is called."""
    config, params = in_bfloat16("llama")
    model = models.as_language_model(config, jnp.bfloat16, attention=attention, decode_block="hopper")
    jax.eval_shape(model.apply, params, TOKENS[:rows, :1], model.init_cache(rows, 128))
    assert {plan.attention is not None for plan in block_stand_in.SEEN} == {within}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rounded(residual + y)", "rounded(y)"),
        ("at <= held + token", "at < held + token"),
        ("y = rounded(y) + wide(ops.bias[turn])[None]", "y = rounded(y)"),
    ],
)
def test_a_wrong_kernel_is_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_stand_in.use(monkeypatch, mutant(block_stand_in, (old, new)).kernel)
    with pytest.raises(AssertionError):
        compare("qwen2")
    operation._execute.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("jnp.stack([cache.length, after.length])", "jnp.stack([after.length] * 2)"),
        (
            "_mlp(block)) for block in decoder.layers",
            "_mlp(block)) for block in [*decoder.layers][::-1]",
        ),
        (
            "dataclasses.replace(after, key=keys, value=values)\n\n\ndef",
            "dataclasses.replace(cache, key=keys, value=values)\n\n\ndef",
        ),
    ],
)
def test_a_wrong_step_is_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_stand_in.use(monkeypatch)
    monkeypatch.setattr(language_model, "fused_step", mutant(fused_step, (old, new)).fused_step)
    with pytest.raises(AssertionError):
        compare("llama")


@pytest.mark.parametrize(
    ("changes", "implementation", "takes"),
    [
        ({}, "hopper", True),
        ({}, ("hopper", "xla"), True),
        ({}, ("xla", "hopper"), False),
        ({}, None, False),
        ({"sliding_window": 4}, "hopper", False),
        ({"attention_soft_cap": 2.0}, "hopper", False),
        ({"local_rope_theta": 100.0, "full_layers": (1,), "sliding_window": 64}, "hopper", False),
    ],
)
def test_who_takes_whole_layers(changes: dict[str, Any], implementation: Any, takes: bool) -> None:
    family = (
        "gemma3_text" if "local_rope_theta" in changes else "gemma2" if "attention_soft_cap" in changes else "mistral"
    )
    config = models.DecoderConfig(family, *SIZES, **changes)
    assert fused_step.takes_whole_layers(config, implementation) is takes


@pytest.mark.slow
def test_generation_reaches_the_kernel(standing_in: None) -> None:
    """Greedy tokens, each within rounding of the largest logit of the decoder's own step."""
    config, params = in_bfloat16("llama")
    config = dataclasses.replace(config, eos_token_ids=())
    plain, fused = (models.as_language_model(config, jnp.bfloat16, decode_block=how) for how in (None, "hopper"))
    sampling = SamplingParams(temperature=0.0)
    out = generate(jax.random.key(0), fused, params, TOKENS[:, :8], REAL, sampling=sampling, max_new_tokens=4)
    assert {plan.shape.rows for plan in block_stand_in.SEEN} >= {2}
    logits, _ = jax.jit(plain.apply)(params, out.tokens, plain.init_cache(2, 16))
    for b, length in enumerate(REAL.tolist()):
        for i in range(length, length + 4):
            row = np.asarray(logits[b, i - 1])
            assert row.max() - row[out.tokens[b, i]] <= 2e-2 * np.abs(row).max()


def test_many_tokens_take_the_decoder_s_step() -> None:
    config, params = example("llama")
    tokens = jnp.tile(TOKENS, (1, 2))[:, :9]
    plain, named = (models.as_language_model(config, decode_block=how) for how in (None, "hopper"))
    one, two = (str(jax.make_jaxpr(m.apply)(params, tokens, m.init_cache(2, 16))) for m in (plain, named))
    assert one == two
    with pytest.raises(NotImplementedError, match="runs on cuda"):
        named.apply(params, tokens[:, :8], named.init_cache(2, 16))


def test_what_has_no_fused_step() -> None:
    with pytest.raises(NotImplementedError, match="family gemma2 normalises what each branch adds"):
        models.as_language_model(example("gemma 2")[0], decode_block="hopper")
    with pytest.raises(NotImplementedError, match="not of a mesh"):
        models.as_language_model(example("llama")[0], decode_block="xla", mesh=models.decoder_mesh(1, 2))
    with pytest.raises(ValueError, match="`implementation`"):
        models.as_language_model(example("llama")[0], decode_block="cudnn")
    with pytest.raises(NotImplementedError, match="has one precision of products"):
        models.as_language_model(example("llama")[0], decode_block="xla", precision="default")
    decoder, cache = models.merge(*example("llama")), models.as_language_model(example("llama")[0]).init_cache(1, 24)
    with pytest.raises(ValueError, match="`tokens`: expected at most 16 in all rows together"):
        fused_step.fused_step(decoder, jnp.zeros((1, 17), jnp.int32), cache, attention=cached_attention)
