"""A decoder step between two attentions on an NVIDIA Hopper GPU (python -m pytest -m gpu)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flashspec import models
from flashspec.fusion.decode_block import BlockForm, Heads, HeadWeights, MlpWeights, Places, decode_block, start
from flashspec.generate import generate
from flashspec.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("not hopper()")]

# Enough blocks of every product for all multiprocessors.
C, F, HEADS, SLOTS = 1536, 1536, Heads(4, 4, 128), 64


def hopper():
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def operands(rows, options):
    keys = iter(jax.random.split(jax.random.key(rows), 20))

    def normal(*size):
        return jax.random.normal(next(keys), size).astype(jnp.bfloat16)

    def matrix(*size):
        return (jax.random.normal(next(keys), size) * size[0] ** -0.5).astype(jnp.bfloat16)

    K, G, H = HEADS
    columns = K * (G + 2) * H
    angle = jax.random.normal(next(keys), (rows, H // 2))
    slot = jnp.arange(rows).at[-1].set(SLOTS if rows > 1 else 3)  # the last write of several is dropped
    optional = (normal(columns), normal(H), normal(H)) if options else ()
    return {
        "stream": start(normal(rows, C)),
        "attended": normal(rows, K * G * H),
        "mlp": MlpWeights(matrix(K * G * H, C), normal(C), matrix(C, 2, F), matrix(F, C)),
        "heads": HeadWeights(normal(C), matrix(C, columns), *optional),
        "places": Places(jnp.arange(rows) % 2, slot, jnp.cos(angle), jnp.sin(angle)),
        "cache": (normal(2, SLOTS, K, H), normal(2, SLOTS, K, H)),
    }


@functools.partial(jax.jit, static_argnums=0)
def two_calls(implementation, given):
    """Two calls of a step, so that programs meet on counts that a call has left behind."""
    form = BlockForm(HEADS, 1e-5)
    found = decode_block(**given, form=form, implementation=implementation)
    attended = found.query.reshape(given["attended"].shape)
    again = given | {"stream": found.stream, "attended": attended, "cache": (found.key, found.value)}
    second = decode_block(**again, form=form, implementation=implementation)
    rows = attended.shape[0]
    return [(x.stream.residual[:rows], x.query, x.key, x.value) for x in (found, second)]


@pytest.mark.parametrize(("rows", "options"), [(1, False), (5, True), (8, False), (9, False), (16, True)])
def test_the_kernel_is_as_near_to_float32_as_xla(rows, options):
    given = operands(rows, options)
    got, again = ([np.asarray(x, np.float32) for x in jax.tree.leaves(two_calls("hopper", given))] for _ in range(2))
    for x, y in zip(got, again, strict=True):
        np.testing.assert_array_equal(x, y)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, given)
    want, other = ([np.asarray(x, np.float32) for x in jax.tree.leaves(two_calls("xla", x))] for x in (wide, given))
    for x, y, z in zip(got, want, other, strict=True):
        own, theirs = (float(np.sqrt(np.mean((each - y) ** 2) / np.mean(y**2))) for each in (x, z))
        assert own <= 1.2 * theirs + 1e-3 < 2e-2
    scaled = two_calls("hopper", given | {"attended": given["attended"] * 2})
    assert np.abs(np.asarray(scaled[0][0], np.float32) - got[0]).max() > 0.1 * np.abs(got[0]).max()


def random_params(config):
    abstract = nnx.state(nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return jax.tree.map(
        lambda x: (
            jax.random.normal(next(keys), x.shape) * x.shape[0] ** -0.5 if x.ndim > 1 else jnp.ones(x.shape)
        ).astype(jnp.bfloat16),
        abstract,
    )


def filled(model, lengths, capacity):
    """A cache that holds something up to the lengths, and NaN from there on."""
    cache = model.init_cache(len(lengths), capacity)
    keys = iter(jax.random.split(jax.random.key(2), 2 * len(cache.key)))
    held = jnp.arange(capacity)[None, :, None, None] < jnp.array(lengths)[:, None, None, None]

    def some(x):
        return jnp.where(held, jax.random.normal(next(keys), x.shape).astype(jnp.bfloat16).astype(x.dtype), jnp.nan)

    key, value = (tuple(map(some, arrays)) for arrays in (cache.key, cache.value))
    return dataclasses.replace(cache, key=key, value=value, length=jnp.array(lengths, cache.length.dtype))


@pytest.mark.parametrize(
    ("family", "layers", "head_dim", "lengths", "tokens"),
    [
        ("llama", 3, 128, [1000, 77], 1),
        ("llama", 7, 128, [1021, 3], 5),  # in launches of three and of four
        ("llama", 3, 128, [0, 63, 64, 65, 700, 1023, 1100, 1500], 1),  # programs with blocks of several rows
        ("qwen2", 3, 64, [2000, 1], 1),
        ("qwen3", 8, 128, [120, 60], 7),  # fewer blocks than programs
        ("llama", 3, 64, [15 * i for i in range(16)], 1),
        ("llama", 3, 128, [300, 5], 8),
        ("qwen3", 9, 128, [1024], 1),
        ("llama", 1, 128, [3], 2),
    ],
)
def test_layers_with_attention_are_as_near_to_float32_as_the_decoder(family, layers, head_dim, lengths, tokens):
    config = models.DecoderConfig(family, 512, C, F, layers, 16, 4, head_dim)
    params, capacity, widest = random_params(config), 2048, jnp.float32
    new = jax.random.randint(jax.random.key(1), (len(lengths), tokens), 0, 512)

    def logits(dtype, how):
        model = models.as_language_model(config, dtype, decode_block=how)
        held = jax.tree.map(lambda x: x.astype(dtype), params)
        found, cache = jax.jit(model.apply)(held, new, filled(model, lengths, capacity))
        rows = [np.asarray(x[b, : n + tokens], np.float32) for x in cache.value for b, n in enumerate(lengths)]
        return np.asarray(found, np.float32), np.concatenate(rows)

    wants, others, gots = logits(widest, None), logits(jnp.bfloat16, None), logits(jnp.bfloat16, "hopper")
    again = logits(jnp.bfloat16, "hopper")
    for want, other, got, second in zip(wants, others, gots, again, strict=True):
        np.testing.assert_array_equal(got, second)
        own, theirs = (np.sqrt(np.mean((x - want) ** 2) / np.mean(want**2)) for x in (got, other))
        assert own <= 1.2 * theirs + 1e-3 < 5e-2


def test_generation_with_the_kernel():
    """Greedy: each token's logit, by the decoder's own step, is within rounding of its row's largest."""
    config = models.DecoderConfig("llama", 512, C, F, 2, 16, 4, 128)
    params = random_params(config)
    plain, fused = (models.as_language_model(config, jnp.bfloat16, decode_block=how) for how in (None, "hopper"))
    prompt, lengths = jax.random.randint(jax.random.key(1), (8, 12), 0, 512), jnp.arange(5, 13)
    out = generate(
        jax.random.key(0), fused, params, prompt, lengths, sampling=SamplingParams(temperature=0.0), max_new_tokens=16
    )
    logits = np.asarray(jax.jit(plain.apply)(params, out.tokens, plain.init_cache(8, 64))[0])
    for b, length in enumerate(lengths.tolist()):
        for i in range(length, length + 16):
            row = logits[b, i - 1]
            assert row.max() - row[int(out.tokens[b, i])] <= 2**-5 * np.abs(row).max()
    for kind, scope in (("dense", "decode_layers"), ("paged", "decode_block")):
        model = models.as_language_model(config, jnp.bfloat16, cache=kind, decode_block="hopper")
        lowered = jax.jit(model.apply).lower(params, out.tokens[:, :1], model.init_cache(8, 64))
        assert f"flashspec.fusion.{scope}.hopper" in lowered.compile().as_text()
