"""Attention over a shared prefix and each row's own keys, against one cache that holds both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.attention import DenseView, cascade_attention, decode_attention

B, T, P, S, N, K, H, HV = 3, 2, 10, 12, 4, 2, 8, 6
LENGTHS = np.array([7, 2, 12], np.int32)


def parts(seed=0, prefix=P):
    """Queries, prefix, the rows' own cache, and one cache of prefix and own positions."""
    rng = np.random.default_rng(seed)
    q, k, v, pk, pv = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, HV), (prefix, K, H), (prefix, K, HV))
    )
    both = [
        jnp.concatenate([jnp.broadcast_to(shared, (B, *shared.shape)), own], axis=1)
        for shared, own in ((pk, k), (pv, v))
    ]
    return q, pk, pv, DenseView(k, v, jnp.asarray(LENGTHS)), DenseView(*both, jnp.asarray(LENGTHS + prefix))


def check(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("prefix", [P, 0])
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_a_shared_prefix_equals_one_cache(implementation, prefix):
    q, pk, pv, own, both = parts(prefix=prefix)
    options = {"scale": 0.4, "logits_soft_cap": 3.0, "sinks": jnp.linspace(-1, 1, N), "return_lse": True}
    want = decode_attention(q, both, **options)
    check(cascade_attention(q, pk, pv, own, implementation=implementation, **options), want)


def test_overlapping_parts_are_noticed():
    """Wrong variant: the row's own view still holds the last position of the prefix, which then counts twice."""
    q, pk, pv, _, both = parts()
    overlapping = DenseView(both.key[:, P - 1 :], both.value[:, P - 1 :], both.length - (P - 1))
    with pytest.raises(AssertionError):
        check([cascade_attention(q, pk, pv, overlapping)], [decode_attention(q, both)])


def test_padding_trees_and_gradients():
    q, pk, pv, own, both = parts()
    tree = jnp.eye(T, dtype=bool)
    real = jnp.array([2, 1, 0])
    q = jnp.where((jnp.arange(T)[None, :] < real[:, None])[:, :, None, None], q, jnp.nan)
    for options in ({"q_lengths": real}, {"q_lengths": real, "tree_mask": tree}):
        check([cascade_attention(q, pk, pv, own, **options)], [decode_attention(q, both, **options)])
    q = parts()[0]
    slope = functools.partial(jax.grad, argnums=0)
    got = slope(lambda q: jnp.sum(cascade_attention(q, pk, pv, own) ** 2))(q)
    check([got], [slope(lambda q: jnp.sum(decode_attention(q, both) ** 2))(q)])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prefix_key": jnp.zeros((P, K, H + 1))}, "`prefix_key`: expected shape"),
        ({"prefix_value": jnp.zeros((P + 1, K, HV))}, "`prefix_value`: expected shape"),
        ({"query": jnp.zeros((B, 17, N, H))}, "`query`: expected 1 to 16 new tokens"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    q, pk, pv, own, _ = parts()
    arguments = {"query": q, "prefix_key": pk, "prefix_value": pv, "view": own} | changed
    with pytest.raises(ValueError, match=message):
        cascade_attention(**arguments)
