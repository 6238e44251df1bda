"""The Hopper adaptor over stand-in kernels: masks, padding, derivatives, vmap and sharding, on any machine."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashspec.attention import attention_stats, dot_product_attention
from flashspec.masks import Contiguous
from flashspec.online_softmax import finalize, merge
from tests.attention import hopper_twin
from tests.attention.hopper_twin import hopper_by_twin
from tests.contracts.attention_oracle import Case, assert_close, oracle, random_case, run

SIZES = [(2, 5, 7, 4, 2, 8, 6), (1, 9, 9, 3, 1, 8, 8), (2, 6, 11, 4, 4, 72, 72)]


@pytest.fixture(scope="module", autouse=True)
def twins() -> Iterator[None]:
    with hopper_by_twin():
        yield


def hopper_case(seed: int, sizes: tuple[int, ...] = SIZES[0], **options: Any) -> Case:
    """A random call of what the kernels do natively; `positions` are `Contiguous`."""
    case = random_case(seed, sizes=sizes, **options)
    positions = case.arguments.get("q_positions")
    if positions is not None:
        case.arguments["q_positions"] = Contiguous(positions[:, 0].astype(np.int32))
    return case


OPTIONS: list[dict[str, Any]] = [
    {},
    {"positions": "causal"},
    {"positions": "window", "soft_cap": 1.5},
    {"positions": "causal window", "lengths": True, "sinks": True},
    {"lengths": True, "segments": True, "scale": 0.7},
    {"positions": "causal", "segments": True, "sinks": True, "soft_cap": 1.5},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], sizes: tuple[int, ...]) -> None:
    case = hopper_case(OPTIONS.index(options), sizes, **options)
    assert_close(run(case, "hopper"), oracle(case))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (3, 1)}, {"window": (None, 2)}], ids=str)
def test_default_positions(options: dict[str, Any]) -> None:
    case = random_case(20, sizes=(2, 9, 9, 4, 2, 8, 8))
    case.arguments |= options
    assert_close(run(case, "hopper"), oracle(case))


def test_heads_too_wide_for_the_backward_kernel() -> None:
    case = hopper_case(21, (1, 5, 7, 2, 1, 136, 136), positions="causal", sinks=True)
    assert_close(run(case, "hopper"), oracle(case))


@pytest.mark.parametrize("sizes", [(2, 0, 5, 4, 2, 8, 6), (2, 5, 0, 4, 2, 8, 6), (0, 5, 5, 4, 2, 8, 6)])
def test_empty_operands(sizes: tuple[int, ...]) -> None:
    case = hopper_case(22, sizes, sinks=True)
    assert_close(run(case, "hopper"), oracle(case))


def test_positions_at_the_ends_of_their_range() -> None:
    """Differences of positions that int32 cannot hold still say that everything, or nothing, is visible."""
    top, bottom = np.iinfo(np.int32).max - 9, np.iinfo(np.int32).min
    for q, k, everything in ((top, bottom, True), (bottom, top, False)):
        case = hopper_case(23)
        case.arguments |= {"is_causal": True, "q_positions": Contiguous(np.full(2, q, np.int32))}
        case.arguments["kv_positions"] = Contiguous(np.full(2, k, np.int32))
        got = run(case, "hopper")
        plain = hopper_case(23)
        if everything:
            assert_close(got, oracle(plain))
        else:
            assert not got.output.any()


@pytest.mark.parametrize("options", [OPTIONS[3], OPTIONS[5]], ids=str)
def test_what_nobody_sees_touches_nothing(options: dict[str, Any]) -> None:
    case = hopper_case(24, **options)
    case.arguments |= {"kv_lengths": np.array([4, 7]), "q_lengths": np.array([5, 3])}
    clean = run(case, "hopper")
    dirty = dataclasses.replace(
        case, arguments={n: np.copy(x) if n in "query key value" else x for n, x in case.arguments.items()}
    )
    dirty.arguments["key"][0, 4:], dirty.arguments["value"][0, 4:] = np.nan, np.inf
    dirty.arguments["query"][1, 3:] = np.nan
    got = run(dirty, "hopper")
    for x, y in zip(jax.tree.leaves(dataclasses.asdict(got)), jax.tree.leaves(dataclasses.asdict(clean)), strict=True):
        np.testing.assert_array_equal(x, y)
    dirty.arguments["value"][0, 0] = np.nan
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(run(dirty, "hopper").output, clean.output)


def test_statistics_of_two_parts_merge_into_the_whole() -> None:
    case = hopper_case(25, (2, 6, 9, 4, 2, 8, 6), soft_cap=1.5, sinks=True)
    given = dict(case.arguments) | {"is_causal": True, "q_positions": Contiguous(np.array([3, 1], np.int32))}
    query, key, value, sinks = (given.pop(name) for name in ("query", "key", "value", "sinks"))

    @functools.partial(jax.grad, has_aux=True)
    def total(key: jax.Array) -> Any:
        parts = [
            attention_stats(
                query,
                key[:, s],
                value[:, s],
                **given,
                implementation="hopper",
                kv_positions=Contiguous(np.full(2, s.start, np.int32)),
            )
            for s in (slice(0, 4), slice(4, 9))
        ]
        output, lse = finalize(merge(*parts), sinks=sinks)
        return jnp.sum(output * case.g_output.astype(np.float32)) + jnp.sum(lse * case.g_lse.astype(np.float32)), output

    gradient, output = total(jnp.asarray(key))
    case.arguments |= {"is_causal": True, "q_positions": Contiguous(np.array([3, 1], np.int32))}
    want = oracle(case)
    np.testing.assert_allclose(output, want.output, rtol=3e-5, atol=3e-5)
    np.testing.assert_allclose(gradient, want.gradients["key"], rtol=1e-4, atol=1e-4)


WRONG_KERNELS = {
    "scale missing": {"forward": lambda *a, scale, **k: hopper_twin.forward(*a, scale=1.0, **k)},
    "no sinks": {"forward": lambda q, k, v, b, s, sinks, **kw: hopper_twin.forward(q, k, v, b, s, None, **kw)},
    "no row mean": {
        "backward": lambda q, k, v, g, lse, delta, *a, **kw: hopper_twin.backward(q, k, v, g, lse, 0 * delta, *a, **kw)
    },
    "window ignored": {
        "forward": lambda *a, mask, **k: hopper_twin.forward(*a, mask=dataclasses.replace(mask, left=False), **k)
    },
}


@pytest.mark.parametrize("wrong", WRONG_KERNELS)
def test_wrong_kernels_are_noticed(wrong: str) -> None:
    case = hopper_case(26, positions="causal window", sinks=True)
    jax.clear_caches()  # a program of the right kernels must not answer for the wrong one
    with hopper_by_twin(**WRONG_KERNELS[wrong]), pytest.raises(AssertionError):
        assert_close(run(case, "hopper"), oracle(case))
    jax.clear_caches()


# Transformations.


def operands(B: int = 4, T: int = 6, N: int = 8, K: int = 4, H: int = 8) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (B, T, heads, H)) for key, heads in zip(keys, (N, K, K), strict=True)]


def loss(query: jax.Array, key: jax.Array, value: jax.Array, start: jax.Array) -> jax.Array:
    output, lse = dot_product_attention(
        query, key, value, is_causal=True, q_positions=Contiguous(start), return_lse=True, implementation="hopper"
    )
    return jnp.sum(output**2) + jnp.sum(jnp.sin(lse))


def test_vmap_over_any_axes_equals_a_loop() -> None:
    query, key, value = operands()
    queries, starts = jnp.stack([query, 2 * query], axis=2), jnp.array([[0, 1, 2, 3], [3, 2, 1, 0]], jnp.int32)
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    got = jax.jit(jax.vmap(gradient, in_axes=(2, None, None, 0)))(queries, key, value, starts)
    for i in range(2):
        want = gradient(queries[:, :, i], key, value, starts[i])
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-5)


def test_jacrev_checkpoint_and_scan() -> None:
    query, key, value = operands(B=1, T=2, N=2, K=1)
    start = jnp.zeros(1, jnp.int32)
    rows = jax.jacrev(lambda q: dot_product_attention(q, key, value, is_causal=True, implementation="hopper"))(query)
    want = jax.jacrev(lambda q: dot_product_attention(q, key, value, is_causal=True, implementation="reference"))(query)
    np.testing.assert_allclose(rows, want, rtol=2e-5, atol=2e-5)
    plain = jax.grad(loss)(query, key, value, start)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(loss))(query, key, value, start), plain, rtol=2e-5, atol=2e-5)
    scanned = jax.grad(lambda q: jax.lax.scan(lambda c, _: (c + loss(q, key, value, start), None), 0.0, None, 3)[0])
    np.testing.assert_allclose(scanned(query), 3 * plain, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("K", [4, 1])
def test_batch_and_heads_split_over_devices(kind: AxisType, K: int) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    arrays = operands(K=K)
    start = jnp.arange(4, dtype=jnp.int32)
    want = jax.grad(loss, argnums=(0, 1, 2))(*arrays, start)
    heads = [P("data", None, "model" if x.shape[2] > 1 else None) for x in arrays]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, heads, strict=True)]
    starts = jax.device_put(start, NamedSharding(mesh, P("data")))
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*placed, starts).compile()
    assert "all-gather" not in program.as_text()
    for x, y in zip(program(*placed, starts), want, strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=2e-5, atol=2e-5)


def test_heads_that_do_not_split_are_refused() -> None:
    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    query, key, value = operands(K=2)
    placed = jax.device_put(query, NamedSharding(mesh, P(None, None, "model")))
    with pytest.raises(NotImplementedError, match="2 key/value heads do not divide over 8 devices"):
        dot_product_attention(placed, key, value, implementation="hopper")


def test_shard_map() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    arrays, start = operands(), jnp.arange(4, dtype=jnp.int32)
    heads = P("data", None, "model")

    def local(query: jax.Array, key: jax.Array, value: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.psum(loss(query, key, value, start), ("data", "model"))

    split = jax.shard_map(local, mesh=mesh, in_specs=(heads, heads, heads, P("data")), out_specs=P())
    got = jax.jit(jax.grad(split, argnums=(0, 1, 2)))(*arrays, start)
    for x, y in zip(got, jax.grad(loss, argnums=(0, 1, 2))(*arrays, start), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
