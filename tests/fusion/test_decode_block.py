"""A decoder step between two attentions behind its function, over a stand-in for the kernel."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashspec.fusion import decode_block as module
from flashspec.fusion import decode_block_hopper, decode_block_xla
from flashspec.fusion.decode_block import (
    BlockForm,
    Heads,
    HeadWeights,
    MlpWeights,
    Places,
    decode_block,
    plan_decode_block,
    start,
)
from flashspec.fusion.decode_block_request import BlockArrays, BlockRequest, make_request
from pallas_kernels.gpu.hopper.decode_block_config import BlockShape
from tests.fusion import block_stand_in
from tests.mutants import mutant

FORM = BlockForm(Heads(2, 1, 64), 1e-5)
SLOTS = 8


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    block_stand_in.use(monkeypatch)
    yield
    module._execute.clear_cache()


def operands(rows: int = 3, options: bool = False, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Of a call between two attentions; the write of the second row is dropped."""
    rng = np.random.default_rng(rows)

    def normal(*size: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=size) * (size[0] ** -0.5 if len(size) > 1 else 1.0), dtype)

    (K, G, H), C, F = FORM.heads, 128, 256
    columns = K * (G + 2) * H
    angle = rng.normal(size=(rows, H // 2))
    slot = np.where(np.arange(rows) == 1, SLOTS, np.arange(rows) % SLOTS)
    index = (jnp.asarray(x, jnp.int32) for x in (np.arange(rows) % 2, slot))
    optional = (normal(columns), normal(H), normal(H)) if options else ()
    return {
        "stream": start(normal(rows, C) * 8),
        "attended": normal(rows, K * G * H) * 8,
        "mlp": MlpWeights(normal(K * G * H, C), normal(C), normal(C, 2, F), normal(F, C)),
        "heads": HeadWeights(normal(C), normal(C, columns), *optional),
        "places": Places(*index, *(jnp.asarray(x, jnp.float32) for x in (np.cos(angle), np.sin(angle)))),
        "cache": (normal(2, SLOTS, K, H) * 2, normal(2, SLOTS, K, H) * 2),
    }


FIRST = {"attended": None, "mlp": None}
LAST = {"heads": None, "places": None, "cache": None}


def run(given: dict[str, Any], implementation: Any = "hopper", form: BlockForm = FORM) -> Any:
    return decode_block(**given, form=form, implementation=implementation)


def assert_near(got: Any, want: Any, rows: int = 3) -> None:
    """To bfloat16's rounding, of what the rows hold."""
    parts = [got, want]
    for i, part in enumerate(parts):
        parts[i] = part._replace(stream=part.stream._replace(residual=part.stream.residual[:rows]))
    for x, y in zip(jax.tree.leaves(parts[0]), jax.tree.leaves(parts[1]), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert x.shape == y.shape
        assert np.all(np.abs(x - y) <= 2**-5 * np.abs(y).max())


@pytest.mark.parametrize("left_out", [{}, FIRST, LAST], ids=["between", "first", "last"])
@pytest.mark.parametrize("options", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_kernel_and_its_twin(left_out: dict[str, Any], options: bool, standing_in: None) -> None:
    given = operands(options=options) | left_out
    assert_near(run(given), run(given, "xla"))
    (plan,) = block_stand_in.SEEN
    assert (
        plan.products
        == {0: ("out", "gate_up", "down", "qkv"), 2: ("qkv",), 3: ("out", "gate_up", "down")}[len(left_out)]
    )


@pytest.mark.slow
def test_norms_of_one_plus_scale(standing_in: None) -> None:
    form = BlockForm(FORM.heads, 1e-5, unit_offset=True)
    assert_near(run(operands(options=True), form=form), run(operands(options=True), "xla", form))


def test_dropped_writes_keep_every_bit(standing_in: None) -> None:
    given = operands()
    for implementation in ("hopper", "xla"):
        result = run(given, implementation)
        for before, after in zip(given["cache"], (result.key, result.value), strict=True):
            changed = np.asarray((before != after).any((2, 3)))
            assert np.argwhere(changed).tolist() == [[0, 0], [0, 2]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"scales": (mlp.norm,)}', '"scales": (mlp.norm * 2,)}'),
        pytest.param("mlp.gate_up.reshape(", "mlp.gate_up[:, ::-1].reshape(", marks=pytest.mark.slow),
        pytest.param(
            "(heads.query_norm, heads.key_norm)", "(heads.key_norm, heads.query_norm)", marks=pytest.mark.slow
        ),
    ],
)
def test_a_wrong_adaptor_is_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_stand_in.use(monkeypatch, adaptor=mutant(decode_block_hopper, (old, new)))
    given = operands(options=True)
    with pytest.raises(AssertionError):
        assert_near(run(given), run(given, "xla"))
    module._execute.clear_cache()


@pytest.mark.slow
def test_gradients_are_the_twin_s(standing_in: None) -> None:
    given = operands()

    def loss(implementation: str, mlp: MlpWeights, cache: Any) -> jax.Array:
        result = run(given | {"mlp": mlp, "cache": cache}, implementation)
        wide = (x.astype(jnp.float32) for x in (result.key, result.value, result.query))
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)) for x in wide)

    got, want = (jax.grad(loss, (1, 2))(name, given["mlp"], given["cache"]) for name in ("hopper", "xla"))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(np.asarray(x - y, np.float32)).max() <= 2**-6 * np.abs(np.asarray(y, np.float32)).max()


def test_a_mapped_call_is_the_twin(standing_in: None) -> None:
    """A kernel of more programs than multiprocessors would wait for ever."""
    given = operands()
    attended = jnp.stack([given["attended"], given["attended"] * 2])
    mapped = [jax.vmap(lambda a, n=name: run(given | {"attended": a}, n).query)(attended) for name in ("hopper", "xla")]
    np.testing.assert_array_equal(*map(np.asarray, mapped))
    assert len(block_stand_in.SEEN) <= 1  # only to find the shapes of results
    assert np.abs(np.asarray(mapped[0][0] - mapped[0][1], np.float32)).max() > 0.1


def test_xla_is_the_default() -> None:
    for x, y in zip(jax.tree.leaves(run(operands(), None)), jax.tree.leaves(run(operands(), "xla")), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_the_twin_s_products_are_exact_in_float32() -> None:
    """Against numpy, in float32."""
    given = operands(dtype=jnp.float32)
    mlp, rows = given["mlp"], 3
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), mlp)
    x = np.asarray(given["stream"].residual[:rows], np.float64) + np.asarray(given["attended"], np.float64) @ wide.out
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * wide.norm
    gate, up = y @ wide.gate_up[:, 0], y @ wide.gate_up[:, 1]
    want = x + gate / (1 + np.exp(-gate)) * up @ wide.down
    np.testing.assert_allclose(np.asarray(run(given, "xla").stream.residual[:rows]), want, rtol=1e-4, atol=1e-4)


def request(**changes: Any) -> BlockRequest:
    shape = changes.pop("shape", BlockShape(1, 4096, 14336, Heads(8, 4, 128)))
    facts = {"platform": "cuda", "compute_capability": "9.0", "device_kind": "NVIDIA H200"} | changes
    form = facts.pop("form", BlockForm(shape.heads, 1e-5))
    return BlockRequest(shape, form, facts.pop("dtype", np.dtype(jnp.bfloat16)), **facts)


def test_what_is_refused() -> None:
    def reasons(**changes: Any) -> str:
        return " ".join(decode_block_hopper.refusals(request(**changes)))

    assert not reasons()
    assert "not on cpu" in reasons(platform="cpu")
    assert "not on cuda of compute capability 8.0" in reasons(compute_capability="8.0")
    assert "the multiprocessors of NVIDIA H200 MIG 1g.18gb" in reasons(device_kind="NVIDIA H200 MIG 1g.18gb")
    assert "of one device, not of a mesh" in reasons(on_mesh=True)
    assert "not in float32" in reasons(dtype=np.dtype(np.float32))
    assert "takes 1 to 16 rows, not 17" in reasons(shape=BlockShape(17, 4096, 14336, Heads(8, 4, 128)))
    assert "has the activation silu" in reasons(form=BlockForm(Heads(8, 4, 128), 1e-5, activation="gelu_tanh"))
    assert "among no more programs" in reasons(shape=BlockShape(1, 512, 1024, Heads(1, 4, 128)))


def test_the_plan_says_what_runs_and_why() -> None:
    llama = functools.partial(plan_decode_block, 1, 4096, 14336, BlockForm(Heads(8, 4, 128), 1e-5))
    plan = llama(device="NVIDIA H200")
    assert (plan.name, plan.rejected) == ("xla", {})
    assert "1.03 of XLA's speed" in plan.passed_over["hopper"]
    asked = llama(implementation="hopper", device="NVIDIA H200")
    assert (asked.name, asked.passed_over) == ("hopper", {})
    assert asked.config == {"programs": 132, "block_inputs": 128, "stages": 6}
    elsewhere = llama(implementation=("hopper", "xla"), device="cpu")
    assert elsewhere.name == "xla"
    assert "not on cpu" in elsewhere.rejected["hopper"][0]


def test_a_named_kernel_says_why_it_cannot_run() -> None:
    with pytest.raises(NotImplementedError, match="not on cpu"):
        run(operands())
    with pytest.raises(ValueError, match="`implementation`"):
        run(operands(), "tpu")


def test_arrays_on_a_mesh_are_refused(standing_in: None) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    given = operands(4)
    given["mlp"] = given["mlp"]._replace(out=jax.device_put(given["mlp"].out, NamedSharding(mesh, P("d"))))
    with pytest.raises(NotImplementedError, match="not of a mesh"):
        run(given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attended": None}, "`attended`: expected an array together with `mlp`"),
        ({"cache": None}, "`heads`: expected weights together with `places` and `cache`"),
        ({"attended": jnp.zeros((3, 64), jnp.bfloat16)}, "`attended`"),
        ({"attended": jnp.zeros((3, 128))}, "`attended`: expected the dtype of the stream, bfloat16, got float32"),
        ({"stream": start(jnp.zeros((5, 128), jnp.bfloat16))}, "`stream.residual`: expected 3 rows"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(operands() | changes)


def test_requests_know_what_heads_have() -> None:
    given = operands(options=True)
    arrays = BlockArrays(*(given[name] for name in ("stream", "attended", "mlp", "heads", "places")), *given["cache"])
    assert make_request(arrays, FORM).options == {"bias", "head norms"}
    assert decode_block_xla.product(jnp.ones((1, 2)), jnp.ones((2, 3))).tolist() == [[2.0] * 3]
