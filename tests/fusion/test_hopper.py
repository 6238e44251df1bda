"""The Hopper matmul with its tail behind the public call, over stand-ins for its kernels."""

import dataclasses
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashspec.fusion import EpiloguePlan, hopper, matmul_epilogue, plan_matmul_epilogue, splitting
from flashspec.fusion.backends import BACKENDS
from flashspec.fusion.reference import reference_epilogue
from flashspec.fusion.request import EpilogueOperands, make_request
from pallas_kernels.gpu.hopper.matmul_epilogue_config import MatmulShape
from tests.mutants import mutant

SEEN: list[tuple[str, tuple[int, ...]]] = []


def stand_in(name: str, *args: Any, config: Any, activation: Any, **options: Any) -> jax.Array:
    """The reference, for what the kernel of this name takes."""
    x, w, bias = args
    operands = EpilogueOperands(x, w, bias, options["gate"], options["gate_bias"], options["residual"])
    residual = 0 if operands.residual is None else operands.residual.dtype.itemsize
    products = 1 if operands.gate is None and w.ndim == 2 else 2
    shape = MatmulShape(x.shape[0], w.shape[-1], w.shape[0], products, residual)
    assert not config.refusals(shape), config.refusals(shape)
    SEEN.append((name, x.shape))
    request, _ = make_request(x, w, activation=activation)
    return reference_epilogue(request, operands)


KERNELS = hopper.Kernels(functools.partial(stand_in, "many"), functools.partial(stand_in, "few"))


def use(monkeypatch: pytest.MonkeyPatch, module: ModuleType = hopper) -> None:
    compute = functools.partial(module.hopper_epilogue, KERNELS)
    backend = dataclasses.replace(BACKENDS["hopper"], supports=hopper.kernel_refusals, compute=compute)
    monkeypatch.setitem(BACKENDS, "hopper", backend)  # type: ignore[arg-type]
    jax.clear_caches()
    SEEN.clear()


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use(monkeypatch)
    yield
    jax.clear_caches()


def operands(leading: tuple[int, ...] = (2, 5), inputs: int = 128, outputs: int = 128) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*size: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.normal(size=size) * (inputs**-0.5 if size == (inputs, outputs) else 1), dtype)

    gate = normal(inputs, outputs), normal(outputs)
    residual = normal(*leading, outputs, dtype=jnp.float32)
    return {
        "x": normal(*leading, inputs),
        "w": normal(inputs, outputs),
        "bias": normal(outputs),
        "gate": gate,
        "residual": residual,
    }


ours = functools.partial(matmul_epilogue, activation="silu", implementation="hopper")
reference = functools.partial(matmul_epilogue, activation="silu", implementation="reference")


def assert_near(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert x.shape == y.shape
        assert np.all(np.abs(x - y) <= 2**-6 * np.abs(y).max())


def test_values_and_gradients(standing_in: None) -> None:
    """Ten rows, which the kernel takes as sixteen; backwards by XLA."""

    def loss(implementation: str, given: dict[str, Any]) -> jax.Array:
        y = matmul_epilogue(**given, activation="silu", implementation=implementation)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    assert_near(ours(**operands()), reference(**operands()))
    assert SEEN[-1] == ("few", (16, 128))
    got, want = (jax.grad(functools.partial(loss, name))(operands()) for name in ("hopper", "reference"))
    assert_near(got, want)
    other = jax.grad(functools.partial(loss, "reference"))(operands() | {"bias": jnp.ones(128, jnp.bfloat16)})
    with pytest.raises(AssertionError):
        assert_near(got, other)


@pytest.mark.parametrize(("rows", "outputs", "kernel"), [(5, 128, "few"), (64, 192, "few"), (65, 128, "many")])
def test_the_kernel_that_suits_the_sizes(rows: int, outputs: int, kernel: str, standing_in: None) -> None:
    given = operands((rows,), outputs=outputs)
    assert_near(ours(**given), reference(**given))
    assert SEEN[-1] == (kernel, (rows if rows <= 8 else -(-rows // 8) * 8, 128))


def test_rows_that_vmap_adds_are_rows(standing_in: None) -> None:
    given = operands((3, 2, 5))
    mapped = jax.vmap(lambda x, r: ours(**(given | {"x": x, "residual": r})))
    assert_near(mapped(given["x"], given["residual"]), reference(**given))
    assert SEEN[-1] == ("few", (32, 128))


def test_weights_that_vmap_adds_go_one_by_one(standing_in: None) -> None:
    given = operands()
    scales = jnp.asarray([1, -2, 0.5], jnp.bfloat16)
    mapped = jax.vmap(lambda scale: ours(**(given | {"w": given["w"] * scale})))
    want = jnp.stack([reference(**(given | {"w": given["w"] * scale})) for scale in scales])
    assert_near(mapped(scales), want)


def paired(given: dict[str, Any]) -> dict[str, Any]:
    """The gate and what it gates in one array."""
    return given | {"w": jnp.stack([given["gate"][0], given["w"]], axis=1), "gate": None}


@pytest.mark.parametrize("implementation", ["hopper", "xla", "reference"])
def test_a_gate_may_lie_beside_what_it_gates(implementation: str, standing_in: None) -> None:
    given = operands()
    call = functools.partial(matmul_epilogue, activation="silu", implementation=implementation)
    plain = given | {"gate": given["gate"][0]}
    assert_near(call(**paired(given)), reference(**plain))
    assert bool(SEEN) == (implementation == "hopper")
    swapped = paired(given | {"w": plain["gate"], "gate": (given["w"], None)})
    with pytest.raises(AssertionError):
        assert_near(call(**swapped), reference(**plain))

    def loss(function: Any, given: dict[str, Any]) -> jax.Array:
        return jnp.sum(jnp.sin(function(**given).astype(jnp.float32)))

    got = jax.grad(functools.partial(loss, call))(paired(given))
    want = jax.grad(functools.partial(loss, reference))(plain)
    assert_near(got["w"], jnp.stack([want["gate"], want["w"]], axis=1))
    assert_near(got["x"], want["x"])


def test_a_gate_beside_what_it_gates_stays_split(standing_in: None) -> None:
    given = paired(operands((4, 3), 256, 512))
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    specs = {"w": P(None, None, "d"), "bias": P("d"), "residual": P(None, None, "d")}
    placed = {
        name: None if a is None else jax.device_put(a, NamedSharding(mesh, specs.get(name, P())))
        for name, a in given.items()
    }
    call = jax.jit(lambda given: ours(**given))
    assert_near(call(placed), reference(**given))
    assert "all-gather" not in str(call.lower(placed).compile().as_text())
    assert SEEN[-1] == ("few", (16, 256))


def test_two_gates_are_refused() -> None:
    given = paired(operands()) | {"gate": operands()["gate"]}
    with pytest.raises(ValueError, match="`gate`: expected None where w has the gate"):
        reference(**given)


def split(given: dict[str, Any], how: str, kind: AxisType = AxisType.Auto) -> tuple[Any, dict[str, Any]]:
    """The operands over four devices."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])
    rows, inputs, outputs = ("d" if how == name else None for name in ("rows", "inputs", "outputs"))
    w_inputs = "d" if how == "inputs of w" else inputs
    specs = {
        "x": P(rows, None, inputs),
        "w": P(w_inputs, outputs),
        "bias": P(outputs),
        "residual": P(rows, None, outputs),
    }
    specs["gate"] = (P(w_inputs, outputs), P(outputs))  # type: ignore[assignment]
    placed = {
        name: jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), given[name], specs[name])
        for name in given
    }
    return mesh, placed


@pytest.mark.parametrize("how", ["rows", "outputs", "inputs", "inputs of w"])
def test_split_operands_stay_split(how: str, standing_in: None) -> None:
    given = operands((4, 3), 256, 512)
    _, placed = split(given, how)
    call = jax.jit(lambda given: ours(**given))
    assert_near(call(placed), reference(**given))
    text = str(call.lower(placed).compile().as_text())
    assert "all-gather" not in text
    assert ("all-reduce" in text) == ("inputs" in how)  # before the tail, by XLA
    assert "inputs" in how or SEEN[-1] == ("few", {"rows": (3, 256), "outputs": (16, 256)}[how])


def test_a_mesh_in_explicit_mode(standing_in: None) -> None:
    given = operands((4, 3), 256, 512)
    _, placed = split(given, "rows", AxisType.Explicit)
    assert_near(ours(**placed), reference(**given))


def test_a_sum_after_the_tail_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """WRONG: each device applies the tail to its part of the sum, and the parts are added."""
    late = mutant(
        splitting,
        (
            'summed(_operands(names, arrays), functools.partial(lax.psum, axis_name=over["inputs"]))',
            'lax.psum(summed(_operands(names, arrays)), axis_name=over["inputs"])',
        ),
    )
    use(monkeypatch, mutant(hopper, lift=late.lift))
    given = operands((4, 3), 256, 512)
    _, placed = split(given, "inputs")
    with pytest.raises(AssertionError):
        assert_near(jax.jit(lambda given: ours(**given))(placed), reference(**given))
    jax.clear_caches()


def test_what_is_refused() -> None:
    def reasons(given: dict[str, Any], **facts: Any) -> str:
        options = {"activation": "silu", "platform": "cuda", "compute_capability": "9.0"} | facts
        request, _ = make_request(**given, **options)
        return " ".join(BACKENDS["hopper"].supports(request))

    given = operands()
    assert not reasons(given)
    assert "not on cpu" in reasons(given, platform="cpu")
    assert "not on cuda of compute capability 8.0" in reasons(given, compute_capability="8.0")
    assert "not gelu_exact" in reasons(given, activation="gelu_exact")
    assert "not <" in reasons(given, activation=lambda z: z * 2)
    assert "multiples of 64, not 120 inputs and 128 outputs" in reasons(operands(inputs=120))
    wide = {"x": jnp.zeros((8, 64)), "w": jnp.zeros((64, 64))}
    assert "not in float32" in reasons(wide)


def plan_of(rows: int, outputs: int, implementation: str | None = None) -> EpiloguePlan:
    """For 4096 inputs and GELU, on an H200."""
    shapes = {"x": (rows, 4096), "w": (4096, outputs), "bias": (outputs,)}
    given: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return plan_matmul_epilogue(**given, activation="gelu_tanh", implementation=implementation, device="NVIDIA H200")


def test_the_plan_has_the_launch() -> None:
    plan = plan_of(8192, 14336)
    assert (plan.forward, plan.backward) == ("hopper", "xla")
    assert plan.config["block_n"] == 256
    assert plan_of(16, 14336).config == {"warpgroups": 2, "stages": 6}


def test_the_plan_says_what_is_passed_over_as_slower() -> None:
    plan = plan_of(16, 2048)
    assert plan.forward == "xla"
    assert "hopper" not in plan.rejected
    assert "passed over hopper: is slower here than XLA: 32 tiles leave most of the 132" in str(plan)
    for other in (plan_of(16, 14336), plan_of(16, 2048, "hopper")):  # it is taken, or asked for
        assert (other.forward, other.passed_over) == ("hopper", {})
