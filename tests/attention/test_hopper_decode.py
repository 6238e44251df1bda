"""Decoding by the Hopper kernel, as far as a CPU can tell: what it is given, what it refuses, that it compiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.attention import DenseView, PagedView, WindowView, decode, decode_attention, hopper_decode
from tests.attention import decode_twin
from tests.mutants import mutant

B, T, N, K, H, S, PAGE = 3, 4, 4, 2, 64, 128, 16
LENGTHS = np.array([100, 3, 128], np.int32)
LEFT = 60
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
VIEWS = ("dense", "window", "paged")


def make(kind, dtype=jnp.bfloat16, lengths=LENGTHS, seed=0):
    """Queries and a view; slots that hold nothing live are NaN."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(B, T, N, H)), dtype)
    slot = np.arange(S)
    position = slot[None, :] + np.maximum(lengths - S, 0)[:, None]
    live = position < lengths[:, None]
    k, v = (np.where(live[:, :, None, None], rng.normal(size=(B, S, K, H)), np.nan) for _ in range(2))
    length = jnp.asarray(lengths)
    if kind != "paged":
        k, v = jnp.asarray(k, dtype), jnp.asarray(v, dtype)
        if kind == "dense":
            return q, DenseView(k, v, length)
        return q, WindowView(k, v, jnp.asarray(np.where(live, position, -1), jnp.int32), length)
    count = S // PAGE
    order = rng.permutation(B * count)
    pools = [jnp.asarray(x.reshape(B * count, PAGE, K, H)[np.argsort(order)], dtype) for x in (k, v)]
    used = np.arange(count)[None, :] * PAGE < lengths[:, None]
    table = np.where(used, order.reshape(B, count), rng.choice([-7, 10**6], size=(B, count)))
    return q, PagedView(*pools, jnp.asarray(table, jnp.int32), length)


def prepared(q, view, module=decode, **options):
    """The request, as on a Hopper GPU, and the arrays of a call."""
    request, arrays = module._prepare(q, view, **{"q_lengths": None, "window": None} | options)
    return dataclasses.replace(request, platform="cuda", compute_capability="9.0"), arrays


def run_twin(q, view, adaptor=hopper_decode, num_splits=None, **options):
    """The call through the adaptor, with the twin in the kernel's place."""
    request, arrays = prepared(q, view, **options)
    return adaptor.hopper_decode(decode_twin.decode, lambda arrays: None, request, num_splits, arrays)


def check(got, want, tolerance=2e-2):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), tolerance, tolerance)


OPTIONS = {
    "plain": {},
    "padding": {"q_lengths": jnp.array([4, 2, 0])},
    "numbers": {"scale": 0.2, "logits_soft_cap": 3.0, "sinks": jnp.linspace(-1, 1, N)},
    "window": {"window": 9},
    "huge window": {"window": (2**40, None)},
    "tree": {"tree_mask": jnp.asarray(TREE)},
    "trees and a window": {
        "tree_mask": jnp.asarray(np.stack([TREE, np.tril(np.ones((T, T), bool)), np.eye(T, dtype=bool)])),
        "window": (1, 0),
        "q_lengths": jnp.array([4, 3, 4]),
    },
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("dense", options) for options in OPTIONS.values()),
        *((kind, OPTIONS[name]) for kind in VIEWS[1:] for name in ("plain", "trees and a window")),
    ],
)
def test_the_kernel_is_given_what_the_call_means(kind, options):
    q, view = make(kind)
    options = ({"window": LEFT} if kind == "window" else {}) | options
    want = decode_attention(q, view, implementation="blockwise", return_lse=True, **options)
    check(run_twin(q, view, **options), want)


@pytest.mark.parametrize(
    ("edit", "option"),
    [
        (("jnp.where((positions >= 0) & (positions < length[:, None]), positions, NOWHERE)", "positions"), "plain"),
        (("depth - left)", "depth - left + 1)"), "trees and a window"),
        (("seen & (back <= left)", "seen & (back < left)"), "trees and a window"),
        (("jnp.clip(arrays.q_lengths, 0, request.T)", "(0 * arrays.q_lengths + request.T)"), "padding"),
    ],
)
def test_wrong_operands_are_noticed(edit, option):
    kind = "window" if option == "plain" else "dense"
    q, view = make(kind)
    if kind == "window":  # a slot past the length that still says where it was
        view = dataclasses.replace(view, positions=jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32) - 1, (B, S)))
    options = OPTIONS[option]
    want = decode_attention(q, view, implementation="blockwise", return_lse=True, **options)
    wrong = mutant(hopper_decode, edit)
    with pytest.raises(AssertionError):
        check(run_twin(q, view, wrong, **options), want)


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_vmap_is_a_loop(kind):
    q, view = make(kind)
    others = make(kind, lengths=np.array([5, 128, 77], np.int32), seed=1)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), (q, view), others)
    got = jax.vmap(run_twin)(*stacked)
    for i, pair in enumerate(((q, view), others)):
        check([x[i] for x in got], run_twin(*pair), 1e-2)


def test_statistics_and_gradients():
    q, view = make("dense", jnp.float32)
    got, want = (
        decode.decode_stats(q, view, implementation="blockwise"),
        run_twin(q, view, statistics=True),
    )
    check(jax.tree.leaves(got), [jnp.where(got.nonempty, want[0], -jnp.inf), *want[1:]], 1e-4)
    request, arrays = prepared(q, view)

    def total(q):
        moved = arrays._replace(query=q)
        return jnp.sum(hopper_decode.hopper_decode(decode_twin.decode, on_xla, request, None, moved)[0])

    def on_xla(arrays):
        operands = decode._operands(request, arrays)
        return decode._fields(request, decode._split_stats(request, operands, 1), operands)

    slope = jax.grad(lambda q: jnp.sum(decode_attention(q, view, implementation="blockwise")))(q)
    check([jax.grad(total)(q)], [slope], 1e-5)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"platform": "cpu", "compute_capability": None}, "compute capability 9.0 only, not on cpu"),
        ({"compute_capability": "8.0"}, "not on cuda of compute capability 8.0"),
        ({"dtype": np.dtype(np.float32)}, "two bytes"),
        ({"Hv": 128}, "one head size"),
        ({"S": 130}, "multiple of 8"),
        ({"partitioned": ("key axis 1",)}, "key axis 1 is split"),
        ({"H": 256, "Hv": 256, "T": 16, "N": 32}, "shared memory"),
    ],
)
def test_what_it_refuses(changed, reason):
    request, _ = prepared(*make("dense"))
    assert hopper_decode.refusals(request, None) == ()
    refused = hopper_decode.refusals(dataclasses.replace(request, **changed), None)
    assert any(reason in text for text in refused)


def test_selection():
    q, view = make("dense")
    request, _ = prepared(q, view)
    assert decode._select(None, view, request) == "hopper"
    assert decode._select(None, view, dataclasses.replace(request, compute_capability="8.0")) == "blockwise"
    assert decode._select(("hopper", "reference"), view, dataclasses.replace(request, platform="cpu")) == "reference"
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="not on cpu"):
            decode_attention(q, view, implementation="hopper")


@pytest.mark.parametrize("kind", ["window", "paged"])
def test_the_kernel_lowers_for_a_gpu(kind):
    """Tracing and layouts are checked on any machine; the program holds our two kernels and no product of XLA's."""
    q, view = make(kind)
    request, arrays = prepared(q, view, window=LEFT, tree_mask=jnp.asarray(TREE), sinks=jnp.ones(N))
    call = functools.partial(decode._run, None, request, "hopper")
    text = jax.jit(call).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "dot_general" not in text
