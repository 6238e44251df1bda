"""What the entry points refuse, which implementation they select, and whether the plan tells the truth about it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.layout import Format, Layout

from flashspec import selection
from flashspec.attention import Contiguous, attention_stats, backends, dot_product_attention, plan_attention
from flashspec.attention.backends import BACKENDS
from flashspec.attention.request import AttentionRequest, make_request
from flashspec.selection import Target

B, T, S, N, K, H, Hv = 2, 5, 7, 4, 2, 8, 6
KEY = jax.random.key(0)
INSTALLED = ("blockwise", "reference")


def operands(T: int = T, S: int = S, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(KEY, 3)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv)
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))  # type: ignore[return-value]


def shapes(*sizes: int, dtype: Any = jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    """Query, key and value of sizes B, T, S, N, K, H, Hv."""
    B, T, S, N, K, H, Hv = sizes
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, Hv))]


# The caller is wrong.

q, k, v = operands()
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"query": q[0]}, "`query`: expected rank 4"),
    ({"key": k[:1]}, r"`key`: expected shape \[B, S, K, H\] with B = 2"),
    ({"key": k[..., :4]}, r"`key`: expected shape \[B, S, K, H\] with H = 8"),
    ({"value": v[:, :3]}, r"`value`: expected shape \[B, S, K, Hv\] with S = 7"),
    ({"value": v[:, :, :1]}, r"`value`: expected shape \[B, S, K, Hv\] with K = 2"),
    ({"query": q[:, :, :3]}, "`query`: expected a number of heads N that is a multiple of K = 2, got N = 3"),
    ({"query": q[..., :0], "key": k[..., :0]}, "`H`: expected an integer of at least 1"),
    ({"query": q.astype(jnp.int32)}, "`query`: expected dtype bfloat16, float16, float32, float64"),
    ({"key": k.astype(jnp.bfloat16)}, "`key`: expected the query's dtype float32"),
    ({"value": v.astype(jnp.float16)}, "`value`: expected the query's dtype float32"),
    ({name: np.asarray(x, np.float64) for name, x in (("query", q), ("key", k), ("value", v))}, "jax_enable_x64"),
    ({"bias": jnp.zeros((T, S))}, "`bias`: expected rank 4"),
    ({"bias": jnp.zeros((B, 3, T, S))}, "`bias`: expected rank 4, broadcastable"),
    ({"bias": jnp.zeros((B, N, T, S), bool)}, "`bias`: expected a floating dtype"),
    ({"mask": jnp.zeros((B, N, T, S))}, "`mask`: expected dtype bool"),
    ({"is_causal": True}, "`q_positions`: expected .* is ambiguous"),
    ({"window": 2}, "`q_positions`: expected .* is ambiguous"),
    ({"sinks": jnp.zeros(3)}, "`sinks`: expected shape"),
    ({"sinks": jnp.zeros(N, jnp.int32)}, "`sinks`: expected a floating dtype"),
    ({"scale": jnp.inf}, "`scale`: expected a number"),
    ({"scale": np.ones(2)}, "`scale`: expected a number"),
    ({"scale": 1j}, "`scale`: expected a number"),
    ({"scale": 1e300}, r"`scale`: expected a number in \[-1e\+30, 1e\+30\]"),
    ({"logits_soft_cap": 0.0}, r"`logits_soft_cap`: expected a number in \[1e-30, 1e\+30\]"),
    # In float32 a score over such a cap is 0, so that every score would be.
    ({"logits_soft_cap": 1e38}, r"`logits_soft_cap`: expected a number in \[1e-30, 1e\+30\]"),
    ({"dropout_offsets": (0, 0, 0)}, "`dropout_offsets`: expected shape"),
    ({"dropout_offsets": (0, 0, 0, 0.0)}, "`dropout_offsets`: expected an integer dtype"),
    ({"dropout_rate": -0.1, "dropout_key": KEY}, r"`dropout_rate`: expected a number in \[0.0, 1.0\]"),
    ({"dropout_rate": 0.1}, "`dropout_key`: expected one typed key"),
    ({"dropout_rate": 0.1, "dropout_key": jax.random.split(KEY)}, "`dropout_key`: expected one typed key"),
    ({"dropout_rate": 0.1, "dropout_key": jnp.zeros(2, jnp.uint32)}, "`dropout_key`: expected one typed key"),
    ({"dropout_broadcast": ("layer",)}, "`dropout_broadcast`: expected a tuple of names"),
    ({"dropout_rate": 0.1, "dropout_key": KEY, "dropout_offsets": np.zeros(3, int)}, "`dropout_offsets`"),
    ({"empty_rows": "nan"}, "`empty_rows`: expected one of 'zero', 'error'"),
    ({"implementation": "flash"}, "`implementation`: expected one of 'hopper', 'ampere', 'tpu', 'cudnn', 'blockwise'"),
    ({"implementation": ()}, "`implementation`: expected a name"),
    ({"implementation": ("reference", "xla")}, "`implementation`: expected one of"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_wrong_argument_is_named(wrong: dict[str, Any], message: str) -> None:
    arguments = {"query": q, "key": k, "value": v} | wrong
    with pytest.raises(ValueError, match=message):
        dot_product_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        plan_attention(**arguments)


def test_numbers_that_32_bits_cannot_hold_are_refused() -> None:
    """jax would wrap the integer to -1, which hides every key, and round the bias to -inf, which is a mask."""
    for wrong in ({"kv_lengths": np.full(B, 2**63 - 1)}, {"bias": np.full((1, 1, 1, 1), -1e300)}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"`{name}`: expected values that fit .*32 unless jax_enable_x64 is set"):
            dot_product_attention(q, k, v, **wrong)


@pytest.mark.parametrize("implementation", INSTALLED)
def test_a_wide_bias_is_no_mask(implementation: str, x64: None) -> None:
    call = functools.partial(dot_product_attention, q, k, v, implementation=implementation)
    output = call(np.full((1, 1, 1, 1), -1e300))
    np.testing.assert_allclose(output, np.mean(v, axis=1, keepdims=True).repeat(2, 2) + 0 * output, atol=1e-6)
    assert not call(np.full((1, 1, 1, 1), -np.inf)).any()


def test_offsets_of_several_dtypes(x64: None) -> None:
    call = functools.partial(dot_product_attention, q, k, v, dropout_rate=0.5, dropout_key=KEY)
    want = call(dropout_offsets=np.array([0, 1, 2, 3]))
    got = jax.jit(lambda i: call(dropout_offsets=(i, 1, np.int64(2), jnp.uint8(3))))(jnp.int32(0))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(call(), want, rtol=1e-6)


def test_a_traced_number_is_refused() -> None:
    with pytest.raises(ValueError, match="`scale`: expected a Python number"):
        jax.jit(lambda scale: dot_product_attention(q, k, v, scale=scale))(0.5)


def test_numpy_numbers_are_numbers() -> None:
    want = dot_product_attention(q, k, v, scale=0.5, logits_soft_cap=2.0)
    got = dot_product_attention(q, k, v, scale=np.float32(0.5), logits_soft_cap=np.int32(2))
    assert np.array_equal(np.asarray(got), np.asarray(want))


def test_numpy_operands_are_arrays() -> None:
    got = dot_product_attention(*(np.asarray(x) for x in (q, k, v)))
    assert np.array_equal(np.asarray(got), np.asarray(dot_product_attention(q, k, v)))


# Empty rows.


def test_empty_rows_are_refused_on_demand() -> None:
    call = functools.partial(dot_product_attention, q, k, v, kv_lengths=jnp.array([7, 0]))
    with pytest.raises(ValueError, match=r"`mask`: expected a visible key in every query row, .* = \[1, 0, 0\]"):
        call(empty_rows="error")
    assert not np.asarray(call()[1]).any()
    call(empty_rows="error", sinks=jnp.zeros(N))  # a sink is something to normalise over
    dot_product_attention(q, k, v, empty_rows="error")
    with pytest.raises(ValueError, match="visible key"):
        attention_stats(q, k, v, kv_lengths=jnp.array([7, 0]), empty_rows="error")


def test_empty_rows_are_checked_under_jit() -> None:
    @checkify.checkify
    @jax.jit
    def call(lengths: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, v, kv_lengths=lengths, empty_rows="error")

    call(jnp.array([7, 1]))[0].throw()
    with pytest.raises(checkify.JaxRuntimeError, match="visible key"):
        call(jnp.array([7, 0]))[0].throw()


# Backends that cannot.


def request(**options: Any) -> AttentionRequest:
    sizes = {"B": 1, "T": 16, "S": 16, "N": 4, "K": 2, "H": 64, "Hv": 64}
    return AttentionRequest(**sizes | {"dtype": jnp.dtype(jnp.bfloat16), "scale": 0.1, "platform": "cuda"} | options)


CUDNN_ALLOWS: list[dict[str, Any]] = [
    {},
    {"dtype": np.dtype(np.float16)},
    {"is_causal": True},
    {"is_causal": True, "window": (3, None)},
    {"is_causal": True, "window": (3, 0)},
    {"T": 8},
]
CUDNN_REFUSES: list[tuple[dict[str, Any], str]] = [
    ({"platform": "cpu"}, "CUDA"),
    ({"dtype": np.dtype(np.float32)}, "float32"),
    ({"dtype": np.dtype(np.float64)}, "float64"),
    ({"Hv": 32}, "Hv = 32"),
    ({"H": 20, "Hv": 20}, "multiple of 8"),
    ({"H": 136, "Hv": 136}, "at most 128"),
    ({"T": 0}, "empty"),
    ({"S": 0}, "empty"),
    ({"T": 33}, "even lengths"),
    ({"S": 33}, "even lengths"),
    ({"scale": -1.0}, "positive scale"),
    ({"return_lse": True}, "log-normaliser"),
    ({"statistics": True}, "statistics"),
    ({"logits_soft_cap": 1.0}, "soft cap"),
    ({"dropout_rate": 0.1}, "dropout"),
    ({"is_causal": True, "T": 8}, "top left"),
    ({"window": (3, 0)}, "window"),
    ({"window": (None, 2)}, "window"),
    ({"partitioned": ("key axis 1",)}, "key axis 1 is split"),
    *(({"options": frozenset({name})}, reason) for name, reason in backends.cudnn._OPTIONS.items()),
]


@pytest.mark.parametrize("options", CUDNN_ALLOWS, ids=str)
def test_cudnn_supports(options: dict[str, Any]) -> None:
    assert BACKENDS["cudnn"].supports(request(**options)) == ()


@pytest.mark.parametrize(("options", "reason"), CUDNN_REFUSES, ids=str)
def test_cudnn_refuses(options: dict[str, Any], reason: str) -> None:
    (got,) = BACKENDS["cudnn"].supports(request(**options))
    assert reason in got


def test_every_array_option_is_known_to_cudnn() -> None:
    arrays = {
        "bias": jnp.zeros((1, 1, 1, S)),
        "mask": jnp.ones((1, 1, 1, S), bool),
        "q_positions": jnp.arange(T),
        "kv_positions": jnp.arange(S),
        "q_lengths": jnp.full(B, T),
        "kv_lengths": jnp.full(B, S),
        "q_segment_ids": jnp.zeros((B, T), jnp.int32),
        "kv_segment_ids": jnp.zeros((B, S), jnp.int32),
        "sinks": jnp.zeros(N),
    }
    known = set(backends.cudnn._OPTIONS)
    got, _ = make_request(q, k, v, **arrays)
    assert got.options == set(arrays)
    assert got.options - known == {"kv_segment_ids"}  # which never comes without q_segment_ids


def test_a_named_backend_that_cannot_gives_every_reason() -> None:
    with pytest.raises(NotImplementedError) as caught:
        dot_product_attention(q, k, v, implementation="cudnn", logits_soft_cap=1.0, return_lse=True)
    for reason in ("CUDA", "float32", "Hv = 6", "soft cap", "log-normaliser"):
        assert reason in str(caught.value)


def test_kernels_of_another_device() -> None:
    with pytest.raises(NotImplementedError, match=r"runs on cuda of compute capability 8\.0 or more only, not on cpu"):
        dot_product_attention(q, k, v, implementation="ampere")
    with pytest.raises(NotImplementedError, match=r"runs on cuda of compute capability 9\.0 only, not on cpu"):
        dot_product_attention(q, k, v, implementation="hopper")
    with pytest.raises(NotImplementedError, match=r"only, not on cuda of compute capability 8\.0"):
        plan_attention(q, k, v, implementation="hopper", device="NVIDIA A100-SXM4-80GB")


def test_a_refusal_comes_before_compute() -> None:
    with pytest.raises(NotImplementedError):
        jax.eval_shape(lambda q: dot_product_attention(q, k, v, implementation="cudnn"), q)


def test_the_first_of_a_sequence_that_can() -> None:
    plan = plan_attention(q, k, v, implementation=("hopper", "cudnn", "reference", "blockwise"))
    assert plan.forward.implementation == plan.backward.implementation == "reference"
    with pytest.raises(NotImplementedError, match=r"(?s)hopper.*cudnn"):
        plan_attention(q, k, v, implementation=("hopper", "cudnn"))


# The plan against the compiled program.


def scopes(text: str) -> set[str]:
    """Which implementations left operations in a program."""
    return {name for name in BACKENDS if backends.scope(name) in text}


def program(call: Callable, *args: Any) -> str:
    return jax.jit(call).lower(*args).compile().as_text()


@pytest.mark.parametrize("implementation", [None, "reference", "blockwise", ("cudnn", "blockwise")])
@pytest.mark.parametrize("size", [7, 160])
def test_the_program_holds_what_the_plan_names(implementation: Any, size: int) -> None:
    call = functools.partial(dot_product_attention, implementation=implementation)
    args = operands(size, size)
    plan = plan_attention(*args, implementation=implementation)
    assert plan.rejected.keys() == set(BACKENDS) - set(INSTALLED)
    assert scopes(program(call, *args)) == {plan.forward.implementation}

    def backward(*args: jax.Array) -> Any:
        return jax.grad(lambda *a: jnp.sum(call(*a)), argnums=(0, 1, 2))(*args)

    assert scopes(program(backward, *args)) == {plan.backward.implementation}


def test_a_plan_for_another_backend_is_noticed() -> None:
    args = operands()
    plan = plan_attention(*args, implementation="reference")
    text = program(functools.partial(dot_product_attention, implementation="blockwise"), *args)
    assert scopes(text) != {plan.forward.implementation}


def test_the_default_follows_the_size() -> None:
    small, large = (plan_attention(*operands(n, n)).forward.implementation for n in (128, 129))
    assert (small, large) == ("reference", "blockwise")


def test_the_default_follows_the_platform_that_is_lowered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    best = {"cpu": ("blockwise",), "cuda": ("cudnn", "reference")}
    monkeypatch.setattr(selection, "targets", lambda: tuple(Target("", name) for name in best))
    monkeypatch.setattr(backends, "candidates", lambda request, implementation: best[request.platform])
    call = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(dot_product_attention(*a))))
    traced = call.trace(*operands())
    texts = {name: traced.lower(lowering_platforms=(name,)).as_text(debug_info=True) for name in best}
    assert {name: scopes(text) for name, text in texts.items()} == {"cpu": {"blockwise"}, "cuda": {"reference"}}
    want = jax.value_and_grad(lambda *a: jnp.sum(dot_product_attention(*a, implementation="reference")))(*operands())
    for x, y in zip(jax.tree.leaves(call(*operands())), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-5)


# What the plan says.


def test_a_plan_from_shapes_alone() -> None:
    struct = jax.ShapeDtypeStruct
    plan = plan_attention(
        *shapes(1, 8, 32, 4, 2, 64, 64),
        bias=struct((1, 4, 8, 32), jnp.bfloat16),
        is_causal=True,
        q_positions=Contiguous(struct((1,), jnp.int32)),
        kv_lengths=struct((1,), jnp.int32),
        sinks=struct((4,), jnp.float32),
        dropout_rate=0.1,
        dropout_key=struct((), KEY.dtype),
        device="NVIDIA H200",
    )
    assert plan.forward.implementation == "reference"
    assert plan.request.options == {"bias", "q_positions", "kv_lengths", "sinks"}
    assert {"hopper", "ampere", "tpu", "cudnn"} == set(plan.rejected)
    assert len(plan.rejected["cudnn"]) == 6


def test_a_gpu_is_planned_for_from_anywhere() -> None:
    plan = plan_attention(*shapes(1, 128, 128, 8, 8, 64, 64), is_causal=True, device="NVIDIA H200")
    assert plan.forward.implementation == plan.backward.implementation == "hopper"
    assert set(plan.rejected) == {"tpu"}
    elsewhere = plan_attention(*shapes(1, 128, 128, 8, 8, 64, 64), is_causal=True, device="NVIDIA A100-SXM4-80GB")
    assert elsewhere.forward.implementation == elsewhere.backward.implementation == "cudnn"
    assert set(elsewhere.rejected) == {"hopper", "tpu"}
    ours = plan_attention(
        *shapes(1, 128, 128, 8, 8, 64, 64), is_causal=True, logits_soft_cap=1.0, device="NVIDIA A100-SXM4-80GB"
    )
    assert ours.forward.implementation == ours.backward.implementation == "ampere"
    old = plan_attention(*shapes(1, 512, 512, 8, 8, 64, 64), logits_soft_cap=1.0, device="NVIDIA T4")
    assert old.forward.implementation == "blockwise"


def assert_roofline(plan: Any, pairs: int) -> None:
    flops = 2 * 8 * pairs * (64 + 64)
    moved = 4 * 8 * 128 * 64 * 2
    assert (plan.forward.flops, plan.forward.bytes) == (flops, moved)
    np.testing.assert_allclose(plan.forward.lower_bound_seconds, max(flops / 989.5e12, moved / 4.8e12))
    assert plan.backward.flops == flops * 5 // 2


def test_the_roofline_counts_visible_pairs() -> None:
    args = shapes(1, 128, 128, 8, 8, 64, 64)
    causal = 128 * 129 // 2
    assert_roofline(plan_attention(*args, device="NVIDIA H200"), 128 * 128)
    assert_roofline(plan_attention(*args, is_causal=True, device="NVIDIA H200"), causal)
    assert_roofline(plan_attention(*args, window=(1, 1), device="NVIDIA H200"), 128 * 3 - 2)
    assert_roofline(plan_attention(*args, is_causal=True, window=(1, None), device="NVIDIA H200"), 128 * 2 - 1)
    with pytest.raises(AssertionError):
        assert_roofline(plan_attention(*args, is_causal=True, device="NVIDIA H200"), 128 * 128)


def test_rates_that_nobody_states_are_unknown() -> None:
    args = shapes(1, 8, 8, 4, 2, 64, 64)
    assert plan_attention(*args).forward.lower_bound_seconds is None
    assert plan_attention(*args, device="NVIDIA H2000").forward.lower_bound_seconds is None
    with pytest.raises(ValueError, match="`device`: expected"):
        plan_attention(*args, device="abacus")


def test_a_plan_prints_as_a_table() -> None:
    args = shapes(1, 256, 256, 8, 8, 64, 64)
    plan = plan_attention(*args, return_lse=True, device="NVIDIA H200", implementation=("cudnn", "blockwise"))
    lines = str(plan).splitlines()
    assert lines[0] == "attention on NVIDIA H200: B=1 T=256 S=256 N=8 K=8 H=64 Hv=64 bfloat16"
    assert lines[1].split() == ["pass", "implementation", "config", "FLOPs", "bytes", "time", "(lower", "bound)"]
    assert lines[2].split()[:2] == ["forward", "blockwise"]
    assert "block_queries=256 block_keys=256" in lines[2]
    assert lines[3].split()[:2] == ["backward", "blockwise"]
    assert "rejected cudnn: does not return the log-normaliser differentiably" in lines


def test_a_copy_for_the_layout_is_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands()
    order = Format(Layout(major_to_minor=(0, 2, 1, 3)), q.sharding)
    turned = jax.device_put(q, order)
    assert plan_attention(turned, k, v).copies == {}  # XLA reads any layout
    row_major = dataclasses.replace(BACKENDS["reference"], row_major=True)
    monkeypatch.setitem(BACKENDS, "reference", row_major)  # type: ignore[arg-type]
    plan = plan_attention(turned, k, v)
    assert plan.copies == {"query": q.nbytes}
    assert f"copied: query, {q.nbytes:,} bytes" in str(plan)
    assert plan_attention(q, k, v).copies == {}


def test_split_operands_are_seen_in_shapes() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    query, key, value = shapes(1, 8, 8, 4, 2, 64, 64)
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding)
    with pytest.raises(NotImplementedError, match="key axis 1 is split over devices"):
        plan_attention(query, key, value)
