"""The TPU matmul with its tail behind the public call, in the interpreter."""

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

from flashspec.fusion import matmul_epilogue, tpu
from flashspec.fusion.backends import BACKENDS
from flashspec.fusion.request import make_request
from pallas_kernels.tpu.matmul_epilogue import matmul_epilogue as kernel


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compute = functools.partial(tpu.tpu_epilogue, kernel, interpret=True)
    backend = dataclasses.replace(BACKENDS["tpu"], supports=tpu.kernel_refusals, compute=compute)
    monkeypatch.setitem(BACKENDS, "tpu", backend)  # type: ignore[arg-type]
    jax.clear_caches()
    yield
    jax.clear_caches()


def operands(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 5, 24), "w": (24, 40), "bias": (40,), "residual": (2, 5, 40)}
    given: dict[str, Any] = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    return given | {"gate": tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in ((24, 40), (40,)))}


@pytest.mark.parametrize("activation", [None, "silu"])
def test_values_and_gradients(activation: str | None, interpreted: None) -> None:
    def loss(implementation: str, given: dict[str, Any]) -> jax.Array:
        return jnp.sum(jnp.sin(matmul_epilogue(**given, activation=activation, implementation=implementation)))

    got, want = (jax.value_and_grad(functools.partial(loss, name))(operands()) for name in ("tpu", "reference"))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-4)
    other = jax.value_and_grad(functools.partial(loss, "reference"))(operands() | {"bias": jnp.zeros(40)})
    assert not np.allclose(np.asarray(other[0]), np.asarray(got[0]), rtol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_rows_and_outputs_split_over_devices(kind: AxisType, interpreted: None) -> None:
    """Over explicit axes; or in an eager call, which shows its split."""
    mesh = jax.make_mesh((2, 4), ("rows", "outputs"), axis_types=(kind,) * 2)
    specs = {"x": P("rows"), "w": P(None, "outputs"), "bias": P("outputs"), "residual": P("rows", None, "outputs")}
    specs["gate"] = P(None, "outputs"), P("outputs")
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    given = operands()
    placed = {name: jax.tree.map(place, given[name], spec) for name, spec in specs.items()}

    def call(implementation: str, given: dict[str, Any]) -> jax.Array:
        return matmul_epilogue(**given, activation="silu", implementation=implementation)

    want = call("reference", given)
    got = call("tpu", placed)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-4)
    assert len({shard.index for shard in got.addressable_shards}) == 8
    if kind == AxisType.Explicit:
        program = jax.jit(functools.partial(call, "tpu")).lower(placed).compile()
        assert "all-gather" not in program.as_text()
        gradient = jax.jit(jax.grad(lambda given: jnp.sum(jnp.sin(call("tpu", given)))))(placed)
        other = jax.grad(lambda given: jnp.sum(jnp.sin(call("reference", given))))(given)
        np.testing.assert_allclose(np.asarray(gradient["w"]), other["w"], rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(NotImplementedError, match=r"tracing does not show.*jax\.shard_map"):
            jax.jit(functools.partial(call, "tpu"))(placed)
    placed["x"], placed["w"] = place(given["x"], P(None, None, "outputs")), place(given["w"], P("outputs"))
    with pytest.raises(NotImplementedError, match="devices split what is summed over"):
        call("tpu", placed)


def test_what_is_refused() -> None:
    def reasons(activation: Any = None, dtype: Any = np.float32, platform: str = "tpu") -> str:
        given = operands(dtype)
        request, _ = make_request(given["x"], given["w"], activation=activation, platform=platform)
        return " ".join(BACKENDS["tpu"].supports(request))

    assert not reasons("silu")
    assert "not on cpu" in reasons(platform="cpu")
    assert "not gelu_exact" in reasons("gelu_exact")
    assert "not <" in reasons(lambda z: z * 2)
    assert "not in float16" in reasons(dtype=np.float16)
