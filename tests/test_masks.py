"""Masks: every rule against a loop over pairs, tiles against the whole, extremes of positions, and what is refused."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.masks import Contiguous, Mask, make_mask

SHAPE = B, N, T, S = 2, 3, 4, 6
rng = np.random.default_rng(0)


def full(mask: Mask) -> np.ndarray:
    return np.broadcast_to(np.asarray(mask.full()), mask.shape)


def by_pairs(q: np.ndarray, k: np.ndarray, causal: bool, left: int | None, right: int | None) -> np.ndarray:
    """Positions compared pair by pair, in Python integers, [B, T, S]."""
    visible = np.ones((len(q), q.shape[1], k.shape[1]), bool)
    for b, i, j in np.ndindex(visible.shape):
        distance = int(q[b, i]) - int(k[b, j])
        visible[b, i, j] = (
            (not causal or distance >= 0)
            and (left is None or distance <= left)
            and (right is None or -distance <= right)
        )
    return visible


def assert_positions(mask: Mask, q: Any, k: Any, causal: bool, window: tuple[int | None, int | None]) -> None:
    q, k = (
        np.broadcast_to(np.asarray(x), (mask.shape[0], size)) for x, size in ((q, mask.shape[2]), (k, mask.shape[3]))
    )
    want = by_pairs(q, k, causal, *window)
    assert np.array_equal(full(mask), np.broadcast_to(want[:, None], mask.shape))


WINDOWS: list[tuple[int | None, int | None]] = [(None, None), (2, None), (None, 1), (1, 2), (0, 0)]
CASES = [(causal, window) for causal in (False, True) for window in WINDOWS]
Q_ROWS = np.array([[2, 3, 4, 5], [-1, 0, 7, 3]])
K_ROWS = np.array([[0, 1, 2, 3, 4, 5], [-2, 9, 0, 3, 1, 2]])


@pytest.mark.parametrize(("causal", "window"), CASES)
def test_positions(causal: bool, window: tuple[int | None, int | None]) -> None:
    for q, k in itertools.product((Q_ROWS, Q_ROWS[0]), (K_ROWS, K_ROWS[0])):
        mask = make_mask(SHAPE, is_causal=causal, window=window, q_positions=q, kv_positions=k)
        assert_positions(mask, q, k, causal, window)


@pytest.mark.parametrize("wrong", [{"is_causal": False}, {"window": (1, None)}, {"q_positions": np.arange(T)}])
def test_a_wrong_rule_is_rejected(wrong: dict[str, Any]) -> None:
    rules = {"is_causal": True, "window": (2, None), "q_positions": Q_ROWS[0]}
    assert_positions(make_mask(SHAPE, **rules), Q_ROWS[0], np.arange(S), True, (2, None))
    with pytest.raises(AssertionError):
        assert_positions(make_mask(SHAPE, **{**rules, **wrong}), Q_ROWS[0], np.arange(S), True, (2, None))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("wide", [False, True])
def test_every_integer_dtype(dtype: Any, wide: bool) -> None:
    with jax.enable_x64(wide):
        q = np.array([0, 1, 100, 3], dtype)  # 0 - left would wrap in an unsigned dtype
        mask = make_mask(SHAPE, is_causal=True, window=(2, None), q_positions=jnp.asarray(q))
        assert_positions(mask, q, np.arange(S), True, (2, None))
        start = make_mask(SHAPE, window=(3, 0), q_positions=Contiguous(jnp.asarray(np.array([1, 2], dtype))))
        assert_positions(start, np.array([[1], [2]]) + np.arange(T), np.arange(S), False, (3, 0))


@pytest.mark.parametrize("window", [(0, 0), (5, 5), (2**31 - 1, None), (None, 2**40), (2**40, 0)])
def test_extreme_positions_do_not_wrap(window: tuple[int | None, int | None]) -> None:
    ends = np.array([-(2**31), -(2**31) + 5, 0, 2**31 - 1], np.int32)
    mask = make_mask((1, 1, 4, 4), window=window, q_positions=ends, kv_positions=ends[::-1])
    assert_positions(mask, ends, ends[::-1], False, window)
    jitted = jax.jit(lambda mask: mask.full())(mask)
    assert np.array_equal(np.asarray(jitted), full(mask))


def test_plain_subtraction_would_wrap() -> None:
    ends = np.array([-(2**31), 2**31 - 1], np.int32)
    wrapped = jnp.asarray(ends)[:, None] - jnp.asarray(ends)[None, :] <= 5
    with pytest.raises(AssertionError):
        assert np.array_equal(np.asarray(wrapped), by_pairs(ends[None], ends[None], False, 5, None)[0])


def test_unsigned_positions_past_int32_stay_last() -> None:
    q = np.array([0, 2**31 + 5], np.uint32)
    mask = make_mask((1, 1, 2, 3), is_causal=True, q_positions=q, kv_positions=np.array([0, 1, 2**31 - 1], np.int32))
    assert full(mask)[0, 0].tolist() == [[True, False, False], [True, True, True]]


def test_square_masks_default_to_0_to_T() -> None:
    assert np.array_equal(full(make_mask((1, 1, 4, 4), is_causal=True))[0, 0], np.tril(np.ones((4, 4), bool)))
    band = np.tril(np.ones((4, 4), bool)) & ~np.tril(np.ones((4, 4), bool), -2)
    assert np.array_equal(full(make_mask((1, 1, 4, 4), is_causal=True, window=1))[0, 0], band)


def test_an_int_window_is_both_sides() -> None:
    one, both = make_mask((1, 1, 4, 4), window=1), make_mask((1, 1, 4, 4), window=(1, 1))
    assert np.array_equal(full(one), full(both))
    assert full(one).sum() == 10


@pytest.mark.parametrize(
    ("rules", "name"),
    [({"is_causal": True}, "is_causal"), ({"window": (1, None)}, "window"), ({"window": 3}, "window")],
)
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 1, 3, 4), (1, 1, 4, 3), (1, 1, 0, 4)])
def test_a_rectangle_without_positions_is_ambiguous(rules: dict, name: str, shape: tuple) -> None:
    with pytest.raises(ValueError, match=f"{name} with T = .* is ambiguous.*top-left.*bottom-right"):
        make_mask(shape, **rules)
    with pytest.raises(ValueError, match="ambiguous"):
        make_mask(shape, **rules, kv_positions=np.arange(shape[3]))
    make_mask(shape, **rules, q_positions=np.arange(shape[2]))


def test_a_window_without_limits_is_no_rule() -> None:
    mask = make_mask(SHAPE, window=(None, None))
    assert not mask.is_positional
    assert full(mask).all()


def test_decoding_sees_all_keys_and_top_left_only_the_first() -> None:
    latest = make_mask((1, 1, 1, 8), is_causal=True, q_positions=np.array([7]))
    top_left = make_mask((1, 1, 1, 8), is_causal=True, q_positions=np.arange(1))
    assert full(latest).all()
    assert full(top_left)[0, 0, 0].tolist() == [True] + [False] * 7


def other_rules() -> tuple[dict[str, Any], np.ndarray]:
    """Lengths, segments and an explicit mask, with the visibility that they should give."""
    q_lengths, kv_lengths = np.array([4, 2]), np.array([3, 6], np.uint8)
    q_segments, kv_segments = rng.integers(0, 2, (B, T)), rng.integers(0, 2, (B, S))
    explicit = rng.random((1, N, T, 1)) > 0.3
    visible = np.zeros(SHAPE, bool)
    for b, n, t, s in np.ndindex(SHAPE):
        visible[b, n, t, s] = (
            t < q_lengths[b] and s < kv_lengths[b] and q_segments[b, t] == kv_segments[b, s] and explicit[0, n, t, 0]
        )
    rules = {"mask": explicit, "q_lengths": q_lengths, "kv_lengths": kv_lengths}
    return rules | {"q_segment_ids": q_segments, "kv_segment_ids": kv_segments}, visible


def test_lengths_segments_and_explicit_masks() -> None:
    rules, visible = other_rules()
    assert np.array_equal(full(make_mask(SHAPE, **rules)), visible)


@pytest.mark.parametrize("dropped", ["mask", "q_lengths", "kv_lengths"])
def test_every_rule_counts(dropped: str) -> None:
    rules, visible = other_rules()
    rules.pop(dropped)
    assert not np.array_equal(full(make_mask(SHAPE, **rules)), visible)


def test_polarity() -> None:
    rules, visible = other_rules()
    rules["mask"] = ~rules["mask"]
    assert not np.array_equal(full(make_mask(SHAPE, **rules)), visible)


EXPLICIT_SHAPES = [
    tuple(size if keep else 1 for size, keep in zip(SHAPE, kept, strict=True)) for kept in np.ndindex(2, 2, 2, 2)
]


@pytest.mark.parametrize("shape", EXPLICIT_SHAPES)
def test_tiles_cut_the_whole_at_any_place(shape: tuple[int, ...]) -> None:
    rules, _ = other_rules()
    mask = make_mask(
        SHAPE, **rules | {"mask": rng.random(shape) > 0.3}, window=(3, 1), q_positions=Contiguous(np.array([1, 0]))
    )
    tile = jax.jit(lambda q, k: mask.tile(q, 3, k, 4))
    padded = np.zeros((B, N, T + 3, S + 4), bool)
    padded[:, :, :T, :S] = full(mask)
    for q, k in itertools.product(range(0, T, 2), range(0, S, 3)):  # the last ones reach past T and S
        got = np.broadcast_to(np.asarray(tile(q, k)), (B, N, 3, 4))
        assert np.array_equal(got, padded[:, :, q : q + 3, k : k + 4]), (q, k)


# Tree masks.

TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)


def tree_by_pairs(start: np.ndarray, trees: np.ndarray, k: np.ndarray) -> np.ndarray:
    visible = np.zeros((B, T, S), bool)
    for b, i, j in np.ndindex(visible.shape):
        token = int(k[b, j]) - int(start[b])
        visible[b, i, j] = token < 0 or (token < T and trees[b, i, token])
    return visible


@pytest.mark.parametrize(
    "k", [np.tile(np.arange(S), (B, 1)), K_ROWS, np.array([[2**31 - 1, 0, 1, 2, 3, 4], [-(2**31), 5, 4, 3, 2, 1]])]
)
def test_tree_masks(k: np.ndarray) -> None:
    start = np.array([2, 0])
    for trees in (TREE, np.stack([TREE, np.eye(T, dtype=bool)])):
        mask = make_mask(SHAPE, tree_mask=trees, q_positions=Contiguous(start), kv_positions=k.astype(np.int32))
        want = tree_by_pairs(start, np.broadcast_to(trees, (B, T, T)), k)
        assert np.array_equal(full(mask), np.broadcast_to(want[:, None], SHAPE))
        tile = jax.jit(lambda q, s, mask=mask: mask.tile(q, 2, s, 3))(2, 3)
        assert np.array_equal(np.broadcast_to(np.asarray(tile), (B, N, 2, 3)), full(mask)[:, :, 2:4, 3:6])


def test_a_chain_is_causal_and_a_tree_is_not() -> None:
    start = Contiguous(np.array([2, 1]))
    chain = make_mask(SHAPE, tree_mask=np.tril(np.ones((T, T), bool)), q_positions=start)
    causal = make_mask(SHAPE, is_causal=True, q_positions=start)
    assert np.array_equal(full(chain), full(causal))
    assert not np.array_equal(full(make_mask(SHAPE, tree_mask=TREE, q_positions=start)), full(causal))


def assert_window_counts_depth(depth: np.ndarray, left: int) -> None:
    """Every node of the tree sees the keys that it would see if its path were decoded alone."""
    start = np.array([3, 1])
    mask = make_mask((B, N, T, S + 1), tree_mask=TREE, q_positions=Contiguous(start), window=(left, None))
    got = full(mask)
    for b, i, s in np.ndindex(B, T, S + 1):
        token = s - start[b]
        position = start[b] + depth[token] if 0 <= token < T else s
        related = token < 0 or (token < T and TREE[i, token])
        assert got[b, 0, i, s] == (related and start[b] + depth[i] - position <= left)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_window_counts_the_depth_of_a_tree(left: int) -> None:
    assert_window_counts_depth(np.array([0, 1, 1, 2]), left)


def test_a_window_over_slots_of_a_tree_is_rejected() -> None:
    with pytest.raises(AssertionError):
        assert_window_counts_depth(np.arange(T), 1)


# Transformations and refusals.


def test_masks_are_pytrees() -> None:
    rules, _ = other_rules()
    mask = make_mask(SHAPE, **rules, is_causal=True, q_positions=np.arange(T))
    traced = jax.jit(lambda rules: make_mask(SHAPE, is_causal=True, **rules).full())
    assert np.array_equal(np.asarray(traced(rules | {"q_positions": np.arange(T)})), full(mask))
    several = jax.vmap(lambda p: make_mask((1, 1, T, S), is_causal=True, q_positions=p).full())(jnp.asarray(Q_ROWS))
    assert np.array_equal(
        np.asarray(several)[:, 0, 0], by_pairs(Q_ROWS, np.tile(np.arange(S), (B, 1)), True, None, None)
    )


@pytest.mark.parametrize("shape", [(1, 1, 0, 4), (1, 1, 4, 0), (1, 1, 0, 0), (0, 1, 2, 2)])
def test_empty_axes(shape: tuple[int, int, int, int]) -> None:
    b, _, t, s = shape
    rules = {"q_positions": np.zeros((b, t), int), "kv_positions": np.zeros((b, s), int), "mask": np.ones(shape, bool)}
    assert make_mask(shape, is_causal=True, **rules).full().shape == shape


WRONG = [
    ({"mask": np.ones((B, N, T, S))}, "`mask`: expected dtype bool"),
    ({"mask": np.ones((T, S), bool)}, "`mask`: expected rank 4"),
    ({"mask": np.ones((B, 2, T, S), bool)}, r"`mask`: expected rank 4, broadcastable to \[B, N, T, S\]"),
    ({"window": (1, 2, 3), "q_positions": np.arange(T)}, "`window`: expected"),
    ({"window": -1, "q_positions": np.arange(T)}, "`window`: expected"),
    ({"window": True, "q_positions": np.arange(T)}, "`window`: expected"),
    ({"is_causal": True, "q_positions": np.arange(T) * 1.0}, "`q_positions`: expected an integer dtype"),
    ({"is_causal": True, "q_positions": np.arange(S)}, "`q_positions`: expected shape"),
    ({"is_causal": True, "q_positions": Contiguous(np.arange(3))}, "`q_positions.start`: expected shape"),
    ({"kv_positions": np.arange(T)}, "`kv_positions`: expected shape"),
    ({"q_lengths": np.arange(3)}, "`q_lengths`: expected shape"),
    ({"kv_lengths": np.ones(B)}, "`kv_lengths`: expected an integer dtype"),
    ({"q_segment_ids": np.zeros((B, T), int)}, "both or neither"),
    ({"q_segment_ids": np.zeros((B, S), int), "kv_segment_ids": np.zeros((B, S), int)}, "`q_segment_ids`"),
    ({"kv_positions": np.arange(S) + 2**32}, "`kv_positions`: expected values that fit int32"),
    ({"q_positions": Contiguous(np.array([2**40]))}, "`q_positions.start`: expected values that fit int32"),
    ({"kv_lengths": np.full(B, 2**64 - 1, np.uint64)}, "`kv_lengths`: expected values that fit uint32"),
    # Wrapped, these two segments would be one.
    ({"q_segment_ids": np.zeros(T, int), "kv_segment_ids": np.full(S, 2**32)}, "`kv_segment_ids`: expected values"),
    ({"tree_mask": TREE}, "tree_mask with T = 4 and S = 6 is ambiguous"),
    ({"tree_mask": TREE, "q_positions": np.arange(T)}, "`q_positions`: expected `Contiguous`"),
    ({"tree_mask": TREE[:2], "q_positions": Contiguous(np.zeros(B, int))}, "`tree_mask`: expected shape"),
]


@pytest.mark.parametrize(("rules", "message"), WRONG)
def test_what_is_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mask(SHAPE, **rules)
