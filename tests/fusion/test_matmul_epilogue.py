"""A matmul with its tail against numpy in float64, in every form, with gradients and on a split contraction."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashspec.fusion import backends, matmul_epilogue, plan_matmul_epilogue, xla
from flashspec.fusion.request import make_request
from tests.mutants import mutant

ERF = np.vectorize(math.erf, otypes=[np.float64])
PHI = {
    None: lambda z: z,
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "gelu_exact": lambda z: 0.5 * z * (1 + ERF(z / np.sqrt(2))),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "relu": lambda z: np.maximum(z, 0),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
}
OPTIONS = [
    chosen for count in range(5) for chosen in itertools.combinations(("bias", "gate", "gate_bias", "residual"), count)
]
OPTIONS = [chosen for chosen in OPTIONS if "gate" in chosen or "gate_bias" not in chosen]
DTYPES = ["bfloat16", "float16", "float32"]


def operands(options, dtype, shape=(3, 5, 16, 8)):
    """x [.., C], w [C, F] and what is asked for, of about unit size."""
    *leading, inputs, outputs = shape
    rng = np.random.default_rng(len(options))

    def normal(*size):
        return jnp.asarray(rng.normal(size=size), dtype)

    scale = jnp.asarray(max(inputs, 1) ** -0.5, dtype)
    made = {"x": normal(*leading, inputs), "w": normal(inputs, outputs) * scale}
    made |= {name: normal(outputs) for name in ("bias", "gate_bias") if name in options}
    made |= {"gate": normal(inputs, outputs) * scale} if "gate" in options else {}
    return made | ({"residual": normal(*leading, outputs)} if "residual" in options else {})


def exact(x, w, bias=0.0, gate=None, gate_bias=0.0, residual=0.0, activation=None):
    """The formula, in float64."""
    x, w, bias, gate_bias, residual = (np.asarray(a, np.float64) for a in (x, w, bias, gate_bias, residual))
    z = x @ w + bias
    y = PHI[activation](z) if gate is None else PHI[activation](x @ np.asarray(gate, np.float64) + gate_bias) * z
    return y + residual


def call(made, function=matmul_epilogue, **options):
    gate = made.get("gate")
    paired = {"gate": (gate, made["gate_bias"])} if "gate_bias" in made else {"gate": gate}
    return function(made["x"], made["w"], made.get("bias"), residual=made.get("residual"), **paired, **options)


def assert_rounded_once(got, made, activation):
    """Half a unit in the last place of the result's dtype, and what float32 sums leave."""
    want, unit = exact(**made, activation=activation), float(jnp.finfo(got.dtype).eps)
    allowed = 0.505 * unit * np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 1e-4)))) + 4e-6
    assert np.all(np.abs(np.asarray(got, np.float64) - want) <= allowed)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
def test_every_form_is_the_formula_rounded_once(options, dtype, implementation):
    made = operands(options, dtype)
    for activation in ("silu", None):
        got = call(made, activation=activation, implementation=implementation)
        assert got.dtype == dtype
        assert_rounded_once(got, made, activation)


@pytest.mark.parametrize("activation", PHI)
def test_every_activation_is_the_formula(activation):
    made = operands(("bias", "gate"), "float32")
    assert_rounded_once(call(made, activation=activation), made, activation)


WRONG = {
    "the activation before the bias": lambda m: PHI["silu"](exact(m["x"], m["w"])) + np.asarray(m["bias"], np.float64),
    "the residual before the activation": lambda m: PHI["silu"](
        exact(m["x"], m["w"], m["bias"], residual=m["residual"])
    ),
    "the bias twice": lambda m: exact(m["x"], m["w"], 2 * m["bias"], residual=m["residual"], activation="silu"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_order_is_seen(wrong):
    made = operands(("bias", "residual"), "float32")
    assert_rounded_once(call(made, activation="silu"), made, "silu")
    with pytest.raises(AssertionError):
        assert_rounded_once(jnp.asarray(WRONG[wrong](made), jnp.float32), made, "silu")


def test_a_gate_on_the_wrong_branch_is_seen():
    made = operands(("gate", "bias", "gate_bias"), "float32")
    swapped = {
        "x": made["x"],
        "w": made["gate"],
        "gate": made["w"],
        "bias": made["gate_bias"],
        "gate_bias": made["bias"],
    }
    with pytest.raises(AssertionError):
        assert_rounded_once(call(swapped, activation="silu"), made, "silu")


def test_a_product_rounded_before_its_tail_is_seen():
    rounding = mutant(xla, ("    return _half_product(x, w)\n", "    return jnp.matmul(x, w).astype(np.float32)\n"))
    made = operands(("bias",), "bfloat16")
    request, arrays = make_request(**made, activation="silu")
    assert_rounded_once(xla.xla_epilogue(request, arrays), made, "silu")
    with pytest.raises(AssertionError):
        assert_rounded_once(rounding.xla_epilogue(request, arrays), made, "silu")


def test_jax_s_own_functions_are_known_by_their_names():
    made = operands((), "float32")
    plans = [call(made, plan_matmul_epilogue, activation=phi) for phi in ("gelu", jax.nn.gelu, jax.nn.silu, jnp.tanh)]
    assert [plan.request.activation for plan in plans] == ["gelu_tanh", "gelu_tanh", "silu", "tanh"]
    np.testing.assert_allclose(call(made, activation=jnp.sin), np.sin(exact(**made)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(16, 8), (1, 16, 8), (0, 16, 8), (4, 0, 8), (4, 16, 0), (2, 1, 3, 16, 8)])
def test_any_leading_axes_and_empty_ones(shape):
    made = operands(("bias",), "float32", shape)
    got = call(made, activation="relu")
    assert got.shape == made["x"].shape[:-1] + made["w"].shape[-1:]
    np.testing.assert_allclose(got, exact(**made, activation="relu"), rtol=1e-5, atol=1e-5)


def assert_close(got, want, tolerance):
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance)


def loss(made, **options):
    return jnp.sum(jnp.sin(call(made, **options)))


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", None])
def test_gradients_are_those_of_finite_differences(activation, x64):
    made = operands(OPTIONS[-1], "float64", (3, 4, 5))
    one = functools.partial(loss, activation=activation)
    step = {name: jnp.asarray(np.random.default_rng(1).normal(size=a.shape)) for name, a in made.items()}
    rate = 1e-6
    ends = [one(jax.tree.map(lambda a, s, sign=sign: a + sign * rate * s, made, step)) for sign in (1, -1)]
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, s: jnp.sum(g * s), jax.grad(one)(made), step)))
    assert float(slope) == pytest.approx(float(ends[0] - ends[1]) / (2 * rate), rel=1e-3)


def assert_gradients(module_product, dtype):
    """Gradients of a 16-bit product against float32's: as near as the rounding of its cotangent allows."""
    x, w = (operands((), dtype)[name] for name in ("x", "w"))

    def total(product, x, w):
        return jnp.sum(jnp.sin(product(x, w)))

    got = jax.grad(functools.partial(total, module_product), argnums=(0, 1))(x, w)
    wide = [a.astype(jnp.float32) for a in (x, w)]
    want = jax.grad(functools.partial(total, lambda x, w: jnp.matmul(x, w, precision="highest")), argnums=(0, 1))(*wide)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        gap = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
        assert np.all(gap <= 2 * float(jnp.finfo(dtype).eps) * np.abs(np.asarray(other)).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_16_bits(dtype):
    assert_gradients(xla.product, dtype)
    transposed = mutant(xla, ("dot(gradient, w, axes=(-1, 1))", "dot(gradient, w + w, axes=(-1, 1))"))
    with pytest.raises(AssertionError):
        assert_gradients(transposed.product, dtype)


def test_it_goes_through_jax_s_transformations():
    made = operands(("bias", "residual"), "float32", (2, 3, 4, 5))
    options = {"activation": "silu"}
    want = call(made, **options)
    mapped = jax.vmap(lambda x, r: matmul_epilogue(x, made["w"], made["bias"], residual=r, **options))
    np.testing.assert_allclose(mapped(made["x"], made["residual"]), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.jit(functools.partial(call, **options))(made), want, rtol=1e-6, atol=1e-6)
    rebuilt = jax.grad(jax.checkpoint(functools.partial(loss, **options)))(made)
    for one, other in zip(
        *map(jax.tree.leaves, (rebuilt, jax.grad(functools.partial(loss, **options))(made))), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def split_contraction(made, kind):
    """The contraction of x and w over the devices of a virtual mesh, the rest on each of them."""
    mesh = jax.make_mesh((4,), ("c",), axis_types=(kind,), devices=jax.devices()[:4])
    specs = {"x": P(None, None, "c"), "w": P("c", None), "gate": P("c", None)}
    return mesh, {name: jax.device_put(a, NamedSharding(mesh, specs.get(name, P()))) for name, a in made.items()}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("options", [("bias", "residual"), OPTIONS[-1]], ids=len)
def test_a_split_contraction_is_summed_before_the_tail(kind, options):
    made = operands(options, "float32")
    mesh, split = split_contraction(made, kind)
    assert_rounded_once(call(split, activation="gelu_tanh"), made, "gelu_tanh")
    jitted = jax.jit(functools.partial(call, activation="gelu_tanh"))
    assert_rounded_once(jitted(split), made, "gelu_tanh")
    assert "all-reduce" in jitted.lower(split).compile().as_text()
    gradient = jax.grad(functools.partial(loss, activation="silu"))
    with jax.set_mesh(mesh):  # jax's own grad asks for it
        split_gradient = gradient(split)
    assert_close(split_gradient, gradient(made), 1e-4)


def test_summing_after_the_tail_is_seen():
    """WRONG: each device applies the tail to its part of the sum, and the parts are added."""
    made = operands(("bias", "residual"), "float32")
    mesh, split = split_contraction(made, AxisType.Auto)

    def tail_then_sum(x, w, bias, residual):
        return jax.lax.psum(matmul_epilogue(x, w, bias, activation="gelu_tanh", residual=residual), "c")

    specs = (P(None, None, "c"), P("c", None), P(), P())
    wrong = jax.shard_map(tail_then_sum, mesh=mesh, in_specs=specs, out_specs=P())
    with pytest.raises(AssertionError):
        assert_rounded_once(wrong(*(split[name] for name in ("x", "w", "bias", "residual"))), made, "gelu_tanh")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_the_plan_names_what_is_in_the_compiled_program(implementation):
    made = operands(("bias",), "float32")
    plan = call(made, plan_matmul_epilogue, activation="silu", implementation=implementation)
    assert plan.forward == plan.backward == implementation
    text = (
        jax.jit(functools.partial(call, activation="silu", implementation=implementation))
        .lower(made)
        .as_text(debug_info=True)
    )
    for name in ("xla", "reference"):
        assert (f"flashspec.fusion.{name}" in text) == (name == implementation)


def test_the_plan_counts_work():
    """4 rows, 3 inputs, 2 outputs, 2 bytes: operands and result, and what each step of the tail writes and rereads."""
    shapes = {"x": (4, 3), "w": (3, 2), "bias": (2,), "gate": (3, 2), "gate_bias": (2,), "residual": (4, 2)}
    made = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    plan = call(made, plan_matmul_epilogue, activation="silu", device="NVIDIA H200")
    assert plan.flops == 2 * 2 * 4 * 3 * 2
    assert plan.bytes == 2 * (12 + 2 * 6 + 2 * 2 + 8 + 8)
    # Two products and five steps write, of which the last is the result; the five steps read six intermediates, and
    # the second product reads x again.
    assert plan.unfused_bytes == plan.bytes + 2 * (8 * (2 + 5 - 1 + 6) + 12)
    assert plan.lower_bound_seconds == pytest.approx(plan.bytes / 4.8e12)
    bare = plan_matmul_epilogue(made["x"], made["w"], device="cpu")
    assert (bare.unfused_bytes, bare.lower_bound_seconds) == (bare.bytes, None)
    text = str(plan)
    assert "forward xla, backward xla" in text
    assert "rejected hopper: needs inputs and outputs in multiples of 64" in text


def opaque(request, operands):
    """A forward as a kernel is: nothing differentiates through it."""
    return jax.lax.stop_gradient(xla.xla_epilogue(request, operands))


def test_a_kernel_without_a_backward_gets_the_one_that_it_names(monkeypatch):
    """Named in the plan, and with the gradients of "xla"; without a name of another, as a control, they would be 0."""
    made = operands(("bias", "residual"), "float32")
    for name, backward in (("opaque", "xla"), ("opaque, alone", "opaque, alone")):
        backend = backends.Backend(name, lambda request: (), opaque, backward=backward)
        monkeypatch.setitem(backends.BACKENDS, name, backend)
    options = {"activation": "silu", "implementation": "opaque"}
    plan = call(made, plan_matmul_epilogue, **options)
    assert (plan.forward, plan.backward) == ("opaque", "xla")
    assert_rounded_once(call(made, **options), made, "silu")
    want = jax.grad(functools.partial(loss, activation="silu", implementation="xla"))(made)
    assert_close(jax.grad(functools.partial(loss, **options))(made), want, 1e-6)
    with pytest.raises(AssertionError):
        assert_close(
            jax.grad(functools.partial(loss, **options | {"implementation": "opaque, alone"}))(made), want, 1e-6
        )


@pytest.mark.parametrize("name", ["hopper", "tpu"])
def test_kernels_of_other_devices_refuse_with_a_reason(name):
    with pytest.raises(NotImplementedError, match=f"{name}: runs on"):
        call(operands((), "float32"), implementation=name)
    np.testing.assert_array_equal(
        call(operands((), "float32"), implementation=(name, "xla")), call(operands((), "float32"))
    )


ONES = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"w": np.ones((4, 2), np.float32)}, r"`w`: expected shape \[C, F\] with C = 3 on axis 0"),
        ({"w": ONES[1].astype(np.float16)}, "`w`: expected the dtype of x, float32"),
        ({"x": np.float32(1)}, "`x`: expected rank 1 or more"),
        ({"x": np.ones((4, 3), np.int32)}, "`x`: expected dtype bfloat16"),
        ({"x": np.ones((4, 3))}, "`x`: expected float32 or narrower unless jax_enable_x64"),
        ({"bias": np.ones(3, np.float32)}, "`bias`: expected shape"),
        ({"gate": ONES[0]}, "`gate`: expected shape"),
        ({"gate": (ONES[0][0], ONES[1])}, "`gate`: expected weights"),
        ({"gate": (ONES[1], ONES[1])}, "`gate_bias`: expected rank 1"),
        ({"residual": np.ones(2, np.float32)}, "`residual`: expected shape"),
        ({"activation": "swish"}, "`activation`: expected one of gelu_tanh"),
        ({"implementation": "cublas"}, "`implementation`: expected one of"),
        ({"implementation": ()}, "`implementation`"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        matmul_epilogue(**({"x": ONES[0], "w": ONES[1]} | arguments))
    with pytest.raises(ValueError, match="`device`"):
        plan_matmul_epilogue(*ONES, device="abacus")
