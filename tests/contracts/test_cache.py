"""The contract of the caches, on every layout; each law has a cache that breaks it and must fail."""

import dataclasses
import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flashspec.attention.decode import decode_attention
from flashspec.cache import (
    append,
    cache_bytes,
    dense,
    dense_cache,
    paged,
    paged_cache,
    rollback,
    view,
    window,
    window_cache,
)
from tests.contracts import cache_twin
from tests.contracts.cache_twin import HV, DenseTwin, H, K, PagedTwin, Twin, WindowTwin, append_all, assert_holds, play
from tests.mutants import mutant

CAPACITY = 10
LEFT, DRAFT = 4, 2
PAGE, PAGES, ROW_PAGES = 2, 7, 5
WIDTHS = (1, DRAFT + 1)
SHAPES = [(1, 1), (2, 3)]


def build_dense(layers: int, batch: int, module: ModuleType = dense) -> tuple[Any, Twin]:
    return module.dense_cache(layers, batch, CAPACITY, K, H, HV), DenseTwin(batch, CAPACITY)


def build_window(layers: int, batch: int, module: ModuleType = window) -> tuple[Any, Twin]:
    return module.window_cache(LEFT, DRAFT, layers, batch, K, H, HV), WindowTwin(batch, LEFT, LEFT + DRAFT + 1)


def build_paged(layers: int, batch: int, module: ModuleType = paged) -> tuple[Any, Twin]:
    cache = module.paged_cache(PAGE, PAGES, layers, batch, K, H, HV, capacity=PAGE * ROW_PAGES)
    return cache, PagedTwin(batch, PAGE, PAGES, ROW_PAGES)


LAYOUTS: dict[str, Callable[..., tuple[Any, Twin]]] = {
    "dense": build_dense,
    "window": build_window,
    "paged": build_paged,
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)

counts = st.lists(st.integers(0, DRAFT + 1), min_size=3, max_size=3)
appends = st.tuples(st.just("append"), counts, st.sampled_from(WIDTHS))
rollbacks = st.tuples(st.just("rollback"), counts)


# --- what is appended is what is read, whatever the history ---


@each_layout
@pytest.mark.parametrize(("layers", "batch"), SHAPES)
@hypothesis.given(operations=st.lists(st.one_of(appends, appends, rollbacks), max_size=9))
@hypothesis.settings(max_examples=15)
def test_a_cache_holds_what_a_list_would(layout: str, layers: int, batch: int, operations: list[Any]) -> None:
    play(*LAYOUTS[layout](layers, batch), operations, assert_holds)


# One history that meets every rule. Partial rows, then rejections that end inside a page:
HISTORY = [
    ("append", [3, 2, 0], 3),
    ("append", [3, 3, 3], 3),
    ("rollback", [1, 2, 0]),
    ("append", [1, 1, 0], 1),
    ("rollback", [3, 3, 3]),
    ("append", [3, 3, 3], 3),
    ("rollback", [10, 10, 10]),
    # Rows 1 and 2 find the pool empty, and lose positions; then row 0 returns its pages, and row 2 what it lost.
    ("append", [3, 3, 3], 3),
    ("append", [3, 3, 3], 3),
    ("rollback", [6, 0, 0]),
    ("append", [0, 1, 0], 1),
    ("rollback", [0, 2, 3]),
    ("append", [3, 0, 3], 3),
    ("rollback", [10, 10, 10]),
    # One row runs past its capacity.
    *[("append", [3, 0, 0], 3)] * 4,
    ("rollback", [3, 0, 0]),
    ("append", [1, 3, 3], 3),
]
MUTANTS = {
    "dense: writes clamped to the capacity": (
        build_dense,
        dense,
        ("row_index(*positions.shape), positions", "row_index(*positions.shape), positions.clip(0, 9)"),
    ),
    "dense: rejected positions kept": (build_dense, dense, ("replace(self, length=length)", "replace(self)")),
    "window: rejected positions kept": (
        build_window,
        window,
        ("jnp.where(self.positions < length[:, None], self.positions, -1)", "self.positions"),
    ),
    "window: rejected length kept": (
        build_window,
        window,
        ("replace(self, length=length, positions=positions, f", "replace(self, positions=positions, f"),
    ),
    "window: one slot short": (
        build_window,
        window,
        ("slots = least if slots is None", "slots = least - 1 if slots is None"),
        ("if slots < least", "if False"),
        ("positions.shape[1] > slots - self.left", "False"),
    ),
    "window: positions off by one": (build_window, window, ("length[:, None] - 1\n", "length[:, None]\n")),
    "paged: pages never returned": (
        build_paged,
        paged,
        ("jnp.where(index < self._pages(length)[:, None], self.page_table, -1)", "self.page_table"),
    ),
    "paged: a freed page still used": (
        build_paged,
        paged,
        ("index < self._pages(length)", "index < (length // self.page_size)"),
    ),
    "paged: a page with two owners": (build_paged, paged, (".set(False", ".set(True")),
    "paged: rows take the same free pages": (
        build_paged,
        paged,
        ("(jnp.cumsum(more, dtype=jnp.int32) - more)", "(0 * more)"),
    ),
    "paged: pages granted after a hole": (
        build_paged,
        paged,
        ("jnp.where(self.overflow, held, ", "jnp.where(False, held, "),
    ),
    "paged: writes past the row clamped": (
        build_paged,
        paged,
        ('mode="fill", fill_value=-1)\n        return', 'mode="clip")\n        return'),
    ),
}


@each_layout
def test_one_long_history(layout: str) -> None:
    play(*LAYOUTS[layout](2, 3), HISTORY, assert_holds)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_cache_is_noticed(name: str) -> None:
    build, module, *edits = MUTANTS[name]
    with pytest.raises(AssertionError):
        play(*build(2, 3, mutant(module, *edits)), HISTORY, assert_holds)


# --- drafting and rejecting leaves no trace ---


def visible(cache: Any, left: int | None) -> list[bytes]:
    """What the next query of each row can read, bit for bit."""
    read = []
    for layer in range(len(cache.key)):
        for b, length in enumerate(np.asarray(cache.length)):
            found = cache_twin.live(cache, layer, b)
            first = 0 if left is None else max(0, int(length) - left)
            read += [repr((i, *found[i])).encode() for i in range(first, int(length))]
    return read


@functools.partial(jax.jit, static_argnames="left")
def attend(cache: Any, left: int | None) -> Any:
    """One query of each row over what its cache holds in the last layer."""
    query = jnp.ones((cache.length.shape[0], 1, 2 * K, H)) / 4096
    return decode_attention(query, view(cache, len(cache.key) - 1), window=(left, 0))


def draft_and_reject(layout: str, kept: list[int], rounds: int, undo: Callable[[Any, Any], Any]) -> None:
    """Rounds that append three and undo all but `kept`, beside rounds that append just those."""
    left = LEFT if layout == "window" else None
    drafted, plain = (cache_twin.with_nan(LAYOUTS[layout](2, 2)[0]) for _ in range(2))
    accepted = jnp.asarray(kept, jnp.int32)
    for r in range(rounds):
        tokens = jnp.arange(6, dtype=jnp.int32).reshape(2, 3) + 10 * r
        drafted = undo(append_all(drafted, tokens, jnp.full((2,), 3, jnp.int32)), plain.length + accepted)
        plain = append_all(plain, tokens, accepted)
        assert visible(drafted, left) == visible(plain, left)
        assert np.asarray(attend(drafted, left)).tobytes() == np.asarray(attend(plain, left)).tobytes()
        assert not np.asarray(drafted.overflow).any()


@each_layout
@hypothesis.given(kept=st.lists(st.integers(0, DRAFT), min_size=2, max_size=2), rounds=st.integers(1, 3))
@hypothesis.settings(max_examples=15)
def test_rejected_drafts_leave_no_trace(layout: str, kept: list[int], rounds: int) -> None:
    draft_and_reject(layout, kept, rounds, cache_twin.rollback_all)


@each_layout
def test_a_draft_that_is_not_undone_leaves_one(layout: str) -> None:
    with pytest.raises(AssertionError):
        draft_and_reject(layout, [1, 2], 2, lambda cache, length: cache)


@each_layout
def test_a_row_without_valid_positions_keeps_every_bit(layout: str) -> None:
    cache = play(*LAYOUTS[layout](2, 2), HISTORY[:3], lambda *_: None)
    after = append_all(cache, jnp.full((2, 3), 99, jnp.int32), jnp.asarray([0, 3], jnp.int32))
    for layer in range(2):
        assert cache_twin.live(cache, layer, 0) == cache_twin.live(after, layer, 0)
        assert cache_twin.live(cache, layer, 1) != cache_twin.live(after, layer, 1)
    idle = append_all(cache, jnp.full((2, 3), 99, jnp.int32), jnp.zeros((2,), jnp.int32))
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(idle), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_window_rolled_back_too_far_is_flagged_until_it_is_empty() -> None:
    cache, twin = build_window(1, 1)
    back = [("append", [3], 3)] * 4 + [("rollback", [DRAFT + 2])]
    cache = play(cache, twin, back, assert_holds)
    assert np.asarray(cache.overflow).tolist() == [True]
    cache = append_all(cache, jnp.ones((1, 3), jnp.int32), jnp.asarray([3], jnp.int32))
    assert np.asarray(cache.overflow).tolist() == [True]
    assert np.asarray(rollback(cache, jnp.zeros((1,), jnp.int32)).overflow).tolist() == [False]


def test_the_layouts_read_alike() -> None:
    """Attention that looks LEFT positions back sees the same through all three, and not what a wider window sees."""

    def ignore(*_: Any) -> None: ...

    history = [*HISTORY[:6], ("append", [0, 3, 0], 3)]
    caches = [play(*build(1, 2), history, ignore) for build in LAYOUTS.values()]
    assert not any(np.asarray(cache.overflow).any() for cache in caches)
    read = [np.asarray(attend(cache, LEFT - 1)) for cache in caches]
    for other in read[1:]:
        np.testing.assert_allclose(other, read[0], rtol=1e-5)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(np.asarray(attend(caches[0], LEFT)), read[0], rtol=1e-5)


# --- the page pool ---


def test_a_full_pool_flags_the_row_that_lacks_a_page_and_no_other() -> None:
    cache, twin = build_paged(1, 2)
    cache = play(cache, twin, [("append", [3, 3], 3), ("append", [3, 3], 3), ("append", [3, 0], 3)], assert_holds)
    assert np.asarray(cache.overflow).tolist() == [True, False]
    cache = cache_twin.rollback_all(cache, jnp.asarray([8, 6], jnp.int32))
    assert np.asarray(cache.overflow).tolist() == [False, False]


def test_pages_come_back_and_are_used_again() -> None:
    cache, _ = build_paged(1, 1)
    for _ in range(5):
        cache = append_all(cache, jnp.ones((1, 3), jnp.int32), jnp.full((1,), 3, jnp.int32))
        cache = cache_twin.rollback_all(cache, jnp.zeros((1,), jnp.int32))
    assert np.asarray(cache.page_table).tolist() == [[-1] * ROW_PAGES]


# --- storage ---


def full_copies(text: str, shape: tuple[int, ...]) -> int:
    """Copies of a whole layer in compiled HLO."""
    return len(re.findall(rf"\[{','.join(map(str, shape))}\]\S* copy\(", text))


def rounds_of(cache: Any) -> Any:
    """Draft three, read them, reject two, ten times over."""

    def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        i, cache = carry
        for layer in range(len(cache.key)):
            key, value = (jnp.full((2, 3, K, size), i, jnp.int32).astype(jnp.float32) for size in (H, HV))
            cache = append(cache, layer, key, value)
        return i + 1, rollback(cache, cache.length - 2)

    return lax.while_loop(lambda carry: carry[0] < 10, body, (jnp.int32(0), cache))


@each_layout
def test_a_loop_updates_the_cache_in_place(layout: str) -> None:
    cache, _ = LAYOUTS[layout](2, 2)
    shape = cache.key[0].shape
    compiled = jax.jit(rounds_of, donate_argnums=0).lower(cache).compile()
    assert full_copies(compiled.as_text(), shape) == 0
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes(cache)
    kept = jax.jit(append_all).lower(cache, jnp.ones((2, 3), jnp.int32), jnp.ones((2,), jnp.int32)).compile()
    assert full_copies(kept.as_text(), shape) > 0, "without donation the old cache must survive"


def test_bytes_are_known_before_anything_is_allocated() -> None:
    for build in LAYOUTS.values():
        cache, _ = build(2, 3)
        assert cache_bytes(cache) == sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(cache))
        assert cache_bytes(jax.eval_shape(lambda cache=cache: cache)) == cache_bytes(cache)
    huge = cache_bytes(dense_cache, 32, 64, 1 << 20, 8, 128, dtype=jnp.bfloat16)
    assert huge == 2 * 32 * 64 * 2**20 * 8 * 128 * 2 + 64 * 4
    ring = cache_bytes(window_cache, 127, 4, 2, 1, 8, 16, 32)
    assert ring == 2 * 132 * 8 * (16 + 32) * 4 + 132 * 4 + 4 + 1


def test_layers_have_their_own_arrays() -> None:
    for build in LAYOUTS.values():
        cache, _ = build(2, 1)
        assert len(cache.key) == len(cache.value) == 2
        assert {leaf.ndim for leaf in (*cache.key, *cache.value)} == {4}


def test_64_bit_mode_keeps_the_types(x64: None) -> None:
    for build in LAYOUTS.values():
        before, twin = build(1, 2)
        after = play(before, twin, HISTORY[1:3], assert_holds)
        after = rollback(after, jnp.asarray([1, 1], jnp.int64))
        assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(before)]


# --- rollback of other states ---


class Named(NamedTuple):
    length: Any
    rest: Any


@dataclasses.dataclass(frozen=True)
class Data:
    length: Any
    rest: Any


@pytest.mark.parametrize("make", [Named, Data, lambda length, rest: {"length": length, "rest": rest}])
def test_rollback_lowers_the_length_of_any_state(make: Callable[..., Any]) -> None:
    state = rollback(make(length=jnp.asarray([5, 2, 4]), rest="kept"), jnp.asarray([3, 3, 4]))
    read = state if isinstance(state, dict) else {name: getattr(state, name) for name in ("length", "rest")}
    assert np.asarray(read["length"]).tolist() == [3, 2, 4]
    assert read["rest"] == "kept"


def test_traced_counts_out_of_range_are_clipped() -> None:
    cache = append(dense_cache(1, 2, 4, 1, 1), 0, *[jnp.ones((2, 3, 1, 1))] * 2)
    lower = jax.jit(lambda length: rollback(cache, length).length)
    assert lower(jnp.asarray([-2, 9])).tolist() == [0, 3]
    add = jax.jit(lambda count: append(cache, 0, *[jnp.ones((2, 2, 1, 1))] * 2, count).length)
    assert add(jnp.asarray([-2, 9])).tolist() == [3, 5]


# --- bad input ---


def refused(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=f"^`{name}`: expected"):
        call()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("layers", lambda: dense_cache(0, 1, 4, 1, 1)),
        ("batch", lambda: dense_cache(1, 0, 4, 1, 1)),
        ("capacity", lambda: dense_cache(1, 1, 0, 1, 1)),
        ("K", lambda: dense_cache(1, 1, 4, 0, 1)),
        ("H", lambda: paged_cache(1, 1, 1, 1, 1, 0)),
        ("Hv", lambda: dense_cache(1, 1, 4, 1, 1, 0)),
        ("dtype", lambda: dense_cache(1, 1, 4, 1, 1, dtype=jnp.int32)),
        ("slots", lambda: window_cache(4, 2, 1, 1, 1, 1, slots=6)),
        ("left", lambda: window_cache(-1, 2, 1, 1, 1, 1)),
        ("draft_length", lambda: window_cache(4, -1, 1, 1, 1, 1)),
        ("page_size", lambda: paged_cache(0, 1, 1, 1, 1, 1)),
        ("num_pages", lambda: paged_cache(1, 0, 1, 1, 1, 1)),
        ("capacity", lambda: paged_cache(1, 1, 1, 1, 1, 1, capacity=0)),
    ],
)
def test_impossible_caches_are_refused(name: str, call: Callable[[], Any]) -> None:
    refused(name, call)


@each_layout
def test_arguments_that_do_not_fit_are_refused(layout: str) -> None:
    cache, _ = LAYOUTS[layout](1, 2)
    k, v = jnp.zeros((2, 3, K, H)), jnp.zeros((2, 3, K, HV))
    refused("layer", lambda: append(cache, 1, k, v))
    refused("layer", lambda: view(cache, -1))
    refused("k", lambda: append(cache, 0, k[:1], v))
    refused("k", lambda: append(cache, 0, k.astype(jnp.bfloat16), v))
    refused("v", lambda: append(cache, 0, k, v[:, :2]))
    refused("num_valid", lambda: append(cache, 0, k, v, jnp.asarray([4, 0])))
    refused("num_valid", lambda: append(cache, 0, k, v, jnp.asarray([-1, 0])))
    refused("num_valid", lambda: append(cache, 0, k, v, jnp.asarray([1.0, 0.0])))
    refused("length", lambda: rollback(cache, jnp.asarray([0, 0, 0])))
    refused("length", lambda: rollback(cache, jnp.asarray([0, -1])))


def test_other_states_and_long_appends_are_refused() -> None:
    refused("cache", lambda: rollback(("no", "length"), jnp.zeros((1,), jnp.int32)))
    k, v = jnp.zeros((1, DRAFT + 2, K, H)), jnp.zeros((1, DRAFT + 2, K, HV))
    refused("k", lambda: append(build_window(1, 1)[0], 0, k, v))
