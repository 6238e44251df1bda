"""Algorithm 33.1 and its backward against dense float64 twins, tile sizes that divide nothing, and planted bugs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from flashspec.attention.blockwise import Blocks, _starts, blockwise_attention, blockwise_stats
from flashspec.attention.reference import reference_attention
from flashspec.attention.request import make_request
from flashspec.masks import make_mask
from flashspec.online_softmax import finalize, merge
from tests.attention.dense_twin import attend

B, T, S, N, K, H, HV = 2, 13, 21, 4, 2, 8, 6
RAGGED = Blocks(4, 8)
# Most of the time goes to compilers; what is asserted exactly, or about NaN, is compiled as users compile it.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
POSITIONS = np.arange(T) + S - T


def operands(dtype=np.float64, heads=N, keys=S):
    rng = np.random.default_rng(0)
    shapes = ((B, T, heads, H), (B, keys, K, H), (B, keys, K, HV))
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def array(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape)


def bias_of(*shape, hide=False):
    bias = array(*shape, seed=2)
    if hide:
        bias[..., 3::4] = -np.inf
    return bias


def run(implementation, q, k, v, bias=None, sinks=None, **options):
    """(output, lse) of an implementation; the options are those of `dot_product_attention`."""
    return implementation(*make_request(q, k, v, bias, sinks=sinks, **options))


ragged = functools.partial(blockwise_attention, blocks=RAGGED)


def weigh(output, lse):
    """A scalar that weighs every output and every finite lse differently."""
    weights = [jnp.asarray(array(*x.shape), x.dtype) for x in (output, lse)]
    return jnp.sum(weights[0] * output) + jnp.sum(weights[1] * jnp.where(jnp.isfinite(lse), lse, 0)).astype(
        output.dtype
    )


def evaluate(implementation, options, inputs, jit=quick):
    """[output, lse, *gradients of all inputs], as one compiled program; inputs are (q, k, v[, bias[, sinks]])."""

    def loss(*inputs):
        results = run(implementation, *inputs, **options)
        return weigh(*results), results

    wanted = [i for i, x in enumerate(inputs) if x is not None]
    program = jit(jax.value_and_grad(loss, wanted, has_aux=True))

    def results(*inputs):
        (_, outputs), slopes = program(*inputs)
        return [np.asarray(x) for x in (*outputs, *slopes)]

    return results


def compare(got, want, **tolerance):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), **tolerance)


EXPLICIT = np.random.default_rng(3).random((B, N, T, S)) < 0.6
CASES = {
    "plain": {},
    "causal": {"is_causal": True, "q_positions": POSITIONS},
    "window": {"window": (5, 2), "q_positions": POSITIONS},
    "lengths": {"q_lengths": np.array([13, 5]), "kv_lengths": np.array([21, 0])},
    "segments": {"q_segment_ids": np.arange(T) // 4, "kv_segment_ids": np.arange(S) // 6},
    "explicit": {"mask": EXPLICIT},
    "full bias": {"bias": bias_of(B, N, T, S)},
    "bias over keys": {"bias": bias_of(1, N, 1, S, hide=True)},
    "bias over queries": {"bias": bias_of(B, 1, T, 1)},
    "soft cap": {"logits_soft_cap": 1.5, "bias": bias_of(1, 1, T, S, hide=True), "scale": 0.7},
    "sinks": {"sinks": array(N, seed=4), "kv_lengths": np.array([21, 0])},
    "everything": {
        "is_causal": True,
        "q_positions": POSITIONS,
        "window": (9, None),
        "kv_lengths": np.array([20, 7]),
        "q_lengths": np.array([12, 13]),
        "mask": EXPLICIT[:1],
        "bias": bias_of(B, 1, T, S),
        "logits_soft_cap": 2.0,
        "sinks": array(N, seed=4),
        "dropout_rate": 0.3,
        "dropout_key": 5,
        "dropout_broadcast": ("head",),
    },
}


def split_case(case):
    options = {name: (jnp.asarray(x) if isinstance(x, np.ndarray) else x) for name, x in CASES[case].items()}
    if "dropout_key" in options:
        options["dropout_key"] = jax.random.key(options["dropout_key"])
    return options.pop("bias", None), options.pop("sinks", None), options


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_dense_float64(case, x64):
    bias, sinks, options = split_case(case)
    inputs = (*operands(), bias, sinks)
    ours, dense = (evaluate(f, options, inputs)(*inputs) for f in (ragged, reference_attention))
    assert [x.shape for x in ours] == [x.shape for x in dense]
    compare(ours, dense, rtol=1e-10, atol=1e-12)


WRONG_VARIANTS = {
    "top-left alignment": {"q_positions": np.arange(T)},
    "window off by one": {"window": (T - 2, None)},
    "one key dropped": {"kv_lengths": np.array([S - 1, S - 1])},
    "scale missing": {"scale": 1.0},
    "scale doubled": {"scale": 1 / H},
    "head n reads group n mod K": {},
}


@pytest.mark.parametrize("wrong", [None, *WRONG_VARIANTS])
def test_against_loops_in_numpy(wrong, x64):
    q, k, v = operands()
    bias, sinks = bias_of(1, N, 1, S), array(N)
    want = attend(q, k, v, np.arange(S)[None, :] <= POSITIONS[:, None], bias=bias, cap=2.0, sinks=sinks)
    options = {"is_causal": True, "q_positions": POSITIONS, "logits_soft_cap": 2.0} | WRONG_VARIANTS.get(wrong, {})
    if wrong == "head n reads group n mod K":
        q = q[:, :, np.arange(N).reshape(N // K, K).T.ravel()]
    got = quick(functools.partial(run, ragged, **options))(q, k, v, jnp.asarray(bias), jnp.asarray(sinks))
    if wrong is None:
        compare(got, want, rtol=1e-12, atol=1e-13)
    else:
        with pytest.raises(AssertionError):
            compare(got[:1], want[:1], rtol=1e-2, atol=1e-2)


def fresh_dropout_in_backward(f, other):
    """Wrong variant: the backward draws another mask than the forward."""
    mixed = jax.custom_vjp(f)
    mixed.defvjp(lambda *x: (f(*x), x), lambda x, g: jax.vjp(other, *x)[1](g))
    return mixed


def test_gradients_against_finite_differences(x64):
    _, _, options = split_case("everything")
    inputs = (*operands(), jnp.asarray(bias_of(B, 1, T, S)), jnp.asarray(array(N)))
    along = [jnp.asarray(array(*x.shape, seed=20 + i)) for i, x in enumerate(inputs)]

    def loss(seed, *inputs):
        return weigh(*run(ragged, *inputs, **options | {"dropout_key": jax.random.key(seed)}))

    def slope(f):
        return sum(jnp.vdot(g, d) for g, d in zip(jax.grad(f, range(5))(*inputs), along, strict=True))

    drawn, other = (functools.partial(loss, seed) for seed in (5, 77))
    right, wrong = quick(lambda: (slope(drawn), slope(fresh_dropout_in_backward(drawn, other))))()
    moved = quick(lambda step: drawn(*(x + step * d for x, d in zip(inputs, along, strict=True))))
    numeric = float(moved(1e-6) - moved(-1e-6)) / 2e-6
    assert float(right) == pytest.approx(numeric, rel=1e-7)
    assert float(wrong) != pytest.approx(numeric, rel=1e-2)


def test_exercise_33_4(x64):
    """p = (1/6, 1/3, 1/2) and g = (1, -2, 3) give g_s = (0, -1, 1), which sums to 0."""
    bias = jnp.log(jnp.array([1.0, 2.0, 3.0])).reshape(1, 1, 1, 3)
    q, k, v = jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 3, 1, 2)), jnp.array([1.0, -2.0, 3.0]).reshape(1, 3, 1, 1)
    ones = functools.partial(blockwise_attention, blocks=Blocks(1, 2))
    slope = jax.grad(lambda bias: jnp.sum(run(ones, q, k, v, bias)[0]))(bias)
    np.testing.assert_allclose(np.asarray(slope).ravel(), [0, -1, 1], atol=1e-15)
    weights = np.array([1, 2, 3]) / 6
    with pytest.raises(AssertionError):  # wrong rule: the mean of g under p is not subtracted
        np.testing.assert_allclose(weights * np.array([1, -2, 3]), [0, -1, 1], atol=1e-15)
    to_lse = jax.grad(lambda bias: jnp.sum(run(ones, q, k, v, bias)[1]))(bias)
    np.testing.assert_allclose(np.asarray(to_lse).ravel(), weights, rtol=1e-14)


@pytest.mark.parametrize("blocks", [Blocks(5, 3), Blocks(13, 21), Blocks(64, 20)])
def test_tile_sizes_change_nothing_but_rounding(blocks):
    _, _, options = split_case("everything")
    inputs = [jnp.asarray(x, np.float32) for x in (*operands(np.float32), bias_of(B, 1, T, S), array(N))]
    tiled = functools.partial(blockwise_attention, blocks=blocks)
    whole, parts = (quick(functools.partial(run, f, **options))(*inputs) for f in (reference_attention, tiled))
    compare(parts, whole, rtol=2e-5, atol=2e-6)


def test_disjoint_parts_merge_and_differentiate(x64):
    def in_parts(request, operands):
        q, k, v = operands.query, operands.key, operands.value
        parts = [blockwise_stats(*make_request(q, k[:, s], v[:, s]), RAGGED) for s in (slice(0, 9), slice(9, S))]
        return finalize(merge(*parts))

    inputs = operands()
    compare(*(evaluate(f, {}, inputs)(*inputs) for f in (in_parts, reference_attention)), rtol=1e-9, atol=1e-12)


def poisoned(q, k, v, bad):
    """Everything that no visible pair of the case "hidden" touches, replaced."""
    q = q.at[1, 7:].set(bad)
    return q, k.at[0, 17:].set(bad).at[1, 4:].set(bad), v.at[0, 17:].set(bad).at[1, 4:].set(bad)


def test_what_is_hidden_touches_nothing():
    options = {"kv_lengths": np.array([17, 4]), "q_lengths": np.array([13, 7]), "logits_soft_cap": 3.0}
    clean = operands(np.float32)
    program = evaluate(ragged, options, clean, jit=jax.jit)
    for bad in (np.nan, np.inf):
        dirty = program(*poisoned(*clean, bad))
        for got, want in zip(dirty, program(*clean), strict=True):
            np.testing.assert_array_equal(got, want)
    assert not np.isfinite(run(ragged, *poisoned(*clean, np.nan))[0]).all()  # wrong variant: without the lengths


def test_empty_rows_are_zero_with_zero_gradients():
    inputs = operands(np.float32)
    options = {"q_lengths": np.array([0, T]), "kv_lengths": np.array([S, 0])}
    output, lse, *slopes = evaluate(ragged, options, inputs)(*inputs)
    assert not output.any()
    assert (lse == -np.inf).all()
    assert not any(x.any() for x in slopes)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (1, 9), (9, 1)])
def test_degenerate_sizes(queries, keys):
    inputs = [x[:, :size] for x, size in zip(operands(np.float32), (queries, keys, keys), strict=True)]
    output, lse, *slopes = evaluate(ragged, {}, inputs)(*inputs)
    compare((output, lse), attend(*inputs, np.ones((queries, keys), bool)), rtol=1e-5, atol=1e-6)
    assert [x.shape for x in slopes] == [x.shape for x in inputs]
    assert all(np.isfinite(x).all() for x in slopes)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 3e-3), ("float32", 2e-6)])
def test_narrow_inputs_accumulate_wide(dtype, tolerance):
    inputs = operands(dtype)
    output, lse, *slopes = evaluate(ragged, {"is_causal": True, "q_positions": POSITIONS}, inputs)(*inputs)
    assert (output.dtype, lse.dtype) == (inputs[0].dtype, np.float32)
    assert all(x.dtype == inputs[0].dtype for x in slopes)
    want = attend(*(np.asarray(x, np.float64) for x in inputs), np.arange(S)[None, :] <= POSITIONS[:, None])
    compare([output], want[:1], rtol=tolerance, atol=tolerance)
    compare([lse], want[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [300.0, 1e-3])
def test_float16_gradients_whose_factors_leave_its_range(size):
    """G_S is about size^2, beyond or below what float16 holds; what it makes with small or large keys is not."""
    q, k, v = operands(np.float32, heads=K)
    q, k, v = (x.astype(jnp.float16) for x in (q / size, k / size, v * size))

    def slopes(implementation, *inputs):
        weigh = jnp.asarray(array(B, T, K, HV) * size)
        call = lambda *x: jnp.sum(weigh.astype(x[0].dtype) * run(implementation, *x, scale=1.0)[0])  # noqa: E731
        return jax.jit(jax.grad(call, (0, 1, 2)))(*inputs)

    want = slopes(reference_attention, *(x.astype(jnp.float32) for x in (q, k, v)))
    for x, y in zip(slopes(ragged, q, k, v), want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=4e-3 * np.abs(y).max())


def test_only_tiles_that_may_hold_a_pair_are_visited():
    causal = make_mask((1, 1, 64, 64), is_causal=True)
    assert _starts(causal, (16, 16)) == tuple((q, k) for q in range(0, 64, 16) for k in range(0, q + 1, 16))
    banded = make_mask((1, 1, 64, 64), window=(1, 0))
    assert _starts(banded, (16, 16)) == tuple((q, k) for q in range(0, 64, 16) for k in (q - 16, q) if k >= 0)
    for mask, count in ((causal, 64 * 65 // 2), (banded, 2 * 64 - 1)):
        assert sum(int(np.asarray(mask.tile(q, 16, k, 16)).sum()) for q, k in _starts(mask, (16, 16))) == count
    moved = make_mask((1, 1, 64, 64), is_causal=True, q_positions=jnp.arange(64) + 5)
    assert len(_starts(moved, (16, 16))) == 16


# Composition with JAX's transformations.

CAUSAL = {"is_causal": True, "q_positions": POSITIONS, "dropout_rate": 0.2}


def output_of(q, k, v):
    return run(ragged, q, k, v, **CAUSAL, dropout_key=jax.random.key(1))[0]


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (None, 1, 3), (2, None, None)])
def test_vmap_is_a_loop_of_lone_calls(in_axes):
    pairs = list(zip(operands(np.float32), in_axes, strict=True))
    many = [x if axis is None else jnp.stack([x, 2 * x, -x], axis) for x, axis in pairs]
    batched = quick(jax.vmap(output_of, in_axes))(*many)
    lone = quick(output_of)
    for i, sign in enumerate((1, 2, -1)):
        compare([batched[i]], [lone(*(x if axis is None else sign * x for x, axis in pairs))], rtol=1e-5, atol=1e-6)


def test_jacrev_checkpoint_scan_and_second_derivatives(x64):
    q, k, v = (x[:1, :4] for x in operands())

    def derivatives(implementation):
        def f(q):
            return run(implementation, q, k, v)[0]

        def scanned(q):
            return jnp.sum(jax.lax.scan(lambda x, _: (x.at[..., :HV].add(f(x)), None), q, None, 3)[0] ** 2)

        curvature = jax.grad(lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(f(q) ** 2))(q) ** 2))
        return quick(lambda q: (jax.jacrev(jax.checkpoint(f))(q), jax.grad(scanned)(q), curvature(q)))(q)

    small = functools.partial(blockwise_attention, blocks=Blocks(2, 3))
    compare(*(derivatives(f) for f in (small, reference_attention)), rtol=1e-8, atol=1e-12)


def test_forward_mode_is_refused():
    q, k, v = operands(np.float32)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: output_of(q, k, v), (q,), (q,))


@pytest.mark.parametrize("axis", ["batch", "head"])
def test_shard_map_over_batch_and_heads(axis):
    q, k, v = operands(np.float32)
    weight = jnp.asarray(array(B, T, N, HV), np.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = PartitionSpec("x") if axis == "batch" else PartitionSpec(None, None, "x")

    def shard_loss(offset_wrong, q, k, v, weight):
        index = jax.lax.axis_index("x")
        start = 0 if offset_wrong else index * (B // 2 if axis == "batch" else N // 2)
        offsets = (start, 0, 0, 0) if axis == "batch" else (0, start, 0, 0)
        options = CAUSAL | {"dropout_offsets": offsets, "dropout_key": jax.random.key(1)}
        return jax.lax.psum(jnp.sum(weight * run(ragged, q, k, v, **options)[0]), "x")

    def value_and_slopes(offset_wrong):
        body = functools.partial(shard_loss, offset_wrong)
        sharded = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * 4, out_specs=PartitionSpec())
        return jax.tree.leaves(quick(jax.value_and_grad(sharded, (0, 1, 2)))(q, k, v, weight))

    alone = jax.value_and_grad(lambda *x: jnp.sum(weight * output_of(*x)), (0, 1, 2))
    lone = jax.tree.leaves(quick(alone)(q, k, v))

    def check(values):
        for got, want in zip(values, lone, strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)

    check(value_and_slopes(offset_wrong=False))
    if axis == "batch":
        with pytest.raises(AssertionError):  # wrong variant: every shard draws the first shard's dropout
            check(value_and_slopes(offset_wrong=True))


def test_shared_keys_collect_gradients_from_every_shard():
    """Queries sharded, keys and values replicated: their gradients are sums over the mesh."""
    q, k, v = operands(np.float32)
    k, v = k[:1], v[:1]
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def total(q, k, v):
        return jax.lax.psum(jnp.sum(run(ragged, q, k, v)[0] ** 2), "x")

    specs = (PartitionSpec("x"), PartitionSpec(), PartitionSpec())

    def lone(q, k, v):
        return sum(jnp.sum(run(ragged, q[b : b + 1], k, v)[0] ** 2) for b in range(B))

    sharded = jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    both = [jax.tree.leaves(quick(jax.value_and_grad(f, (0, 1, 2)))(q, k, v)) for f in (sharded, lone)]
    compare(*both, rtol=1e-4, atol=1e-5)
