"""A decoder step between two attentions, or with them, behind its functions, over a stand-in for the kernel."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashspec.attention.decode import cached_attention
from flashspec.attention.views import DenseView
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
from flashspec.fusion.decode_block_request import (
    BlockArrays,
    BlockRequest,
    LayersArrays,
    LayerWeights,
    make_layers_request,
    make_request,
)
from flashspec.fusion.decode_layers import decode_layers
from flashspec.models.fused_step import one_by_one
from pallas_kernels.gpu.hopper.decode_block_config import PHASES, AttentionForm, BlockShape
from tests.fusion import block_stand_in
from tests.mutants import mutant

FORM = BlockForm(Heads(2, 1, 64), 1e-5)
WHOLE = BlockForm(Heads(2, 2, 64), 1e-5)  # of steps with attention within
SCALE = 0.3
SLOTS = 8
HELD, REAL = (5, 70), (2, 1)  # of the batch rows of such a step: positions before it, tokens


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    block_stand_in.use(monkeypatch)
    yield
    module._execute.clear_cache()


def operands(
    rows: int = 3,
    options: bool = False,
    dtype: Any = jnp.bfloat16,
    form: BlockForm = FORM,
    slots: int = SLOTS,
    seed: int = 3,
) -> dict[str, Any]:
    """Of a call between two attentions; the write of the second row is dropped."""
    rng = np.random.default_rng(seed)

    def normal(*size: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=size) * (size[0] ** -0.5 if len(size) > 1 else 1.0), dtype)

    (K, G, H), C, F = form.heads, 128, 256
    columns = K * (G + 2) * H
    angle = rng.normal(size=(rows, H // 2))
    slot = np.where(np.arange(rows) == 1, slots, np.arange(rows) % slots)
    index = (jnp.asarray(x, jnp.int32) for x in (np.arange(rows) % 2, slot))
    optional = (normal(columns), normal(H), normal(H)) if options else ()
    return {
        "stream": start(normal(rows, C) * 8),
        "attended": normal(rows, K * G * H) * 8,
        "mlp": MlpWeights(normal(K * G * H, C), normal(C), normal(C, 2, F), normal(F, C)),
        "heads": HeadWeights(normal(C), normal(C, columns), *optional),
        "places": Places(*index, *(jnp.asarray(x, jnp.float32) for x in (np.cos(angle), np.sin(angle)))),
        "cache": (normal(2, slots, K, H) * 2, normal(2, slots, K, H) * 2),
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
        plan.phases == {0: ("out", "gate_up", "down", "qkv"), 2: ("qkv",), 3: ("out", "gate_up", "down")}[len(left_out)]
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
        ('{"out": mlp.norm[None]}', '{"out": mlp.norm[None] * 2}'),
        # Words that a call before would have left.
        ('{"counts": jnp.zeros(', '{"counts": jnp.ones('),
        pytest.param("mlp.gate_up.reshape(", "mlp.gate_up[:, ::-1].reshape(", marks=pytest.mark.slow),
        pytest.param('["query_norm", "key_norm"]', '["key_norm", "query_norm"]', marks=pytest.mark.slow),
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
    assert "a multiple of 128, not of 100" in reasons(shape=BlockShape(1, 4096, 100, Heads(8, 4, 128)))
    attends = AttentionForm(9, 2048, SCALE)
    assert not decode_block_hopper.refusals(request(shape=BlockShape(9, 4096, 14336, Heads(8, 4, 128))), attends)
    few = request(shape=BlockShape(1, 512, 1024, Heads(1, 8, 128)))
    assert not decode_block_hopper.refusals(few)
    assert "packs 64 queries" in " ".join(decode_block_hopper.refusals(few, attends))


def test_the_plan_says_what_runs_and_why() -> None:
    llama = functools.partial(plan_decode_block, 1, 4096, 14336, BlockForm(Heads(8, 4, 128), 1e-5))
    plan = llama(device="NVIDIA H200")
    assert (plan.name, plan.rejected) == ("xla", {})
    assert "1.03 of XLA's speed" in plan.passed_over["hopper"]
    asked = llama(implementation="hopper", device="NVIDIA H200")
    assert (asked.name, asked.passed_over) == ("hopper", {})
    assert asked.config == {"programs": 132, "block_inputs": 128, "stages": 6, "in_flight": 2}
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


def step_arrays(count: int = 3) -> LayersArrays:
    """Of a step of two batch rows with attention within; what no row holds is NaN, and the last token is not real."""
    layers = [operands(4, True, form=WHOLE, slots=128, seed=layer) for layer in range(count)]
    lead, token = np.divmod(np.arange(4), 2)
    slot = np.where(token < np.array(REAL)[lead], np.array(HELD)[lead] + token, 128)
    empty = (np.arange(128) >= np.array(HELD)[:, None])[:, :, None, None]
    keys, values = zip(*([jnp.where(empty, jnp.nan, x) for x in each["cache"]] for each in layers), strict=True)
    return LayersArrays(
        layers[0]["stream"].residual,
        tuple(LayerWeights(each["heads"], each["mlp"]) for each in layers),
        layers[0]["places"]._replace(lead=jnp.asarray(lead, jnp.int32), slot=jnp.asarray(slot, jnp.int32)),
        jnp.asarray([HELD, np.add(HELD, REAL)], jnp.int32),
        keys,
        values,
    )


def layer_by_layer(arrays: LayersArrays) -> Any:
    """The same step by operations, of caches without NaN."""
    held, length = arrays.lengths

    def attend(layer: int, query: jax.Array, keys: Any, values: Any) -> jax.Array:
        view = DenseView(keys[layer], values[layer], length)
        return cached_attention(query.reshape(2, 2, 4, 64), view, q_lengths=length - held, scale=SCALE).reshape(4, -1)

    keys, values = (tuple(map(jnp.nan_to_num, layers)) for layers in (arrays.keys, arrays.values))
    arrays = arrays._replace(keys=keys, values=values)
    return one_by_one(arrays, [arrays.places] * len(arrays.layers), attend, WHOLE, "xla")


def compare_layers(adaptor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers in two launches, against the same step by operations."""
    block_stand_in.use(monkeypatch, adaptor=adaptor)
    monkeypatch.setattr(adaptor, "LAYERS", 2)
    arrays = step_arrays()
    request = make_layers_request(arrays, WHOLE, SCALE)
    assert request.attention == AttentionForm(2, 128, SCALE)
    launches = functools.partial(decode_layers, request, twin=layer_by_layer)
    (x, *got), (wanted, *want) = (jax.jit(step)(arrays) for step in (launches, layer_by_layer))
    assert np.isfinite(np.asarray(x, np.float32)).all()
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for one, other in [(x[:3], wanted[:3]), *((jnp.nan_to_num(one), other) for one, other in pairs)]:
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.abs(one - other).max() <= 2**-6 * np.abs(other).max()


def test_whole_layers_and_their_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_layers(decode_block_hopper, monkeypatch)
    assert [(plan.phases, plan.layers) for plan in block_stand_in.SEEN] == [(PHASES, 1), (PHASES, 2)]
    assert {plan.attention for plan in block_stand_in.SEEN} == {AttentionForm(2, 128, SCALE)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("heads[0].norm))", "heads[1].norm))"),
        *(
            pytest.param(*edit, marks=pytest.mark.slow)
            for edit in (
                ("(*heads[1:], heads[0])", "heads"),
                ("[mlp.norm for mlp in mlps]", "[mlps[0].norm for mlp in mlps]"),
                ("_of_heads(heads)\n    for", "_of_heads([heads[0]] * len(heads))\n    for"),
                ("jnp.full(1, run.start, jnp.int32)", "jnp.zeros(1, jnp.int32)"),
                ("tuple(caches[i] for i in run)", "tuple(caches[i - run.start] for i in run)"),
                ('{"qkv": heads[i].qkv}', '{"qkv": heads[0].qkv}'),
                ('"counts": jax.new_ref(jnp.zeros(', '"counts": jax.new_ref(jnp.ones('),
                ('"lengths": arrays.lengths.astype(jnp.int32)', '"lengths": arrays.lengths.astype(jnp.int32) - 1'),
                ("attention=request.attention", "attention=dataclasses.replace(request.attention, scale=1.0)"),
                ("squares = jnp.sum((wide * wide)", "squares = jnp.sum((2 * wide * wide)"),
            )
        ),
    ],
)
def test_wrong_launches_are_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(decode_block_hopper, (old, new))
    with pytest.raises(AssertionError):
        compare_layers(wrong, monkeypatch)


def doubled(arrays: LayersArrays) -> Any:
    """No twin at all: what comes of it is seen."""
    return arrays.x * arrays.layers[0].mlp.norm[None] * 2, arrays.keys, arrays.values


@pytest.mark.slow
def test_gradients_of_whole_layers_are_the_twin_s(standing_in: None) -> None:
    arrays = step_arrays(1)
    request = make_layers_request(arrays, WHOLE, SCALE)

    def total(x: jax.Array) -> jax.Array:
        return decode_layers(request, arrays._replace(x=x), doubled)[0].astype(jnp.float32).sum()

    value, gradient = jax.value_and_grad(total)(arrays.x)
    assert len(block_stand_in.SEEN) == 1
    want = jnp.broadcast_to(arrays.layers[0].mlp.norm[None] * 2, gradient.shape)
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), np.asarray(want, np.float32))
    assert abs(float(value) - float(doubled(arrays)[0].astype(jnp.float32).sum())) > 1  # it is the kernel's


def test_mapped_whole_layers_are_the_twin(standing_in: None) -> None:
    arrays = step_arrays(1)
    request, two = make_layers_request(arrays, WHOLE, SCALE), jnp.stack([arrays.x, arrays.x * 3])
    got = jax.vmap(lambda x: decode_layers(request, arrays._replace(x=x), doubled)[0])(two)
    want = jax.vmap(lambda x: doubled(arrays._replace(x=x))[0])(two)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda a: {"layers": ()}, "`layers`: expected one or more, and as many `keys` and `values`, got 0, 2 and 2"),
        (lambda a: {"values": a.values[:1]}, "as many `keys` and `values`, got 2, 2 and 1"),
        (
            lambda a: {"layers": (a.layers[0]._replace(heads=a.layers[0].heads._replace(bias=None)), a.layers[1])},
            "`layers`: expected layers and caches of one size, got 2 and 1 of them",
        ),
        (lambda a: {"keys": (a.keys[0][:, :64], a.keys[1])}, "layers and caches of one size, got 1 and 2 of them"),
        (lambda a: {"lengths": a.lengths[0]}, "`lengths`: expected rank 2"),
        (lambda a: {"lengths": jnp.ones((2, 3), jnp.int32)}, "`x`: expected as many rows for each of 3 batch rows"),
        (lambda a: {"x": a.x[:, :64]}, "`mlp.gate_up`"),
        (lambda a: {"lengths": a.lengths.astype(jnp.float32)}, "`lengths`: expected integers, got float32"),
        (
            lambda a: {name: tuple(x[:1] for x in getattr(a, name)) for name in ("keys", "values")},
            "`keys`: expected a lead for each of 2 batch rows, got 1 of them",
        ),
    ],
)
def test_wrong_arguments_of_whole_layers(changes: Any, message: str) -> None:
    arrays = step_arrays(2)
    with pytest.raises(ValueError, match=message):
        make_layers_request(arrays._replace(**changes(arrays)), WHOLE, SCALE)
