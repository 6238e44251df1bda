"""Attention under the transformations of JAX, each against the plain call, and split over devices."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashspec.attention import attention_stats, dot_product_attention, finalize, merge_across
from tests.contracts.attention_oracle import small_tiles

B, T, S, N, K, H, Hv = 2, 5, 8, 4, 2, 8, 6
OPTIONS: dict[str, Any] = {"is_causal": True, "logits_soft_cap": 2.0, "q_positions": np.arange(3, 8)}
every_implementation = pytest.mark.parametrize("implementation", ["reference", "tiles"])


@pytest.fixture(scope="module", autouse=True)
def tiles() -> Iterator[None]:
    with small_tiles():
        yield


def operands(*lead: int, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv)
    return tuple(jax.random.normal(key, (*lead, *shape)) for key, shape in zip(keys, shapes, strict=True))  # type: ignore[return-value]


def attend(implementation: str, **options: Any) -> Callable:
    return functools.partial(dot_product_attention, implementation=implementation, **OPTIONS | options)


def loss(implementation: str, **options: Any) -> Callable[..., jax.Array]:
    def value(*args: jax.Array) -> jax.Array:
        output, lse = attend(implementation, return_lse=True, **options)(*args)
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0) ** 2)

    return value


def assert_same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


@every_implementation
def test_eager_and_jit(implementation: str) -> None:
    assert_same(jax.jit(attend(implementation))(*operands()), attend(implementation)(*operands()))


@every_implementation
@pytest.mark.parametrize("in_axes", [0, (2, 4, 3), (None, 1, 0)])
def test_vmap_over_any_axis(implementation: str, in_axes: Any) -> None:
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * 3
    calls = [operands(seed=seed) for seed in range(3)]
    each = [tuple(call[i] if axis is not None else calls[0][i] for i, axis in enumerate(axes)) for call in calls]
    stacked = [
        calls[0][i] if axis is None else jnp.stack([call[i] for call in calls], axis) for i, axis in enumerate(axes)
    ]
    gradients = jax.grad(loss(implementation), argnums=(0, 1, 2))
    got = jax.jit(jax.vmap(lambda *a: (attend(implementation)(*a), gradients(*a)), in_axes=axes))(*stacked)
    alone = jax.jit(lambda *a: (attend(implementation)(*a), gradients(*a)))
    for i, call in enumerate(each):
        assert_same(jax.tree.map(lambda x, i=i: x[i], got), alone(*call))


@every_implementation
def test_vmap_over_structure(implementation: str) -> None:
    lengths, starts = jnp.array([[3, 8], [0, 5]]), jnp.array([[3, 4, 5, 6, 7], [-2, 0, 1, 2, 9]])

    def call(lengths: jax.Array, positions: jax.Array) -> jax.Array:
        return attend(implementation, kv_lengths=lengths, q_positions=positions)(*operands())

    got = jax.vmap(call)(lengths, starts)
    assert_same(got, jnp.stack([call(*args) for args in zip(lengths, starts, strict=True)]))


@every_implementation
def test_vmap_of_dropout_equals_lone_calls(implementation: str) -> None:
    keys = jax.random.split(jax.random.key(3), 3)

    def call(key: jax.Array, query: jax.Array) -> jax.Array:
        _, k, v = operands()
        return attend(implementation, dropout_rate=0.5, dropout_key=key)(query, k, v)

    query = operands(3)[0]
    alone = jnp.stack([call(key, query[i]) for i, key in enumerate(keys)])
    assert_same(jax.vmap(call)(keys, query), alone)
    shared = jax.vmap(call, in_axes=(None, 0))(keys[0], query)
    assert_same(shared, jnp.stack([call(keys[0], q) for q in query]))
    with pytest.raises(AssertionError):
        assert_same(shared, alone)


@every_implementation
def test_jacrev(implementation: str) -> None:
    q, k, v = (x[:1, :2] for x in operands())
    call = attend(implementation, q_positions=np.arange(2))
    jacobian = jax.jacrev(call)(q, k, v)
    row = jax.grad(lambda q: call(q, k, v)[0, 1, 3, 2])(q)
    assert_same(jacobian[0, 1, 3, 2], row)


@every_implementation
def test_checkpoint_and_scan(implementation: str) -> None:
    q, k, v = operands()
    want = jax.value_and_grad(loss(implementation))(q, k, v)
    assert_same(jax.value_and_grad(jax.checkpoint(loss(implementation)))(q, k, v), want)

    def layers(q: jax.Array, k: jax.Array) -> jax.Array:
        def layer(carry: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
            return carry + attend(implementation)(carry, k, k), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), q, k)[0])

    def unrolled(q: jax.Array, k: jax.Array) -> jax.Array:
        for layer in k:
            q = q + attend(implementation)(q, layer, layer)
        return jnp.sum(q)

    several = jnp.stack([k, k + 1])
    assert_same(jax.jit(jax.grad(layers, (0, 1)))(q, several), jax.jit(jax.grad(unrolled, (0, 1)))(q, several))


@every_implementation
def test_gradients_of_gradients(implementation: str) -> None:
    q, k, v = (x[:1, :3, :2, :4] for x in operands())
    k, v = k[:, :, :1], v[:, :, :1]

    def penalty(implementation: str) -> Callable:
        call = loss(implementation, q_positions=np.arange(3))
        return jax.jit(jax.grad(lambda *a: jnp.sum(jax.grad(call)(*a) ** 2), argnums=(0, 1, 2)))

    assert_same(penalty(implementation)(q, k, v), penalty("reference")(q, k, v), 1e-4)


# Devices.

AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


@every_implementation
@AXIS_TYPES
@pytest.mark.parametrize("spec", [P("x"), P("x", None, "y")], ids=str)
def test_batch_and_heads_may_be_split(implementation: str, axis_type: AxisType, spec: P) -> None:
    mesh = mesh_of((2, 2), ("x", "y"), axis_type)
    args = operands()
    want = jax.jit(jax.value_and_grad(loss(implementation), argnums=(0, 1, 2)))(*args)
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
        program = jax.jit(jax.value_and_grad(loss(implementation), argnums=(0, 1, 2)))
        assert_same(program(*split), want)
        text = jax.jit(attend(implementation)).lower(*split).compile().as_text()
        output = attend(implementation)(*split)
    assert "all-gather" not in text
    assert output.sharding.is_equivalent_to(split[0].sharding, 4)
    assert_same(output, attend(implementation)(*args))


@every_implementation
@pytest.mark.parametrize("spec", [P(None, "x"), P(None, None, None, "x")], ids=str)
def test_other_axes_are_refused(implementation: str, spec: P) -> None:
    mesh = mesh_of((2,), ("x",))
    q, k, v = operands()
    with pytest.raises(NotImplementedError, match=r"key axis \d is split over devices: .*merge_across"):
        attend(implementation)(q, jax.device_put(k, NamedSharding(mesh, spec)), v)


@every_implementation
def test_positions_are_split_along_the_batch_alone(implementation: str) -> None:
    mesh = mesh_of((2,), ("x",))
    args = operands()

    def call(spec: P) -> jax.Array:
        positions = jax.device_put(np.tile(np.arange(S), (B, 1)), NamedSharding(mesh, spec))
        return attend(implementation, kv_positions=positions)(*args)

    assert_same(call(P("x")), attend(implementation)(*args))
    with pytest.raises(NotImplementedError, match="kv_positions axis 1 is split over devices"):
        call(P(None, "x"))


@every_implementation
def test_explicit_meshes_that_nobody_set(implementation: str) -> None:
    mesh = mesh_of((2, 2), ("x", "y"), AxisType.Explicit)
    q, k, v = operands()
    split = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((q, P("x", None, "y")), (k, P()), (v, P()))]
    assert_same(attend(implementation)(*split), attend(implementation)(q, k, v))


@every_implementation
def test_shard_map_over_batch_and_heads(implementation: str) -> None:
    mesh = mesh_of((2, 2), ("rows", "heads"))
    spec = P("rows", None, "heads")
    local = jax.shard_map(attend(implementation), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)

    def total(call: Callable) -> Callable:
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(call(*a))), argnums=(0, 1, 2)))

    assert_same(total(local)(*operands()), total(attend(implementation))(*operands()))


def over_keys(implementation: str, positions: bool = True) -> Callable:
    """Attention with the keys split over four devices: the statistics of each part, merged."""

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of((4,), ("keys",)),
        in_specs=(P(), P(None, "keys"), P(None, "keys"), P("keys")),
        out_specs=(P(), P()),
    )
    def call(query: jax.Array, key: jax.Array, value: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
        options = OPTIONS | {"kv_positions": where if positions else None}
        stats = attention_stats(query, key, value, implementation=implementation, **options)
        return finalize(merge_across(stats, "keys"))

    return lambda *args: call(*args, jnp.arange(S))


@every_implementation
def test_keys_split_over_devices_by_statistics(implementation: str) -> None:
    def total(call: Callable) -> Callable:
        def value(*args: jax.Array) -> jax.Array:
            output, lse = call(*args)
            return jnp.sum(jnp.sin(output)) + jnp.sum(lse**2)

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))

    want = total(attend(implementation, return_lse=True))(*operands())
    assert_same(total(over_keys(implementation))(*operands()), want)
    with pytest.raises(AssertionError):  # each part taken for the first keys
        assert_same(total(over_keys(implementation, positions=False))(*operands()), want)


@every_implementation
def test_dropout_bits_do_not_depend_on_the_split(implementation: str) -> None:
    mesh = mesh_of((2, 2), ("rows", "heads"))
    spec = P("rows", None, "heads")
    options = {"dropout_rate": 0.4, "dropout_key": jax.random.key(5)}

    def local(*args: jax.Array, offset: bool = True) -> jax.Array:
        row, head = jax.lax.axis_index("rows"), jax.lax.axis_index("heads")
        offsets = (row * (B // 2), head * (N // 2), 0, 0) if offset else None
        return attend(implementation, dropout_offsets=offsets, **options)(*args)

    def split(call: Callable) -> jax.Array:
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))(*operands())

    want = attend(implementation, **options)(*operands())
    assert_same(split(local), want)
    with pytest.raises(AssertionError):
        assert_same(split(functools.partial(local, offset=False)), want)


@every_implementation
def test_one_program_serves_all_values(implementation: str) -> None:
    traces = 0

    @jax.jit
    def call(lengths: jax.Array, positions: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        return attend(implementation, kv_lengths=lengths, q_positions=positions)(*operands())

    for step in range(3):
        call(jnp.array([step, step + 1]), jnp.arange(step, step + T))
    assert traces == 1
