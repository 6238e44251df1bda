"""The TPU kernels over operands that devices split by batch and heads, in an interpreter and on virtual devices."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flashspec.attention import decode_attention, dot_product_attention, lifting, plan_attention
from flashspec.attention.views import DenseView, PagedView
from tests.contracts.interpreted_tpu import interpreted_tpu

B, T, N, H = 4, 24, 8, 8


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with interpreted_tpu():
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((2, 4), ("rows", "heads"), axis_types=(kind,) * 2)


def operands(K: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, H), "bias": (1, N, T, T)}
    given = {name: jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=True)}
    return given | {"sinks": jnp.linspace(-1, 1, N), "kv_lengths": jnp.array([T, 20, 3, 0])}


SPECS = {
    **dict.fromkeys(("query", "key", "value"), P("rows", None, "heads")),
    "bias": P(None, "heads"),
    "sinks": P("heads"),
    "kv_lengths": P("rows"),
}


def on(mesh: Mesh, given: dict[str, jax.Array], K: int) -> dict[str, jax.Array]:
    specs = SPECS | ({} if K > 1 else dict.fromkeys(("key", "value"), P("rows")))
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in given.items()}


def loss(given: dict[str, jax.Array], kv_lengths: jax.Array, implementation: str = "tpu") -> jax.Array:
    options = {"is_causal": True, "dropout_rate": 0.3, "dropout_key": jax.random.key(3), "return_lse": True}
    output, lse = dot_product_attention(**given, kv_lengths=kv_lengths, implementation=implementation, **options)
    return jnp.sum(jnp.sin(output)) + jnp.sum(lse**2)


def gradients(given: dict[str, jax.Array], implementation: str = "tpu") -> Callable[..., Any]:
    rest = dict(given)
    return jax.jit(jax.grad(functools.partial(loss, implementation=implementation))), rest, rest.pop("kv_lengths")


def assert_same(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * max(1, float(np.max(np.abs(y)))))


@pytest.mark.parametrize("K", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_explicit_axes(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call, *arguments = gradients(operands(K), "blockwise")
    want = call(*arguments)
    call, *arguments = gradients(on(mesh_of(AxisType.Explicit), operands(K), K))
    program = call.lower(*arguments).compile()
    assert "all-gather" not in program.as_text()
    assert_same(program(*arguments), want)
    if K == 1:  # without the sum over the devices that share the key/value head, its gradient is one device's
        with monkeypatch.context() as wrong:
            wrong.setattr(lifting, "_local", lambda kernel, *_: kernel)
            jax.clear_caches()
            call, *arguments = gradients(on(mesh_of(AxisType.Explicit), operands(K), K))
            with pytest.raises(AssertionError):
                assert_same(call(*arguments), want)
        jax.clear_caches()


def test_automatic_axes() -> None:
    """An eager call shows how its operands are split; a traced one does not, and says what to do about it."""
    given = operands(4)
    del given["bias"], given["sinks"], given["kv_lengths"]
    placed = on(mesh_of(AxisType.Auto), given, 4)
    got = dot_product_attention(**placed, is_causal=True, implementation="tpu")
    assert got.sharding.is_equivalent_to(NamedSharding(mesh_of(AxisType.Auto), P("rows", None, "heads")), 4)
    assert_same(got, dot_product_attention(**given, is_causal=True, implementation="blockwise"))
    assert plan_attention(**placed, is_causal=True, implementation="tpu").forward.implementation == "tpu"
    with pytest.raises(NotImplementedError, match=r"automatic mode.*jax\.shard_map"):
        jax.jit(functools.partial(dot_product_attention, implementation="tpu"))(**placed)
    either = jax.jit(functools.partial(dot_product_attention, is_causal=True, implementation=("tpu", "blockwise")))
    assert_same(either(**placed), got)


def test_vmap_over_explicit_axes() -> None:
    given = operands(4)
    rest = {name: given[name] for name in ("key", "value")}
    mesh = mesh_of(AxisType.Explicit)
    placed = on(mesh, rest, 4)
    queries = jnp.stack([given["query"], -given["query"]])
    split = jax.device_put(queries, NamedSharding(mesh, P(None, "rows", None, "heads")))

    def call(implementation: str, rest: dict[str, jax.Array], query: jax.Array) -> jax.Array:
        return dot_product_attention(query, **rest, is_causal=True, implementation=implementation)

    got = jax.jit(jax.vmap(functools.partial(call, "tpu", placed)))(split)
    assert_same(got, jax.vmap(functools.partial(call, "blockwise", rest))(queries))


def test_groups_that_do_not_divide_are_refused() -> None:
    given = {name: operands(2)[name] for name in ("query", "key", "value")}
    mesh = mesh_of(AxisType.Explicit)
    given["query"] = jax.device_put(given["query"], NamedSharding(mesh, P("rows", None, "heads")))
    with pytest.raises(NotImplementedError, match="2 key/value heads do not divide over 4 devices"):
        dot_product_attention(**given, implementation="tpu")
    given["key"] = jax.device_put(given["key"], NamedSharding(mesh, P(None, "rows")))
    with pytest.raises(NotImplementedError, match="key axis 1 is split"):
        dot_product_attention(**given, implementation="tpu")


# Decoding: every device has one of four key/value heads.


def cache(kind: str) -> tuple[Any, Any]:
    """A view and its specs."""
    rng = np.random.default_rng(0)
    length = jnp.array([32, 17, 3, 2])
    shape = (B, 32, 4, 128) if kind == "dense" else (B * 2 + 1, 16, 4, 128)
    key, value = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    if kind == "dense":
        return DenseView(key, value, length), DenseView(P("rows", None, "heads"), P("rows", None, "heads"), P("rows"))
    table = jnp.asarray(rng.permutation(B * 2).reshape(B, 2), jnp.int32)
    pool = P(None, None, "heads")
    return PagedView(key, value, table, length), PagedView(pool, pool, P("rows"), P("rows"))


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_decoding(kind: str) -> None:
    view, specs = cache(kind)
    query = jax.random.normal(jax.random.key(1), (B, 2, N, 128))
    mesh = mesh_of(AxisType.Explicit)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    split = put(query, P("rows", None, "heads")), jax.tree.map(put, view, specs)
    program = jax.jit(functools.partial(decode_attention, implementation="tpu")).lower(*split).compile()
    assert "all-gather" not in program.as_text()
    assert_same(program(*split), decode_attention(query, view, implementation="blockwise"))
    shifted = jax.tree.map(lambda x: jnp.roll(x, 1, axis=2) if x.ndim == 4 else x, view)  # other devices' heads
    with pytest.raises(AssertionError):
        assert_same(program(*split), decode_attention(query, shifted, implementation="blockwise"))
