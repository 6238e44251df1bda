"""This library's attention inside Flax's layers, next to Flax's own: where they are alike, and where they differ."""

from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flashspec import flax_attention
from flashspec.attention import dot_product_attention
from flashspec.flax_attention import attention_fn, replace_attention

RNG = np.random.default_rng(0)
LOWEST = float(jnp.finfo(jnp.float32).min)


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]


QUERY, KEY, VALUE = arrays((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8))
INPUTS = arrays((2, 6, 12))[0]


def assert_close(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=tolerance)


def layer(attention: Callable[..., Any], **options: Any) -> nnx.MultiHeadAttention:
    options = {"decode": False, "kernel_init": nnx.initializers.normal(0.5)} | options
    return nnx.MultiHeadAttention(4, 12, 16, attention_fn=attention, rngs=nnx.Rngs(0), **options)


def value_and_gradients(module: nnx.Module, *inputs: jax.Array, **options: Any) -> Any:
    """The output of a layer, and the gradients of a sum of its squares for parameters and inputs."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def run(params: Any, *inputs: jax.Array) -> Any:
        output = nnx.merge(graph, params, rest)(*inputs, **options)
        return jnp.sum(output * jnp.cos(jnp.arange(output.size, dtype=output.dtype)).reshape(output.shape)), output

    return jax.jit(jax.value_and_grad(run, argnums=tuple(range(1 + len(inputs))), has_aux=True))(params, *inputs)


MASKS: dict[str, Any] = {
    "none": None,
    "bool": RNG.random((2, 1, 6, 6)) < 0.7,
    "causal, as numbers": flax.linen.make_causal_mask(jnp.ones((2, 6))),
    "of each head": RNG.random((1, 4, 6, 6)) < 0.7,
    "of rank 2": np.tril(np.ones((6, 6), bool)),
}
for mask in ("bool", "of each head"):
    MASKS[mask][..., 0] = True  # every query has a key


@pytest.mark.parametrize("mask", MASKS)
def test_an_nnx_layer(mask: str) -> None:
    options = {} if MASKS[mask] is None else {"mask": jnp.asarray(MASKS[mask])}
    ours, flax_s = (
        value_and_gradients(layer(attention), INPUTS, **options)
        for attention in (attention_fn, nnx.dot_product_attention)
    )
    assert_close(ours, flax_s, 1e-4)


def test_grouped_heads_and_causal_attention() -> None:
    ours, flax_s, other = (
        value_and_gradients(layer(attention, num_kv_heads=2), INPUTS, is_causal=causal)
        for attention, causal in ((attention_fn, True), (nnx.dot_product_attention, True), (attention_fn, False))
    )
    assert_close(ours, flax_s, 1e-4)
    with pytest.raises(AssertionError):
        assert_close(other, flax_s, 1e-4)


@pytest.mark.parametrize("mask", ["bool", "causal, as numbers"])
def test_a_linen_layer(mask: str) -> None:
    results = []
    for attention in (attention_fn, flax.linen.dot_product_attention):
        module = flax.linen.MultiHeadDotProductAttention(4, qkv_features=16, attention_fn=attention)
        variables = module.init(jax.random.key(0), INPUTS)

        def loss(variables: Any, module: Any = module) -> jax.Array:
            return jnp.square(module.apply(variables, INPUTS, mask=jnp.asarray(MASKS[mask]))).sum()

        results.append(jax.jit(jax.value_and_grad(loss))(variables))
    assert_close(*results, 1e-4)


def test_batch_axes_of_any_number() -> None:
    lone = attention_fn(QUERY[0], KEY[0], VALUE[0])
    assert lone.shape == (5, 4, 8)
    assert_close(lone, nnx.dot_product_attention(QUERY[:1], KEY[:1], VALUE[:1])[0])
    query, key, value = (jnp.stack([array, 2 * array, -array]) for array in (QUERY, KEY, VALUE))
    for mask_shape in ((3, 2, 1, 5, 7), (2, 1, 5, 7), (3, 1, 4, 5, 7), (1, 1, 1, 5, 7)):
        mask = jnp.asarray(RNG.random(mask_shape) < 0.6).at[..., 0].set(True)
        got = attention_fn(query, key, value, mask=mask)
        wanted = flax.linen.dot_product_attention(query, key, value, mask=mask)
        assert_close(got, wanted)


def both(bias: Any = None, mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """(ours, Flax's)."""
    bias, mask = (None if array is None else jnp.asarray(array) for array in (bias, mask))
    functions = attention_fn, flax.linen.dot_product_attention
    ours, theirs = (np.asarray(function(QUERY, KEY, VALUE, bias=bias, mask=mask)) for function in functions)
    return ours, theirs


@pytest.mark.parametrize("low", [-np.inf, LOWEST])
def test_biases_that_hide_some_keys(low: float) -> None:
    bias = np.where(RNG.random((2, 1, 5, 7)) < 0.5, low, RNG.normal(size=(2, 1, 5, 7))).astype(np.float32)
    bias[..., 3] = 0.5
    assert_close(*both(bias))
    assert_close(*both(bias[:1, :, :, :]))


def test_rows_that_see_nothing_side_by_side() -> None:
    """The one table of the module's docstring that is about meaning, cell by cell."""
    mean = np.broadcast_to(np.asarray(VALUE).mean(1, keepdims=True), (2, 5, 4, 8))
    blind = np.zeros((1, 1, 5, 1), bool)
    ours, theirs = both(mask=np.broadcast_to(blind, (1, 1, 5, 7)))
    assert_close(ours, 0 * mean)
    assert_close(theirs, mean)
    ours, theirs = both(bias=np.full((1, 1, 5, 7), -np.inf, np.float32))
    assert_close(ours, 0 * mean)
    assert np.isnan(theirs).all()
    ours, theirs = both(bias=np.full((1, 1, 5, 7), LOWEST, np.float32))
    assert_close(ours, mean)
    assert_close(theirs, mean)


def test_rows_that_see_nothing_have_no_gradient() -> None:
    mask = jnp.asarray(np.arange(5)[:, None] > 1)[None, None] & jnp.ones((1, 1, 5, 7), bool)
    gradients = jax.grad(lambda *arrays: attention_fn(*arrays, mask=mask).sum(), argnums=(0, 1, 2))(QUERY, KEY, VALUE)
    assert all(np.isfinite(np.asarray(gradient)).all() for gradient in gradients)
    assert not np.asarray(gradients[0][:, :2]).any()
    assert np.asarray(gradients[0][:, 2:]).any()


def kept(**options: Any) -> np.ndarray:
    """Which weights [B,N,T,S] dropout keeps: with zero queries every weight is 1 / S, and the values pick it out."""
    values = jnp.broadcast_to(jnp.eye(64, dtype=jnp.float32)[None, :, None, :], (2, 64, 3, 64))
    output = attention_fn(jnp.zeros((2, 32, 3, 8)), jnp.zeros((2, 64, 3, 8)), values, dropout_rate=0.25, **options)
    weights = 64 * np.moveaxis(np.asarray(output), 2, 1)
    np.testing.assert_allclose(weights[weights != 0], 1 / 0.75, rtol=1e-5)
    return weights != 0


def test_dropout_is_shared_as_flax_shares_it() -> None:
    key = jax.random.key(1)
    shared, own = kept(dropout_rng=key), kept(dropout_rng=key, broadcast_dropout=False)
    assert (shared == shared[:1, :1]).all()
    assert (own[0, 0] != own[0, 1]).any()
    assert (own[0, 0] != own[1, 0]).any()
    for mask, count in ((shared[0, 0], 2048), (own, 12288)):
        assert abs(mask.mean() - 0.75) < 5 * (0.25 * 0.75 / count) ** 0.5


def test_dropout_ends_with_deterministic() -> None:
    options: Any = {"dropout_rng": jax.random.key(1), "dropout_rate": 0.5}
    assert_close(attention_fn(QUERY, KEY, VALUE, deterministic=True, **options), attention_fn(QUERY, KEY, VALUE))
    with pytest.raises(AssertionError):
        assert_close(attention_fn(QUERY, KEY, VALUE, **options), attention_fn(QUERY, KEY, VALUE))


def test_keys_of_every_kind() -> None:
    typed = jax.random.key(3)
    raw = jax.random.key_data(typed)
    np.testing.assert_array_equal(kept(dropout_rng=typed), kept(dropout_rng=raw))
    assert (kept(dropout_rng=typed) != kept(dropout_rng=jax.random.key(4))).any()


def test_a_layer_trains_with_dropout() -> None:
    """The same key gives the same mask forward and backward: the gradient is that of the function itself."""
    module = layer(attention_fn, dropout_rate=0.4, deterministic=False)
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    direction = jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape), leaf.dtype), params)

    def loss(step: float, rest: Any, seed: int) -> jax.Array:
        moved = jax.tree.map(lambda leaf, by: leaf + step * by, params, direction)
        return jnp.square(nnx.merge(graph, moved, rest)(INPUTS, rngs=nnx.Rngs(dropout=jax.random.key(seed)))).sum()

    eps, run = 1e-3, jax.jit(loss)
    slope, other = (jax.jit(jax.grad(loss))(0.0, rest, seed) for seed in (0, 1))
    difference = (run(eps, rest, 0) - run(-eps, rest, 0)) / (2 * eps)
    np.testing.assert_allclose(slope, difference, rtol=1e-2)
    with pytest.raises(AssertionError):  # a mask of its own in the backward
        np.testing.assert_allclose(other, difference, rtol=1e-2)


def test_decoding_token_by_token() -> None:
    ours, flax_s = layer(attention_fn, decode=True), layer(nnx.dot_product_attention, decode=True)
    whole = layer(attention_fn)(INPUTS, is_causal=True)
    for module in (ours, flax_s):
        module.init_cache(INPUTS.shape)
        outputs = [module(INPUTS[:, t : t + 1]) for t in range(INPUTS.shape[1])]
        assert_close(jnp.concatenate(outputs, axis=1), whole)


def test_an_existing_model_in_one_line() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.MultiHeadAttention(4, 12, decode=False, rngs=rngs) for _ in range(2)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for one in self.layers:
                x = x + one(x, is_causal=True)
            return x

    model = Model(nnx.Rngs(0))
    before = model(INPUTS)
    assert replace_attention(model) == 2
    assert_close(model(INPUTS), before)
    assert replace_attention(model, window=(1, 0)) == 2
    with pytest.raises(AssertionError):
        assert_close(model(INPUTS), before)
    model.layers[1].attention_fn = lambda *args, **options: args[0]
    with pytest.raises(ValueError, match=r"`model`: expected Flax's own attention in layers\.1"):
        replace_attention(model)
    with pytest.raises(ValueError, match=r"nnx\.MultiHeadAttention, got Linear"):
        replace_attention(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_the_kernel_is_in_the_program() -> None:
    module = layer(attention_fn)
    graph, state = nnx.split(module)
    text = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, INPUTS).as_text(debug_info=True)
    assert "flashspec.attention" in text


def test_narrow_dtypes() -> None:
    narrow = [array.astype(jnp.bfloat16) for array in (QUERY, KEY, VALUE)]
    got = attention_fn(*narrow, mask=jnp.ones((5, 7)))
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(jnp.float32), dot_product_attention(QUERY, KEY, VALUE), 0.03)
    assert attention_fn(QUERY, KEY, VALUE, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_what_it_cannot_do_is_named() -> None:
    with pytest.raises(NotImplementedError, match="sow_weights"):
        layer(attention_fn)(INPUTS, sow_weights=True)
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum: products"):
        attention_fn(QUERY, KEY, VALUE, qk_attn_weights_einsum=jnp.einsum)
    with pytest.raises(ValueError, match="`dropout_rng`: expected a key"):
        attention_fn(QUERY, KEY, VALUE, dropout_rate=0.5)
    with pytest.raises(ValueError, match="`q_positions`"):
        attention_fn(QUERY, KEY, VALUE, is_causal=True)
    with pytest.raises(ValueError, match="`mask`: expected at most rank 4"):
        attention_fn(QUERY, KEY, VALUE, mask=jnp.ones((1, 2, 4, 5, 7), bool))
    with pytest.raises(ValueError, match="`mask`: expected batch axes"):
        attention_fn(QUERY, KEY, VALUE, mask=jnp.ones((3, 4, 5, 7), bool))
    with pytest.raises(ValueError, match="`key`: expected the query's batch axes"):
        attention_fn(QUERY, KEY[:1], VALUE)
    assert flax_attention.__doc__
