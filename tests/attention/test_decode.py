"""Attention over cache views: every view against a loop in float64, and decoding step by step against verification."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flashspec.attention.decode import cached_attention, decode_attention
from flashspec.attention.views import DenseView, PagedView, WindowView, gather
from tests.attention.dense_twin import attend

B, T, S, N, K, H, HV, PAGE = 3, 4, 24, 4, 2, 8, 6, 4
LENGTHS = np.array([19, 4, 24], np.int32)
LEFT = 9
# New tokens 0 - 1 - 3 and 0 - 2: two alternatives after the first.
PARENTS = (None, 0, 0, 1)
VIEWS = ("dense", "window", "paged")


def ancestry(parents):
    tree = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent is not None:
            tree[i] |= tree[parent]
    return tree


def history(dtype=np.float32, seed=0):
    """Queries of the newest tokens, and the keys and values of every logical position."""
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, HV)))


def make_view(kind, k, v, lengths=LENGTHS, garbage=0.0, order=0):
    """A view of positions below `lengths`; all that it does not hold is `garbage`."""
    live = (np.arange(S)[None, :] < lengths[:, None])[:, :, None, None]
    k, v = np.where(live, k, garbage).astype(k.dtype), np.where(live, v, garbage).astype(v.dtype)
    length = jnp.asarray(lengths)
    if kind == "dense":
        return DenseView(jnp.asarray(k), jnp.asarray(v), length)
    if kind == "window":
        return WindowView(*map(jnp.asarray, ring(k, v, lengths, garbage)), length)
    rng = np.random.default_rng(order)
    count = S // PAGE
    table = rng.permutation(B * count + 2)[: B * count].reshape(B, count)
    pools = [np.full((B * count + 2, PAGE, *x.shape[2:]), garbage, x.dtype) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[table] = x.reshape(B, count, PAGE, *x.shape[2:])
    used = np.arange(count)[None, :] * PAGE < lengths[:, None]
    table = np.where(used, table, rng.choice([-7, 0, 10**6], size=table.shape))
    return PagedView(*map(jnp.asarray, pools), jnp.asarray(table.astype(np.int32)), length)


def ring(k, v, lengths, garbage):
    """Position p in slot p mod (LEFT + T + 1); slots that hold nothing live say -1."""
    slots = LEFT + T + 1
    rings = [np.full((B, slots, *x.shape[2:]), garbage, x.dtype) for x in (k, v)]
    positions = np.full((B, slots), -1, np.int32)
    for b in range(B):
        for p in range(lengths[b]):
            rings[0][b, p % slots], rings[1][b, p % slots], positions[b, p % slots] = k[b, p], v[b, p], p
    return *rings, positions


def visible_pairs(lengths=LENGTHS, real=None, left=None, queries=T):
    """bool [B, 1, queries, S] by logical position."""
    real = np.full(B, queries) if real is None else real
    at = (lengths - real)[:, None] + np.arange(queries)
    keys = np.arange(S)
    seen = (keys <= at[:, :, None]) & (np.arange(queries) < real[:, None])[:, :, None]
    return (seen if left is None else seen & (keys >= at[:, :, None] - left))[:, None]


def options_of(kind, **options):
    return options | ({"window": LEFT} if kind == "window" else {})


def check(got, want, tolerance=2e-6):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
@pytest.mark.parametrize("kind", VIEWS)
def test_every_view_against_loops_in_numpy(kind, implementation):
    q, k, v = history()
    sinks, real = np.linspace(-1, 1, N), np.array([4, 2, 0])
    left = LEFT if kind == "window" else None
    decode = functools.partial(decode_attention, jnp.asarray(q), make_view(kind, k, v, garbage=np.nan), return_lse=True)
    options = options_of(kind, implementation=implementation)
    plain = attend(q, k, v, visible_pairs(left=left))
    check(decode(**options), plain)
    shaped = {"sinks": jnp.asarray(sinks), "logits_soft_cap": 2.0, "scale": 0.5, "q_lengths": jnp.asarray(real)}
    want = attend(q, k, v, visible_pairs(real=real, left=left), scale=0.5, cap=2.0, sinks=sinks)
    check(decode(**options, **shaped), want)
    top_left = np.broadcast_to(np.arange(S) <= np.arange(T)[:, None], (B, 1, T, S))
    for wrong in (top_left, visible_pairs(LENGTHS - 1, left=left), visible_pairs(left=LEFT - 1)):
        with pytest.raises(AssertionError):  # wrong variants: aligned by index; off by one; a narrower window
            check(decode(**options)[:1], attend(q, k, v, wrong)[:1], 1e-3)


@pytest.mark.parametrize("kind", VIEWS)
def test_one_query_at_the_latest_position_sees_every_key(kind):
    """Section 33.3; by array index it would see the first key, and return the finite v_0."""
    q, k, v = history()
    output = decode_attention(jnp.asarray(q[:, :1]), make_view(kind, k, v), **options_of(kind))
    left = LEFT if kind == "window" else None
    want = attend(q[:, :1], k, v, visible_pairs(queries=1, left=left))[0]
    check([output], [want])
    with pytest.raises(AssertionError):
        check([output], [np.repeat(v[:, :1], N // K, axis=2)], 1e-3)


@pytest.mark.parametrize("kind", VIEWS)
def test_verification_equals_decoding_step_by_step(kind):
    q, k, v = history()
    options = options_of(kind, sinks=jnp.linspace(0, 1, N))
    together = decode_attention(jnp.asarray(q), make_view(kind, k, v), **options)

    def step(i, shift=0):
        lengths = LENGTHS - (T - 1 - i) - shift
        return decode_attention(jnp.asarray(q[:, i : i + 1]), make_view(kind, k, v, lengths), **options)[:, 0]

    for i in range(T):
        check([step(i)], [np.asarray(together[:, i])])
        with pytest.raises(AssertionError):
            check([step(i, shift=1)], [np.asarray(together[:, i])], 1e-3)


@pytest.mark.parametrize("left", [None, LEFT, 1])
@pytest.mark.parametrize("kind", VIEWS)
def test_a_path_of_a_tree_equals_linear_decoding_of_it(kind, left):
    q, k, v = history()
    tree = ancestry(PARENTS)
    window = min(LEFT, left or LEFT) if kind == "window" else left
    rows = slice(0, 1) if kind == "window" else slice(None)
    output = decode_attention(jnp.asarray(q), make_view(kind, k, v), tree_mask=jnp.asarray(tree), window=window)
    for leaf in (2, 3):
        path = np.flatnonzero(tree[leaf])
        linear_k, linear_v = k.copy(), v.copy()
        for b in range(B):
            start = LENGTHS[b] - T
            linear_k[b, start : start + len(path)] = k[b, start + path]
            linear_v[b, start : start + len(path)] = v[b, start + path]
        lengths = LENGTHS - T + len(path)
        linear = decode_attention(
            jnp.asarray(q[:, path]), make_view("dense", linear_k, linear_v, lengths), window=window
        )
        check([output[rows][:, path]], [np.asarray(linear)[rows]])
    causal = decode_attention(jnp.asarray(q), make_view(kind, k, v), window=window)
    with pytest.raises(AssertionError):  # wrong variant: alternatives see each other
        check([output], [np.asarray(causal)], 1e-3)


def test_trees_by_row():
    q, k, v = history()
    trees = np.stack([ancestry(PARENTS), np.tril(np.ones((T, T), bool)), np.eye(T, dtype=bool)])
    together = decode_attention(jnp.asarray(q), make_view("dense", k, v), tree_mask=jnp.asarray(trees))
    for b in range(B):
        alone = decode_attention(jnp.asarray(q), make_view("dense", k, v), tree_mask=jnp.asarray(trees[b]))
        np.testing.assert_array_equal(np.asarray(together[b]), np.asarray(alone[b]))


@pytest.mark.parametrize("kind", VIEWS)
def test_what_a_view_does_not_hold_changes_no_bit(kind):
    q, k, v = history()
    real = jnp.array([4, 3, 1])
    decode = functools.partial(decode_attention, jnp.asarray(q), q_lengths=real, **options_of(kind))
    views = [make_view(kind, k, v, garbage=x) for x in (0.0, np.nan, np.inf)]
    outputs = [np.asarray(decode(view)) for view in views]
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])

    def slope(view):
        return jax.grad(lambda x: jnp.sum(decode_attention(x, view, q_lengths=real, **options_of(kind))))(
            jnp.asarray(q)
        )

    np.testing.assert_array_equal(*(np.asarray(slope(view)) for view in views[:2]))
    key, value, positions, valid = gather(views[1])
    assert np.isnan(np.asarray(key)).any()
    assert np.asarray(valid).sum() == (np.minimum(LENGTHS, LEFT + T + 1) if kind == "window" else LENGTHS).sum()
    assert (positions is None) == (kind != "window")
    naive = jnp.einsum("bs,bskh->bkh", valid.astype(value.dtype), value)  # wrong variant: weights of 0 beside NaN
    assert np.isnan(np.asarray(naive)).any()


@pytest.mark.parametrize("kind", VIEWS)
def test_rows_do_not_know_their_neighbours(kind):
    q, k, v = history()
    options = options_of(kind)
    together = np.asarray(decode_attention(jnp.asarray(q), make_view(kind, k, v), **options))
    order = np.array([2, 0, 1])
    moved = make_view(kind, k[order], v[order], LENGTHS[order], order=1)
    np.testing.assert_array_equal(
        np.asarray(decode_attention(jnp.asarray(q[order]), moved, **options)), together[order]
    )
    other = k.copy()
    other[1:] = np.nan
    disturbed = np.asarray(decode_attention(jnp.asarray(q), make_view(kind, other, v), **options))
    np.testing.assert_array_equal(disturbed[0], together[0])
    assert not np.array_equal(disturbed[1], together[1])


@pytest.mark.parametrize("kind", VIEWS)
def test_rows_without_keys_are_zero(kind):
    q, k, v = history()
    lengths = np.array([0, 4, 0], np.int32)
    view = make_view(kind, k, v, lengths, garbage=np.nan)
    output, lse = decode_attention(jnp.asarray(q), view, return_lse=True, **options_of(kind))
    assert not np.asarray(output)[[0, 2]].any()
    assert (np.asarray(lse)[[0, 2]] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[1]).all()
    _, with_sink = decode_attention(
        jnp.asarray(q), view, sinks=jnp.arange(N, dtype=jnp.float32), return_lse=True, **options_of(kind)
    )
    np.testing.assert_array_equal(np.asarray(with_sink)[0], np.broadcast_to(np.arange(N), (T, N)))


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("kind", VIEWS)
def test_splits_change_nothing_but_rounding(kind, splits):
    q, k, v = history()
    options = options_of(kind, return_lse=True, sinks=jnp.ones(N))
    view = make_view(kind, k, v)
    whole = decode_attention(jnp.asarray(q), view, implementation="reference", **options)
    check(decode_attention(jnp.asarray(q), view, num_splits=splits, **options), [np.asarray(x) for x in whole])


def test_local_outputs_are_not_averaged():
    """Wrong variant of merging two splits (example 25.1, as printed, section 33.2): the mean of the parts' outputs."""
    q, k, v = history()
    whole = attend(q, k, v, visible_pairs())[0]
    halves = [visible_pairs() & keys for keys in (np.arange(S) < 12, np.arange(S) >= 12)]
    with pytest.raises(AssertionError):
        check([np.mean([attend(q, k, v, half)[0] for half in halves], axis=0)], [whole], 1e-3)


@pytest.mark.parametrize("kind", VIEWS)
def test_cached_attention_takes_any_number_of_tokens(kind):
    _, k, v = history()
    lengths = np.array([24, 18, 24], np.int32)
    q = np.random.default_rng(8).normal(size=(B, 18, N, H)).astype(np.float32)
    left = 3 if kind == "window" else None
    real = np.array([18, 5, 17])
    view = make_view("dense" if kind == "window" else kind, k, v, lengths, garbage=np.nan)
    if kind == "window":  # a ring that is wide enough for all of them
        slots = np.arange(S, dtype=np.int32)
        view = WindowView(view.key, view.value, jnp.asarray(np.where(slots < lengths[:, None], slots, -1)), view.length)
    output = cached_attention(jnp.asarray(q), view, q_lengths=jnp.asarray(real), window=left)
    want = attend(q, k, v, visible_pairs(lengths, real, left, queries=18))[0]
    check([output], [want])
    few = cached_attention(jnp.asarray(q[:, :T]), view, window=left)
    check([few], [np.asarray(decode_attention(jnp.asarray(q[:, :T]), view, window=left))], 0)
    with pytest.raises(AssertionError):  # wrong variant: the padding counts as real
        check([output], [attend(q, k, v, visible_pairs(lengths, None, left, queries=18))[0]], 1e-3)


def test_narrow_and_wide_dtypes(x64):
    q, k, v = history(np.float64)
    want = attend(q, k, v, visible_pairs())
    for dtype, tolerance in (("bfloat16", 3e-2), ("float16", 3e-3), ("float32", 2e-6), ("float64", 1e-14)):
        view = make_view("dense", k, v)
        view = DenseView(view.key.astype(dtype), view.value.astype(dtype), view.length)
        output, lse = decode_attention(jnp.asarray(q, dtype), view, return_lse=True)
        assert (output.dtype, lse.dtype) == (np.dtype(dtype), np.float64 if dtype == "float64" else np.float32)
        check([output], want[:1], tolerance)


def test_the_cache_is_not_widened_or_read_twice():
    """One program: two products over the cache as it lies, whatever else is fused around them."""
    q, k, v = history()
    view = make_view("dense", k, v)
    lowered = jax.jit(lambda q, view: cached_attention(q, view)).lower(jnp.asarray(q), view)
    assert lowered.as_text().count("dot_general") == 2
    split = jax.jit(lambda q, view: decode_attention(q, view, num_splits=3)).lower(jnp.asarray(q), view)
    assert split.as_text().count("dot_general") == 6


def test_vmap_and_length_beyond_capacity():
    q, k, v = history()
    view = make_view("dense", k, v)
    rows = jax.vmap(lambda q, view: decode_attention(q[None], jax.tree.map(lambda x: x[None], view))[0])
    check([rows(jnp.asarray(q), view)], [np.asarray(decode_attention(jnp.asarray(q), view))])
    overflown = DenseView(jnp.asarray(k), jnp.asarray(v), jnp.full(B, S + 2, jnp.int32))
    visible = visible_pairs(np.full(B, S + 2))
    check([decode_attention(jnp.asarray(q), overflown)], [attend(q, k, v, visible)[0]])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": jnp.zeros((B, 17, N, H))}, "`query`: expected 1 to 16 new tokens"),
        ({"query": jnp.zeros((B, 0, N, H))}, "`query`: expected 1 to 16 new tokens"),
        ({"query": jnp.zeros((B, T, H))}, "`query`: expected rank 4"),
        ({"query": jnp.zeros((B, T, 3, H))}, "`query`: expected a number of heads"),
        ({"q_lengths": jnp.zeros(2, jnp.int32)}, "`q_lengths`: expected shape"),
        ({"q_lengths": jnp.zeros(B)}, "`q_lengths`: expected an integer dtype"),
        ({"tree_mask": jnp.ones((T, T))}, "`tree_mask`: expected dtype bool"),
        ({"tree_mask": jnp.ones((2, 2), bool)}, "`tree_mask`: expected shape"),
        ({"window": -1}, "`window`"),
        ({"implementation": ()}, "`implementation`: expected a name"),
        ({"num_splits": 0}, "`num_splits`: expected an integer of at least 1"),
        ({"implementation": "numpy"}, "`implementation`: expected one of"),
    ],
)
def test_wrong_arguments(changed, message):
    q, k, v = history()
    arguments = {"query": jnp.asarray(q), "view": make_view("dense", k, v)} | changed
    with pytest.raises(ValueError, match=message):
        decode_attention(**arguments)


@pytest.mark.parametrize(
    ("kind", "field", "change", "message"),
    [
        ("dense", "value", lambda x: x[:, 1:], r"expected shape \[B, S, K, Hv\] with S = 24"),
        ("dense", "key", lambda x: x[0], "expected rank 4"),
        ("dense", "length", lambda x: x[:1], r"expected shape \[B\] with B = 3"),
        ("window", "positions", lambda x: x[:, 1:], r"expected shape \[B, S\] with S = 14"),
        ("window", "positions", lambda x: x * 1.0, "expected an integer dtype"),
        ("paged", "value_pages", lambda x: x[1:], r"expected shape \[pages, page, K, Hv\] with pages = 20"),
        ("paged", "page_table", lambda x: x[0], "expected rank 2"),
        ("paged", "page_table", lambda x: x * 1.0, "expected an integer dtype"),
    ],
)
def test_views_that_do_not_fit(kind, field, change, message):
    q, k, v = history()
    view = make_view(kind, k, v)
    view = dataclasses.replace(view, **{field: change(np.asarray(getattr(view, field)))})
    with pytest.raises(ValueError, match=f"`view.{field}`: {message}"):
        decode_attention(jnp.asarray(q), view)


@pytest.mark.parametrize("kind", VIEWS)
def test_lengths_past_the_queries_count_all_of_them(kind):
    q, k, v = history()
    real = np.array([2**31 - 1, T, T + 1])
    options = options_of(kind)
    left = options.get("window")
    got = decode_attention(jnp.asarray(q), make_view(kind, k, v), q_lengths=real, **options)
    check([got], attend(q, k, v, visible_pairs(left=left))[:1])
    with pytest.raises(AssertionError):
        check([got], attend(q, k, v, visible_pairs(LENGTHS - 1, left=left))[:1])


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_lengths_of_any_integer_dtype(kind, dtype):
    q, k, v = history()
    lengths = np.array([19, 2, 24], np.int32)  # an unsigned 2 - T would not be negative
    view = make_view(kind, k, v, lengths)
    got = decode_attention(jnp.asarray(q), dataclasses.replace(view, length=view.length.astype(dtype)))
    np.testing.assert_array_equal(got, decode_attention(jnp.asarray(q), view))


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
def test_batch_and_heads_may_be_split(kind, axis_type):
    mesh = jax.make_mesh((3, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    q, k, v = history()
    view = make_view(kind, k, v)
    rows = {"key_pages": None, "value_pages": None}
    split = {
        field.name: put(x, rows.get(field.name, "x"), *([None, "y"] if x.ndim == 4 else []))
        for field in dataclasses.fields(view)
        for x in [getattr(view, field.name)]
    }
    got = decode_attention(put(q, "x", None, "y"), type(view)(**split))
    assert not got.is_fully_replicated
    check([got], [np.asarray(decode_attention(jnp.asarray(q), view))])


@pytest.mark.parametrize(("kind", "field", "axis"), [("dense", "key", 1), ("paged", "key_pages", 0)])
def test_other_axes_are_refused(kind, field, axis):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v = history()
    view = make_view(kind, k, v)
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, "x"))
    view = dataclasses.replace(view, **{field: jax.device_put(getattr(view, field), sharding)})
    with pytest.raises(NotImplementedError, match=f"{field} axis {axis} is split over devices"):
        decode_attention(jnp.asarray(q), view)


def test_kernels_that_cannot_decode_say_why():
    q, k, v = history()
    decode = functools.partial(decode_attention, jnp.asarray(q), make_view("dense", k, v))
    for name in ("hopper", "ampere", "tpu", "cudnn"):
        with pytest.raises(NotImplementedError, match=f"{name}: "):
            decode(implementation=name)
    np.testing.assert_array_equal(*map(np.asarray, (decode(implementation=("hopper", "blockwise")), decode())))
