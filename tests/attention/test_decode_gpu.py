"""Decoding on a Hopper GPU: our kernel against attention in float32, with at most twice the error of XLA in 16 bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.attention import DenseView, PagedView, WindowView, decode_attention
from flashspec.attention.backends import scope

pytestmark = pytest.mark.gpu

SLOTS = 512
LEFT = 300
SIZES = [  # T, N, K, H
    *((1, 8, 2, 128), (4, 8, 2, 128), (8, 16, 2, 128), (16, 16, 2, 128), (16, 32, 2, 128)),
    *((3, 6, 2, 64), (2, 4, 4, 64), (2, 8, 2, 256), (5, 12, 1, 128), (16, 1, 1, 128)),
]
LENGTHS = np.array([300, 0, 512, 17], np.int32)
PARENTS = (None, 0, 0, 1)
VIEWS = ("dense", "window", "paged64", "paged16")


def make(kind, sizes, dtype=jnp.bfloat16, garbage=np.nan, lengths=LENGTHS, seed=0):
    """Queries, and a view whose slots past the lengths hold `garbage`."""
    T, N, K, H = sizes
    rng, B = np.random.default_rng(seed), len(lengths)
    q = jnp.asarray(rng.normal(size=(B, T, N, H)), dtype)
    k, v = (rng.normal(size=(B, SLOTS, K, H)) for _ in range(2))
    slot = np.broadcast_to(np.arange(SLOTS), (B, SLOTS))
    position = rng.permuted(slot, axis=1) if kind == "window" else slot
    live = position < lengths[:, None]
    k, v = (jnp.asarray(np.where(live[:, :, None, None], x, garbage), dtype) for x in (k, v))
    length = jnp.asarray(lengths)
    if kind == "window":
        return q, WindowView(k, v, jnp.asarray(np.where(live, position, -1), jnp.int32), length)
    if kind == "dense":
        return q, DenseView(k, v, length)
    page = int(kind.removeprefix("paged"))
    count = SLOTS // page
    order = rng.permutation(B * count)
    pools = [x.reshape(B * count, page, K, H)[np.argsort(order)] for x in (k, v)]
    used = np.arange(count)[None, :] * page < lengths[:, None]
    table = np.where(used, order.reshape(B, count), rng.choice([-7, 10**6], size=(B, count)))
    return q, PagedView(*pools, jnp.asarray(table, jnp.int32), length)


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def ancestry(T):
    tree = np.eye(T, dtype=bool)
    for i, parent in enumerate(PARENTS[:T]):
        if parent is not None:
            tree[i] |= tree[parent]
    return jnp.asarray(tree)


hopper = functools.partial(decode_attention, implementation="hopper", return_lse=True)
blockwise = functools.partial(decode_attention, implementation="blockwise", return_lse=True)


def assert_no_worse(got, q, view, **options):
    """Output and lse against float32: at most twice the error of the same call by XLA in the call's dtype."""
    want, theirs = blockwise(wide(q), wide(view), **options), blockwise(q, view, **options)
    for x, y, z in zip(got, want, theirs, strict=True):
        x, y, z = (np.asarray(a, np.float64) for a in (x, y, z))
        assert (np.isfinite(x) == np.isfinite(y)).all()
        there = np.isfinite(y)
        error, allowed = (np.linalg.norm(a[there] - y[there]) for a in (x, z))
        assert error <= 2 * allowed + 1e-6 * np.linalg.norm(y[there])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sizes(sizes, dtype):
    q, view = make("dense", sizes, dtype)
    assert_no_worse(hopper(q, view), q, view)
    shorter = dataclasses.replace(view, length=jnp.maximum(view.length - 1, 0))
    with pytest.raises(AssertionError):  # wrong variant: a position less
        assert_no_worse(hopper(q, shorter), q, view)


@pytest.mark.parametrize(
    "options",
    [
        {"q_lengths": jnp.array([4, 3, 0, 1])},
        {"window": 70},
        {"scale": 0.2, "logits_soft_cap": 3.0, "sinks": jnp.linspace(-1, 1, 8)},
        {"tree_mask": ancestry(4), "window": 70},
        {"tree_mask": ancestry(4), "q_lengths": jnp.array([4, 2, 4, 3])},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", VIEWS)
def test_views_and_options(kind, options):
    q, view = make(kind, (4, 8, 2, 128))
    options = ({"window": LEFT} if kind == "window" else {}) | options
    assert_no_worse(hopper(q, view, **options), q, view, **options)


@pytest.mark.parametrize("kind", VIEWS)
def test_what_a_view_does_not_hold_changes_no_bit(kind):
    outputs = [np.asarray(hopper(*make(kind, (4, 8, 2, 128), garbage=x))[0], np.float32) for x in (0.0, np.nan, np.inf)]
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])
    assert not outputs[0][1].any()
    seen = make(kind, (4, 8, 2, 128), lengths=LENGTHS + 1)[1]
    other = dataclasses.replace(make(kind, (4, 8, 2, 128))[1], length=seen.length)
    if kind != "window":  # the control: a NaN that is seen is noticed
        assert np.isnan(np.asarray(hopper(make(kind, (4, 8, 2, 128))[0], other)[0], np.float32)).any()


@pytest.mark.parametrize("splits", [1, 2, 7, 16, None])
def test_a_row_does_not_know_its_neighbours(splits):
    q, view = make("dense", (4, 8, 2, 128))
    call = functools.partial(hopper, num_splits=splits)
    together = call(q, view)
    assert_no_worse(together, q, view)
    np.testing.assert_array_equal(*(np.asarray(x[0], np.float32) for x in (together, call(q, view))))
    order = np.array([2, 0, 3, 1])
    moved = call(q[order], jax.tree.map(lambda x: x[order], view))
    alone = call(q[:1], jax.tree.map(lambda x: x[:1], view))
    if splits is not None:  # where the cut follows the lengths of the batch, sums may round differently
        np.testing.assert_array_equal(np.asarray(moved[0], np.float32), np.asarray(together[0], np.float32)[order])
        np.testing.assert_array_equal(np.asarray(alone[0][0], np.float32), np.asarray(together[0][0], np.float32))


def test_rows_of_a_verification_are_single_steps():
    lengths = np.array([300, 20, 512, 17], np.int32)
    q, view = make("dense", (4, 8, 2, 128), lengths=lengths)
    together = hopper(q, view, num_splits=2)[0]
    for i in range(4):
        before = dataclasses.replace(view, length=view.length - (3 - i))
        alone = hopper(q[:, i : i + 1], before, num_splits=2)[0][:, 0]
        np.testing.assert_allclose(
            np.asarray(alone, np.float32), np.asarray(together[:, i], np.float32), rtol=1e-2, atol=1e-2
        )


def test_a_path_of_a_tree_is_linear_decoding():
    lengths = np.array([300, 20, 512, 17], np.int32)
    q, view = make("dense", (4, 8, 2, 128), lengths=lengths)
    tree = ancestry(4)
    output = hopper(q, view, tree_mask=tree)[0]
    path = np.flatnonzero(np.asarray(tree[3]))
    key, value = np.asarray(view.key).copy(), np.asarray(view.value).copy()
    for b, length in enumerate(lengths):
        start = length - 4
        key[b, start : start + 3], value[b, start : start + 3] = key[b, start + path], value[b, start + path]
    linear = DenseView(jnp.asarray(key), jnp.asarray(value), view.length - 1)
    want = np.asarray(hopper(q[:, path], linear)[0], np.float32)
    np.testing.assert_allclose(np.asarray(output[:, path], np.float32), want, rtol=1e-2, atol=1e-2)
    causal = np.asarray(hopper(q, view)[0][:, path], np.float32)
    with pytest.raises(AssertionError):  # wrong variant: alternatives see each other
        np.testing.assert_allclose(causal, want, rtol=1e-2, atol=1e-2)


def test_the_default_is_our_kernel_and_the_program_holds_it():
    q, view = make("dense", (4, 8, 2, 128))
    text = jax.jit(decode_attention).lower(q, view).compile().as_text()
    assert scope("hopper") in text
    assert scope("blockwise") not in text
    slope = jax.jit(jax.grad(lambda q: jnp.sum(decode_attention(q, view).astype(jnp.float32))))(q)
    want = jax.jit(jax.grad(lambda q: jnp.sum(blockwise(q, view)[0].astype(jnp.float32))))(q)
    np.testing.assert_array_equal(np.asarray(slope, np.float32), np.asarray(want, np.float32))
