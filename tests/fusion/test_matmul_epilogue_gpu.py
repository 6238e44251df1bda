"""A matmul with its tail on an NVIDIA GPU, at the sizes that matter there (python -m pytest -m gpu)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flashspec.fusion import gated_product, matmul_epilogue, plan_gated_product, plan_matmul_epilogue
from pallas_kernels.gpu.hopper.matmul_epilogue_activations import ACTIVATIONS
from tests.pallas_kernels.hopper.test_matmul_epilogue import Z, assert_within_the_bound

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows", [1, 16, 257])
@pytest.mark.parametrize("gated", [False, True])
def test_every_implementation_that_is_chosen_equals_the_reference(dtype, rows, gated):
    keys = jax.random.split(jax.random.key(rows), 5)
    x, w, gate, residual = (
        jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
        for key, shape, scale in zip(
            keys, ((rows, 512), (512, 768), (512, 768), (rows, 768)), (1, 0.04, 0.04, 1), strict=False
        )
    )
    bias = jax.random.normal(keys[4], (768,), dtype)
    options = {"activation": "silu", "residual": residual, "gate": gate if gated else None}

    def loss(implementation, x, w):
        y = matmul_epilogue(x, w, bias, implementation=implementation, **options)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    results = [
        jax.jit(jax.value_and_grad(lambda x, w, name=name: loss(name, x, w), argnums=(0, 1), has_aux=True))(x, w)
        for name in (None, "reference")
    ]
    unit = float(jnp.finfo(dtype).eps)
    for got, want in zip(*map(jax.tree.leaves, [(r[0][1], r[1]) for r in results]), strict=True):
        got, want = (np.asarray(array, np.float32) for array in (got, want))
        assert np.all(np.abs(got - want) <= 4 * unit * np.abs(want).max())


def hopper() -> bool:
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def operands(rows, inputs, outputs, dtype="bfloat16"):
    keys = jax.random.split(jax.random.key(rows), 6)
    shapes = {"x": (rows, inputs), "w": (inputs, outputs), "bias": (outputs,), "residual": (rows, outputs)}
    made = {
        name: jax.random.normal(key, shape, dtype) for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    made["gate"] = tuple(
        jax.random.normal(key, shape, dtype) for key, shape in ((keys[4], (inputs, outputs)), (keys[5], (outputs,)))
    )
    scale = jnp.asarray(inputs**-0.5, dtype)
    return made | {"w": made["w"] * scale, "gate": (made["gate"][0] * scale, made["gate"][1])}


@pytest.mark.skipif("not hopper()")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_chip_s_activations_are_as_exact_as_they_say(name):
    """The instruction itself, over a dense range; of an argument rounded to bfloat16 it would not be."""
    z = np.pad(Z, (0, -Z.size % 1024))

    def body(source, result):
        here = pl.ds(jax.lax.axis_index("block") * 1024, 1024)
        h = plgpu.load(source.at[here], layout=plgpu.Layout.WG_STRIDED((1024,), vec_size=4), optimized=False)
        result.at[here][...] = ACTIVATIONS[name](h)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(z.shape, jnp.float32),
        grid=(z.size // 1024,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    assert_within_the_bound(name, z, jax.jit(call)(jnp.asarray(z) / 2))
    rounded = jnp.asarray(z).astype(jnp.bfloat16).astype(jnp.float32)
    with pytest.raises(AssertionError):
        assert_within_the_bound(name, z, jax.jit(call)(rounded / 2))


@pytest.mark.skipif("not hopper()")
@pytest.mark.parametrize(
    "chosen", [(), ("bias",), ("bias", "residual"), ("gate",), ("bias", "gate", "residual")], ids="+".join
)
@pytest.mark.parametrize("rows", [3, 16, 72, 1000, 4096])
def test_the_hopper_kernels_equal_the_reference(rows, chosen):
    """Whole and narrow tiles, several rounds of them, rows that need padding, and the kernel for few rows."""
    given = {name: array for name, array in operands(rows, 1024, 2944).items() if name in ("x", "w", *chosen)}

    def computed(given, activation, implementation):
        return np.asarray(matmul_epilogue(**given, activation=activation, implementation=implementation), np.float32)

    got, want = (computed(given, "gelu_tanh", name) for name in ("hopper", "reference"))
    factors = [computed({name: given[name] for name in ("x", "w", *chosen) if name in ("x", "w", "bias")}, None, "xla")]
    if "gate" in chosen:
        weights, bias = given["gate"]
        factors.append(computed({"x": given["x"], "w": weights, "bias": bias}, None, "xla"))
    # One unit in the last place: both are rounded once, of float32 sums in another order. And what the tail may leave.
    tail = 2**-12 * np.abs(np.prod(factors, axis=0))
    assert np.all(np.abs(got - want) <= 2**-7 * np.maximum(np.abs(want), 2**-4) + 1.01 * tail)


@pytest.mark.skipif("not hopper()")
@pytest.mark.parametrize("rows", [16, 256])
def test_the_plan_names_the_kernel_of_the_program(rows):
    given = operands(rows, 512, 1024)
    plan = plan_matmul_epilogue(**given, activation="silu", implementation="hopper")
    call = jax.jit(lambda given: matmul_epilogue(**given, activation="silu", implementation="hopper"))
    assert plan.forward == "hopper"
    text = call.lower(given).compile().as_text()
    assert "mosaic_gpu" in text
    assert "flashspec.fusion.hopper" in text


@pytest.mark.skipif("not hopper()")
@pytest.mark.parametrize("rows", [16, 1000])
def test_a_gate_beside_what_it_gates_is_read_where_it_lies(rows):
    """The same bits, and no copy of the weights."""
    made = operands(rows, 1024, 14336)
    given = {"x": made["x"], "w": made["w"], "gate": made["gate"][0]}
    pair = jnp.stack([given["gate"], given["w"]], axis=1)
    call = jax.jit(lambda **given: matmul_epilogue(**given, activation="silu", implementation="hopper"))
    together = call.lower(x=given["x"], w=pair).compile()
    np.testing.assert_array_equal(together(x=given["x"], w=pair), call(**given))
    assert together.memory_analysis().temp_size_in_bytes < pair.nbytes // 4


@pytest.mark.skipif("not hopper()")
@pytest.mark.parametrize(("rows", "name"), [(16, "unfused"), (192, "unfused"), (256, "hopper")])
def test_a_gated_product_is_computed_by_whom_its_plan_names(rows, name):
    """Equal to the product that is rounded before it is activated: to two roundings, and what the tail may leave."""

    def unfused(x, w):
        both = jnp.tensordot(x, w, 1)
        return jax.nn.silu(both[:, 0]) * both[:, 1]

    made = operands(rows, 4096, 14336)
    x, pair = made["x"], jnp.stack([made["gate"][0], made["w"]], axis=1)
    assert plan_gated_product(x, pair, activation="silu").forward == name
    call = jax.jit(lambda x, w: gated_product(x, w, activation="silu", unfused=unfused)).lower(x, pair).compile()
    assert ("flashspec.fusion.hopper" in call.as_text()) == (name == "hopper")
    got, want = (np.asarray(f(x, pair), np.float32) for f in (call, jax.jit(unfused)))
    factors = np.asarray(jnp.tensordot(x, pair, 1), np.float32)
    tail = 2**-12 * np.abs(np.prod(factors, axis=1))
    assert np.all(np.abs(got - want) <= 2**-6 * np.maximum(np.abs(want), 2**-4) + 1.01 * tail)
