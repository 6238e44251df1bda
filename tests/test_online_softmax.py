"""Softmax statistics: the algebra of `merge`, the chapter's examples, empty sets, gradients, and a mesh axis."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

from flashspec.online_softmax import (
    SoftmaxStats,
    empty_stats,
    finalize,
    merge,
    merge_across,
    merge_axis,
    shifted_weights,
    stats_of,
)

ROWS, KEYS, VALUES = 3, 6, 2


def single(masses: Sequence[float], values: Sequence[float], dtype=np.float32) -> SoftmaxStats:
    """Statistics of one row whose keys have the given exponential masses."""
    return stats_of(jnp.log(jnp.asarray(masses, dtype)), jnp.asarray(values, dtype)[:, None])


def assert_stats(stats: SoftmaxStats, m: float, l: float, u: float, tolerance: float = 1e-6) -> None:
    got = [float(stats.m), float(stats.l), float(stats.u[0])]
    np.testing.assert_allclose(got, [m, l, u], rtol=tolerance)


def assert_output(output: float, expected: float) -> None:
    np.testing.assert_allclose(float(output), expected, rtol=1e-6)


def output_of(stats: SoftmaxStats) -> jax.Array:
    return finalize(stats)[0][..., 0]


def assert_same_bits(a: SoftmaxStats, b: SoftmaxStats) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def add_unscaled(a: SoftmaxStats, b: SoftmaxStats) -> SoftmaxStats:
    """A wrong merge: forgets e^(m_a - m)."""
    return SoftmaxStats(jnp.maximum(a.m, b.m), a.l + b.l, a.u + b.u, a.nonempty | b.nonempty)


def subtract_infinities(a: SoftmaxStats, b: SoftmaxStats) -> SoftmaxStats:
    """A wrong merge: right for non-empty sets, and evaluates -inf - -inf for two empty ones."""
    m = jnp.maximum(a.m, b.m)
    scale_a, scale_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    u = scale_a[..., None] * a.u + scale_b[..., None] * b.u
    return SoftmaxStats(m, scale_a * a.l + scale_b * b.l, u, a.nonempty | b.nonempty)


# Example 25.1 (as printed, section 33.2) and exercises 33.1 to 33.4.


def example_parts(dtype=np.float32) -> tuple[SoftmaxStats, SoftmaxStats]:
    return single([2, 1], [1, 4], dtype), single([6], [5], dtype)


def check_example(rule: Callable[[SoftmaxStats, SoftmaxStats], SoftmaxStats], dtype=np.float32) -> None:
    both = rule(*example_parts(dtype))
    assert_stats(both, math.log(6), 3 / 2, 6)
    assert_output(output_of(both), 4)


def test_example_25_1() -> None:
    a, b = example_parts()
    assert_stats(a, math.log(2), 3 / 2, 3)
    assert_stats(b, math.log(6), 1, 5)
    check_example(merge)


def test_example_25_1_in_float64(x64: None) -> None:
    a, b = example_parts(np.float64)
    both = merge(a, b)
    assert both.m.dtype == both.l.dtype == both.u.dtype == np.float64
    assert_stats(both, math.log(6), 3 / 2, 6, tolerance=1e-15)


def test_example_25_1_rejects_unscaled_sums() -> None:
    with pytest.raises(AssertionError):
        check_example(add_unscaled)


@pytest.mark.parametrize(("rule", "wrong"), [(sum, 7), (lambda outputs: sum(outputs) / 2, 7 / 2)])
def test_example_25_1_rejects_local_outputs_combined(rule: Callable, wrong: float) -> None:
    combined = rule([output_of(part) for part in example_parts()])
    assert_output(combined, wrong)
    with pytest.raises(AssertionError):
        assert_output(combined, 4)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_exercise_33_1_every_order_and_bracketing(order: tuple[int, ...]) -> None:
    parts = [single([mass], [value]) for mass, value in ((2, 1), (1, 4), (6, 5))]
    a, b, c = (parts[i] for i in order)
    for merged in (merge(merge(a, b), c), merge(a, merge(b, c))):
        assert_stats(merged, math.log(6), 3 / 2, 6)


def test_exercise_33_1_on_an_axis() -> None:
    parts = [single([mass], [value]) for mass, value in ((2, 1), (1, 4), (6, 5))]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *parts)
    assert_stats(merge_axis(stacked, 0), math.log(6), 3 / 2, 6)


def test_exercise_33_2_weights_blocks_by_mass() -> None:
    a, b = single([1], [0]), single([3], [4])
    assert_output(output_of(merge(a, b)), 3)
    with pytest.raises(AssertionError):
        assert_output((output_of(a) + output_of(b)) / 2, 3)


def hidden_block() -> SoftmaxStats:
    return stats_of(jnp.zeros(2), jnp.full((2, 1), jnp.nan), jnp.zeros(2, bool))


def test_exercise_33_3_a_hidden_block_is_skipped_and_a_hidden_row_is_defined() -> None:
    block = hidden_block()
    a, _ = example_parts()
    assert_same_bits(block, empty_stats((), 1))
    assert_same_bits(merge(a, block), a)
    row = merge(block, block)
    output, lse = finalize(row)
    assert (float(output[0]), float(lse), float(row.l)) == (0, -np.inf, 0)


def test_exercise_33_3_the_naive_rule_makes_a_nan_of_it() -> None:
    assert np.isnan(float(subtract_infinities(hidden_block(), hidden_block()).l))


def check_exercise_33_4(backward: Callable[[jax.Array], jax.Array]) -> None:
    np.testing.assert_allclose(np.asarray(backward(jnp.log(jnp.array([1.0, 2, 3])))), [0, -1, 1], atol=1e-6)


def test_exercise_33_4_softmax_backward() -> None:
    values = jnp.array([[1.0], [-2], [3]])  # with one value dimension the gradient of p is the values themselves
    check_exercise_33_4(jax.grad(lambda z: finalize(stats_of(z, values))[0][0]))
    assert_output(finalize(stats_of(jnp.log(jnp.array([1.0, 2, 3])), values))[0][0], 1)


def test_exercise_33_4_rejects_the_backward_without_its_mean() -> None:
    with pytest.raises(AssertionError):
        check_exercise_33_4(lambda z: jax.nn.softmax(z) * jnp.array([1.0, -2, 3]))


# The algebra.

scores = st.lists(st.floats(-30, 30, width=32), min_size=ROWS * KEYS, max_size=ROWS * KEYS)
masks = st.lists(st.booleans(), min_size=ROWS * KEYS, max_size=ROWS * KEYS)
cuts = st.tuples(st.integers(0, KEYS), st.integers(0, KEYS)).map(sorted)
VALUE_GRID = np.random.default_rng(0).normal(size=(ROWS, KEYS, VALUES)).astype(np.float32)


@jax.jit
def part(z: jax.Array, visible: jax.Array) -> SoftmaxStats:
    """Statistics of the visible keys; a part of the keys is what it leaves visible."""
    return stats_of(z, jnp.asarray(VALUE_GRID), visible)


jitted_merge = jax.jit(merge)


def dense(z: np.ndarray, visible: np.ndarray, values: np.ndarray = VALUE_GRID) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse in float64, row by row (eq. 33.2)."""
    output, lse = np.zeros((len(z), values.shape[-1])), np.full(len(z), -np.inf)
    for row, (zs, seen, vs) in enumerate(zip(z.astype(float), visible, values.astype(float), strict=True)):
        if seen.any():
            top = zs[seen].max()
            mass = np.exp(zs[seen] - top)
            output[row], lse[row] = mass @ vs[seen] / mass.sum(), top + np.log(mass.sum())
    return output, lse


def close(stats: SoftmaxStats, z: np.ndarray, visible: np.ndarray) -> None:
    output, lse = finalize(stats)
    want_output, want_lse = dense(z, visible)
    np.testing.assert_allclose(np.asarray(output), want_output, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=2e-5, atol=2e-5)


def parts_of(z: list[float], mask: list[bool], cut: list[int]) -> tuple[np.ndarray, np.ndarray, list[SoftmaxStats]]:
    zs = np.array(z, np.float32).reshape(ROWS, KEYS)
    visible = np.array(mask).reshape(ROWS, KEYS)
    index = np.arange(KEYS)
    spans = [(index < cut[0]), (index >= cut[0]) & (index < cut[1]), (index >= cut[1])]
    return zs, visible, [part(zs, visible & span) for span in spans]


@given(scores, masks, cuts)
def test_merge_is_associative_and_commutative_up_to_rounding(z, mask, cut) -> None:
    zs, visible, (a, b, c) = parts_of(z, mask, cut)
    for merged in (
        jitted_merge(jitted_merge(a, b), c),
        jitted_merge(a, jitted_merge(b, c)),
        jitted_merge(jitted_merge(c, a), b),
    ):
        close(merged, zs, visible)
        assert np.array_equal(np.asarray(merged.nonempty), visible.any(axis=1))


@given(scores, masks)
def test_merge_with_the_empty_set_keeps_every_bit(z, mask) -> None:
    _, _, (a, _, _) = parts_of(z, mask, [KEYS, KEYS])
    nothing = empty_stats((ROWS,), VALUES)
    assert_same_bits(jitted_merge(a, nothing), a)
    assert_same_bits(jitted_merge(nothing, a), a)


@given(scores, masks, cuts)
def test_merge_axis_equals_merges(z, mask, cut) -> None:
    zs, visible, parts = parts_of(z, mask, cut)
    for axis in (0, 1, -1):
        stacked = SoftmaxStats(
            *(
                jnp.stack([getattr(p, name) for p in parts], axis if axis >= 0 or name != "u" else axis - 1)
                for name in ("m", "l", "u", "nonempty")
            )
        )
        close(merge_axis(stacked, axis), zs, visible)


def test_the_algebra_rejects_wrong_merges() -> None:
    z = np.linspace(-3, 3, ROWS * KEYS, dtype=np.float32)
    zs, visible, (a, b, c) = parts_of(list(z), [True] * len(z), [2, 4])
    close(merge(merge(a, b), c), zs, visible)
    with pytest.raises(AssertionError):
        close(add_unscaled(add_unscaled(a, b), c), zs, visible)
    with pytest.raises(AssertionError):
        close(merge(a, b), zs, visible)  # a part forgotten
    with pytest.raises(AssertionError):
        close(merge(merge(merge(a, b), c), c), zs, visible)  # a part counted twice


def test_the_identity_keeps_minus_zero_and_rejects_plain_addition() -> None:
    a = single([1], [-0.0])
    assert_same_bits(merge(a, empty_stats((), 1)), a)
    with pytest.raises(AssertionError):
        assert_same_bits(subtract_infinities(a, empty_stats((), 1)), a)


def test_no_infinity_is_subtracted_from_another() -> None:
    nothing = empty_stats((2,), 1)
    with jax.debug_nans(True):
        merge(nothing, nothing)
        merge_axis(nothing, 0)
        finalize(nothing)
        stats_of(jnp.full((2, 3), -jnp.inf), jnp.zeros((2, 3, 1)))
        with pytest.raises(FloatingPointError):
            subtract_infinities(nothing, nothing)


def test_an_axis_of_no_parts_is_empty() -> None:
    assert_same_bits(merge_axis(empty_stats((0, 2), 3), 0), empty_stats((2,), 3))


def test_statistics_of_other_rows() -> None:
    with pytest.raises(ValueError, match="`b`: expected statistics of the same rows"):
        merge(empty_stats((2, 2), 3), empty_stats((1, 2), 3))


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_does_not_exist(axis: int) -> None:
    with pytest.raises(ValueError, match="`axis`: expected an axis of rows of rank 2"):
        merge_axis(empty_stats((2, 2), 3), axis)


def test_scores_far_apart_and_large() -> None:
    a, b = stats_of(jnp.array([-3e38]), jnp.ones((1, 1))), stats_of(jnp.array([3e38]), jnp.full((1, 1), 2.0))
    assert_output(output_of(merge(a, b)), 2)
    assert_output(output_of(a), 1)


def test_a_visible_nan_is_not_taken_for_an_empty_row() -> None:
    stats = stats_of(jnp.array([jnp.nan, 0.0]), jnp.ones((2, 1)))
    assert bool(stats.nonempty)
    assert np.isnan(np.asarray(finalize(stats)[0])).all()


def test_hidden_scores_and_values_are_not_read() -> None:
    z = jnp.array([0.0, jnp.nan, jnp.inf])
    stats = stats_of(z, jnp.array([[3.0], [jnp.nan], [jnp.inf]]), jnp.array([True, False, False]))
    assert_stats(stats, 0, 1, 3)
    m, weights, nonempty = shifted_weights(z, jnp.array([True, False, False]))
    assert np.asarray(weights).tolist() == [1, 0, 0]
    assert (float(m), bool(nonempty)) == (0, True)


# Sinks and empty rows.


def check_sinks(output: np.ndarray, lse: np.ndarray) -> None:
    mass = [float(Fraction(value)) for value in (9 + 3, 3)]  # keys and sink; the second row has the sink alone
    np.testing.assert_allclose(np.exp(lse), mass, rtol=1e-6)
    np.testing.assert_allclose(output[:, 0], [36 / 12, 0], rtol=1e-6)


def rows_with_sinks() -> tuple[SoftmaxStats, jax.Array]:
    a, b = example_parts()
    rows = jax.tree.map(lambda *xs: jnp.stack(xs), merge(a, b), empty_stats((), 1))
    return jax.tree.map(lambda x: x[None, None], rows), jnp.log(jnp.array([3.0, 3.0]))


def test_a_sink_is_a_key_without_value() -> None:
    stats, sinks = rows_with_sinks()
    output, lse = finalize(stats, sinks=sinks)
    check_sinks(np.asarray(output[0, 0]), np.asarray(lse[0, 0]))


def test_a_sink_added_to_each_part_is_rejected() -> None:
    stats, sinks = rows_with_sinks()
    sink = stats_of(sinks[None, None, :, None], jnp.zeros((1, 1, 2, 1, 1)))
    output, lse = finalize(merge(stats, sink), sinks=sinks)
    with pytest.raises(AssertionError):
        check_sinks(np.asarray(output[0, 0]), np.asarray(lse[0, 0]))


def test_a_sink_of_minus_infinity_is_none() -> None:
    stats, _ = rows_with_sinks()
    for x, y in zip(finalize(stats), finalize(stats, sinks=jnp.full(2, -jnp.inf)), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))


def test_sinks_of_another_size() -> None:
    with pytest.raises(ValueError, match="`sinks`: expected shape"):
        finalize(rows_with_sinks()[0], sinks=jnp.zeros(3))


def test_empty_rows_error_when_concrete() -> None:
    with pytest.raises(
        ValueError, match=r"`mask`: expected a visible key .* an empty row at \[B, T, N\] = \[0, 0, 1\]"
    ):
        finalize(rows_with_sinks()[0], empty_rows="error")


def test_empty_rows_error_when_traced() -> None:
    checked = checkify.checkify(jax.jit(functools.partial(finalize, empty_rows="error")))
    stats, _ = rows_with_sinks()
    error, _ = checked(stats)
    with pytest.raises(checkify.JaxRuntimeError, match="visible key"):
        error.throw()
    error, _ = checked(jax.tree.map(lambda x: x[:, :, :1], stats))
    error.throw()


def test_empty_rows_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="`empty_rows`: expected one of 'zero', 'error'"):
        finalize(rows_with_sinks()[0], empty_rows="nan")


def test_output_dtype() -> None:
    output, lse = finalize(rows_with_sinks()[0], dtype=jnp.bfloat16)
    assert (output.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


# Gradients.


def loss(stats: SoftmaxStats, sinks: jax.Array | None = None) -> jax.Array:
    """Uses output and lse, and keeps the infinities of empty rows out."""
    output, lse = finalize(stats, sinks=sinks)
    return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0) ** 2)


def merged_loss(z: jax.Array, values: jax.Array, visible: jax.Array, rule: Callable = merge) -> jax.Array:
    parts = [stats_of(z[:, s], values[:, s], visible[:, s]) for s in (slice(0, 2), slice(2, 3), slice(3, None))]
    return loss(functools.reduce(rule, parts))


def dense_gradients(z: np.ndarray, values: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of `merged_loss` in float64, by eq. 33.6 and 33.7 and d lse / d z = p."""
    output, lse = dense(z, visible, values)
    p = np.where(visible, np.exp(np.where(visible, z, -np.inf) - np.where(np.isinf(lse), 0, lse)[:, None]), 0)
    g_o, g_lse = np.cos(output), 2 * np.where(np.isinf(lse), 0, lse)
    g_p = np.einsum("rv,rkv->rk", g_o, values)
    g_z = p * (g_p - np.sum(p * g_p, axis=1, keepdims=True) + g_lse[:, None])
    return g_z, p[:, :, None] * g_o[:, None, :]


def check_gradients(rule: Callable, dtype, tolerance: float) -> None:
    rng = np.random.default_rng(1)
    z, values = rng.normal(size=(ROWS, KEYS)) * 3, rng.normal(size=(ROWS, KEYS, VALUES))
    visible = np.ones((ROWS, KEYS), bool)
    visible[0, :2], visible[1] = False, False  # an empty part and an empty row
    args = jnp.asarray(z, dtype), jnp.asarray(values, dtype), jnp.asarray(visible)
    got = jax.grad(lambda *a: merged_loss(*a, rule), argnums=(0, 1))(*args)
    for x, want in zip(got, dense_gradients(z, values, visible), strict=True):
        np.testing.assert_allclose(np.asarray(x), want, rtol=tolerance, atol=tolerance)
    assert not np.asarray(got[0])[1].any()


def test_gradients_through_merges() -> None:
    check_gradients(merge, np.float32, 2e-5)


def test_gradients_through_merges_in_float64(x64: None) -> None:
    check_gradients(merge, np.float64, 1e-12)


def detached(a: SoftmaxStats, b: SoftmaxStats) -> SoftmaxStats:
    """A wrong merge: no gradient reaches the second part."""
    return merge(a, jax.lax.stop_gradient(b))


@pytest.mark.parametrize("wrong", [add_unscaled, detached])
def test_gradients_reject_wrong_merges(wrong: Callable) -> None:
    with pytest.raises(AssertionError):
        check_gradients(wrong, np.float32, 2e-5)


def test_the_gradient_through_m_is_zero() -> None:
    a, b = example_parts()
    through_m = jax.grad(lambda m: loss(merge(SoftmaxStats(m, a.l, a.u, a.nonempty), b)))
    assert float(through_m(a.m)) == 0


def test_sinks_have_gradients() -> None:
    stats, sinks = rows_with_sinks()
    gradient = np.asarray(jax.grad(lambda s: jnp.sum(finalize(stats, sinks=s)[1]))(sinks))
    np.testing.assert_allclose(gradient, [3 / 12, 1], rtol=1e-6)  # d lse / d sink is the sink's share of the mass


def test_gradients_of_merge_axis_equal_those_of_merges() -> None:
    rng = np.random.default_rng(2)
    z = jnp.asarray(rng.normal(size=(ROWS, KEYS)), np.float32)
    values = jnp.asarray(VALUE_GRID)

    def folded(z: jax.Array) -> jax.Array:
        return loss(merge_axis(stats_of(z.reshape(ROWS, 3, 2), values.reshape(ROWS, 3, 2, VALUES)), 1))

    want = jax.grad(lambda z: loss(stats_of(z, values)))(z)
    np.testing.assert_allclose(np.asarray(jax.grad(folded)(z)), np.asarray(want), rtol=2e-5, atol=2e-6)


# A mesh axis.

MESH_SIZE = 4


def sharded_loss(rule: Callable[[SoftmaxStats], SoftmaxStats]) -> Callable:
    mesh = jax.make_mesh((MESH_SIZE,), ("keys",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "keys"),) * 3, out_specs=P())
    def merged(z: jax.Array, values: jax.Array, visible: jax.Array) -> SoftmaxStats:
        return rule(stats_of(z, values, visible))

    return jax.jit(lambda *args: loss(merged(*args)))


def mesh_operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(3)
    z, values = rng.normal(size=(ROWS, 8)), rng.normal(size=(ROWS, 8, VALUES))
    visible = np.ones((ROWS, 8), bool)
    visible[0, :4], visible[1] = False, False  # two shards see nothing of row 0; no shard sees anything of row 1
    return jnp.asarray(z, np.float32), jnp.asarray(values, np.float32), jnp.asarray(visible)


def check_across(rule: Callable[[SoftmaxStats], SoftmaxStats]) -> None:
    args = mesh_operands()
    got = jax.value_and_grad(sharded_loss(rule), argnums=(0, 1))(*args)
    want = jax.value_and_grad(lambda *a: loss(stats_of(*a)), argnums=(0, 1))(*args)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-5)


def test_merge_across_a_mesh_axis() -> None:
    check_across(lambda stats: merge_across(stats, "keys"))


def unscaled_across(stats: SoftmaxStats) -> SoftmaxStats:
    total = [jax.lax.psum(x, "keys") for x in (stats.l, stats.u, stats.nonempty.astype(jnp.int32))]
    m = jax.lax.pmax(jax.lax.stop_gradient(stats.m), "keys")
    return SoftmaxStats(m, total[0], total[1], total[2] > 0)


def test_merge_across_rejects_an_unscaled_sum() -> None:
    with pytest.raises(AssertionError):
        check_across(unscaled_across)


def test_merge_across_a_vmap_axis() -> None:
    z, values, visible = mesh_operands()
    split = [jnp.moveaxis(x.reshape(ROWS, MESH_SIZE, 2, *x.shape[2:]), 1, 0) for x in (z, values, visible)]
    merged = jax.vmap(lambda *a: merge_across(stats_of(*a), "parts"), axis_name="parts")(*split)
    output, lse = dense(np.asarray(z), np.asarray(visible), np.asarray(values))
    for shard in range(MESH_SIZE):
        got = finalize(jax.tree.map(lambda x, i=shard: x[i], merged))
        np.testing.assert_allclose(np.asarray(got[0]), output, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(np.asarray(got[1]), lse, rtol=2e-5, atol=2e-6)
