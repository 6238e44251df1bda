"""The TPU decode kernel in the interpreter, against loops in numpy over every kind of view."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from flashspec.attention import tpu_decode
from flashspec.attention.decode import decode_attention, decode_stats
from flashspec.attention.request import make_request
from flashspec.attention.views import DenseView, PagedView, gather
from flashspec.online_softmax import SoftmaxStats, finalize
from pallas_kernels.tpu.attention_decode import Cache, DecodeRows, attention_decode
from pallas_kernels.tpu.attention_decode_config import AttentionDecodeConfig, heuristic
from tests.attention import test_decode as views
from tests.attention.dense_twin import attend
from tests.attention.test_decode import (
    LEFT,
    PARENTS,
    VIEWS,
    B,
    H,
    N,
    T,
    ancestry,
    check,
    history,
    make_view,
    options_of,
)
from tests.contracts.interpreted_tpu import races_found

SHAPED = {"logits_soft_cap": 2.0, "scale": 0.5}
# How blocks, chunks, heads and splits cut 24 slots (a ring has 14): several of each.
SMALL = AttentionDecodeConfig(block_kv=8, chunk_kv=4, heads=1, splits=2)


class Arrays(NamedTuple):
    """What `tpu_decode` reads of a call."""

    query: Any
    view: Any
    q_lengths: Any = None
    tree_mask: Any = None
    sinks: Any = None


def twin(arrays: Arrays) -> Any:
    return decode_attention(arrays.query, arrays.view, return_lse=True)


def decode(arrays: Arrays, interpret: Any = True, **facts: Any) -> Any:
    kernel = tpu_decode.Kernel(attention_decode, Cache, DecodeRows, interpret)
    positions = {"q_positions": jnp.arange(T)} if facts.get("window") is not None else {}

    @jax.jit
    def call(arrays: Arrays) -> Any:
        key, value, *_ = gather(arrays.view)
        request, _ = make_request(arrays.query, key, value, **facts, **positions)
        return tpu_decode.tpu_decode(kernel, twin, request, None, arrays)

    return call(arrays)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several blocks in little arrays; and little optimisation, since compiling is most of what the tests do."""
    monkeypatch.setattr(tpu_decode, "heuristic", lambda *sizes, **facts: SMALL)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.parametrize(
    "kind", [kind if kind == "paged" else pytest.param(kind, marks=pytest.mark.slow) for kind in VIEWS]
)
def test_every_view_against_loops_in_numpy(kind: str) -> None:
    q, k, v = history()
    sinks, real = np.linspace(-1, 1, N).astype(np.float32), np.array([4, 2, 0])
    left = LEFT if kind == "window" else None
    view = make_view(kind, k, v, garbage=np.nan)
    options = options_of(kind)
    check(decode(Arrays(jnp.asarray(q), view), **options), attend(q, k, v, views.visible_pairs(left=left)))
    got = decode(Arrays(jnp.asarray(q), view, real, sinks=jnp.asarray(sinks)), **options, **SHAPED)
    check(got, attend(q, k, v, views.visible_pairs(real=real, left=left), scale=0.5, cap=2.0, sinks=sinks))
    for wrong in (views.visible_pairs(real=real, left=left), views.visible_pairs(views.LENGTHS - 1, left=left)):
        with pytest.raises(AssertionError):  # other rows real; off by one
            check(decode(Arrays(jnp.asarray(q), view), **options)[:1], attend(q, k, v, wrong)[:1], 1e-3)


@pytest.mark.parametrize("window", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_a_tree_of_new_tokens(window: int | None) -> None:
    q, k, v = history()
    tree = jnp.asarray(ancestry(PARENTS))
    view = make_view("paged", k, v, garbage=np.nan)
    want = decode_attention(jnp.asarray(q), view, tree_mask=tree, window=window, return_lse=True)
    check(decode(Arrays(jnp.asarray(q), view, tree_mask=tree), window=window), map(np.asarray, want))
    with pytest.raises(AssertionError):
        check(decode(Arrays(jnp.asarray(q), view), window=window)[:1], [np.asarray(want[0])], 1e-3)


def test_bfloat16_heads_are_read_in_pairs() -> None:
    q, k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in history())
    got, lse = decode(Arrays(jnp.asarray(q), make_view("dense", k, v)))
    assert (got.dtype, lse.dtype) == (jnp.bfloat16, np.float32)
    want = attend(*(x.astype(float) for x in (q, k, v)), views.visible_pairs())
    check([got], want[:1], 2e-2)
    swapped = attend(*(x.astype(float) for x in (q, k[:, :, ::-1], v[:, :, ::-1])), views.visible_pairs())
    with pytest.raises(AssertionError):
        check([got], swapped[:1], 2e-2)


@pytest.mark.parametrize(("K", "page"), [(1, 16), (3, None)])
def test_heads_that_lie_apart(K: int, page: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head, or a number that fills no tile: XLA has the slots of a head side by side, and so has the kernel."""
    monkeypatch.setattr(tpu_decode, "heuristic", lambda *sizes, **facts: AttentionDecodeConfig(16, 16, 1, 1))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, *shape)).astype(np.float32) for shape in ((T, 5 * K, H), (32, K, H), (32, K, H)))
    lengths = np.array([32, 17, 4])
    view: Any = DenseView(jnp.asarray(k), jnp.asarray(v), jnp.asarray(lengths))
    if page:
        table = np.arange(B * 2).reshape(B, 2)[::-1]
        pools = (jnp.asarray(x[::-1].reshape(B * 2, page, K, H)) for x in (k, v))
        view = PagedView(*pools, jnp.asarray(table), jnp.asarray(lengths))
    at = lengths[:, None] - T + np.arange(T)
    seen = (np.arange(32) <= at[:, :, None])[:, None]
    got = decode(Arrays(jnp.asarray(q), view), pltpu.InterpretParams() if page else True)
    check(got, attend(q, k, v, seen))
    with pytest.raises(AssertionError):  # wrong: another head or, of one head, another row
        check(got[:1], attend(q, *(np.roll(x, 1, axis=2 if K > 1 else 0) for x in (k, v)), seen)[:1], 1e-3)


def test_heads_of_256_are_read_in_two_parts() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(2, *shape)).astype(np.float32) / 4 for shape in ((1, 4, 256), (16, 2, 256), (16, 2, 256))
    )
    view = DenseView(jnp.asarray(k), jnp.asarray(v), jnp.asarray([16, 9]))
    seen = (np.arange(16) < np.array([16, 9])[:, None])[:, None, None]
    got = decode(Arrays(jnp.asarray(q), view))
    check(got, attend(q, k, v, seen))
    with pytest.raises(AssertionError):  # wrong: one part in the place of the other
        check(got, attend(q, np.roll(k, 128, axis=3), v, seen), 1e-3)


def test_statistics_are_those_of_the_output() -> None:
    q, k, v = history()
    arrays = Arrays(jnp.asarray(q), make_view("dense", k, v))
    m, l, u, nonempty = decode(arrays, statistics=True)
    check(finalize(SoftmaxStats(m, l, u, nonempty)), map(np.asarray, decode(arrays)))
    want = decode_stats(arrays.query, arrays.view, implementation="blockwise")
    check((m, l, u), (want.m, want.l, want.u))


@pytest.mark.parametrize("dma", ["on_wait", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["paged", pytest.param("dense", marks=pytest.mark.slow)])
def test_copies_neither_race_nor_come_late(kind: str, dma: Any) -> None:
    """Uninitialised memory is NaN there, and a copy happens as late as its wait allows."""
    q, k, v = history()
    simulated = pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode=dma)
    got = decode(Arrays(jnp.asarray(q), make_view(kind, k, v, garbage=np.nan)), simulated)
    check(got, attend(q, k, v, views.visible_pairs()))
    assert not races_found()


def test_gradients_are_those_of_the_twin() -> None:
    q, k, v = history()
    view = make_view("dense", k, v)

    def loss(call: Any, query: jax.Array) -> jax.Array:
        output, lse = call(Arrays(query, view))
        return jnp.sum(jnp.sin(output)) + jnp.sum(lse**2)

    got, want = (jax.grad(functools.partial(loss, call))(jnp.asarray(q)) for call in (decode, twin))
    check([got], [np.asarray(want)], 1e-5)


def test_what_is_refused() -> None:
    def reasons(S: int = 64, K: int = 8, H: int = 128, dtype: Any = jnp.bfloat16) -> str:
        key = jnp.zeros((B, S, K, H), dtype)
        request, _ = make_request(jnp.zeros((B, T, K, H), dtype), key, key)
        return " ".join(tpu_decode.kernel_refusals(request, None))

    assert not reasons()
    assert not reasons(K=3)
    assert "copies 3 heads by 16 positions, and a row has 40" in reasons(K=3, S=40)
    assert "another way" in reasons(K=1, H=256, dtype=np.float32)
    assert "not of [64]" in reasons(H=64)
    assert "not in float16" in reasons(dtype=jnp.float16)
    assert "empty cache" in reasons(S=0)


@pytest.mark.parametrize("S", [1, 100, 8192])
@pytest.mark.parametrize("page", [1, 16, 48, 2048])
@pytest.mark.parametrize("rows", [1, 64])
def test_the_heuristic_cuts_in_whole_pages_and_chunks(S: int, page: int, rows: int) -> None:
    config = heuristic(S, 8, rows, 128, 128, 2, page)
    assert config.block_kv % page == 0
    assert config.block_kv % config.chunk_kv == 0
    assert 8 % config.heads == 0
    with pytest.raises(ValueError, match="`block_kv`: expected positive"):
        AttentionDecodeConfig(block_kv=48, chunk_kv=32)
