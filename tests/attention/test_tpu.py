"""Attention by the TPU kernels beyond the contract: memory and races, transformations, what is visited, compilation."""

import functools
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from flashspec.attention import dot_product_attention, plan_attention, tpu
from flashspec.attention.backends import BACKENDS
from flashspec.attention.request import make_request
from flashspec.masks import make_mask
from pallas_kernels.tpu import attention_schedule
from pallas_kernels.tpu.attention_config import AttentionCall, AttentionStructure
from tests.contracts.interpreted_tpu import interpreted_tpu, races_found, small_blocks

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the extra `tpu` brings it)"
)
B, T, N, K, H = 2, 200, 4, 2, 8


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def operands(*lead: int, seed: int = 0) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
    return tuple(jax.random.normal(key, (*lead, *shape)) for key, shape in zip(keys, shapes, strict=True))


def value_and_gradients(implementation: str, **options: Any) -> Callable[..., Any]:
    def loss(*args: jax.Array) -> jax.Array:
        call = functools.partial(dot_product_attention, implementation=implementation, return_lse=True, **options)
        output, lse = call(*args)
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def assert_same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        atol = tolerance * max(1.0, float(np.max(np.abs(np.asarray(y)))))
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=atol)


# Memory: uninitialised is NaN, out of bounds raises, races are looked for.


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        pytest.param({"window": 70, "kv_lengths": np.array([200, 130])}, marks=pytest.mark.slow),
        pytest.param(
            {"q_segment_ids": np.arange(T) // 90, "kv_segment_ids": np.arange(T) // 90}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda options: ",".join(options),
)
def test_memory_is_written_before_it_is_read(options: dict[str, Any]) -> None:
    want = value_and_gradients("blockwise", **options)(*operands())
    with small_blocks(), interpreted_tpu(pltpu.InterpretParams(detect_races=True, vector_clock_size=64)):
        assert_same(value_and_gradients("tpu", **options)(*operands()), want)
    assert not races_found()


def test_a_bias_that_nobody_sees_has_no_gradient() -> None:
    """Blocks of it that are never computed are written to memory all the same: with zeros, not with what lay there."""
    query, key, value = (x[:1, :9] for x in operands())

    def total(bias: jax.Array, lengths: np.ndarray) -> jax.Array:
        return jnp.sum(dot_product_attention(query, key, value, bias, kv_lengths=lengths, implementation="tpu") ** 2)

    with interpreted_tpu(pltpu.InterpretParams()):
        gradients = [jax.grad(total)(jnp.ones((1, 1, 1, 9)), np.array([length])) for length in (0, 9)]
    assert not np.any(np.asarray(gradients[0]))
    assert np.all(np.asarray(gradients[1]) != 0)


PLANTED_RACE = """
    import jax, jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    def kernel(x, o, buffer, arrived):
        copy = pltpu.make_async_copy(x, buffer, arrived)
        copy.start()
        {before}
        o[...] = buffer[...]
        {after}

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode="eager"),
    )
    try:
        jax.block_until_ready(call(jnp.ones((8, 128))))
        found = interpret_pallas_call.races.races_found
    except Exception as error:  # newer versions raise
        found = "race" in str(error).lower()
    print("race" if found else "none")
"""


@pytest.mark.parametrize(("when", "answer"), [("before", "none"), ("after", "race")])
def test_the_interpreter_finds_a_planted_race(when: str, answer: str) -> None:
    """What the test above relies on: a buffer read before its copy was waited for."""
    waits = {"before": "", "after": ""} | {when: "copy.wait()"}
    source = textwrap.dedent(PLANTED_RACE).format(**waits)
    out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    assert out.split()[-1] == answer


# Transformations.


def test_vmap_and_jacrev() -> None:
    several = operands(2)

    def call(implementation: str, *args: jax.Array) -> Any:
        return value_and_gradients(implementation, is_causal=True)(*args)

    with small_blocks(), interpreted_tpu():
        got = jax.vmap(functools.partial(call, "tpu"), in_axes=(0, None, None))(
            several[0], several[1][0], several[2][0]
        )
        alone = [call("tpu", several[0][i], several[1][0], several[2][0]) for i in range(2)]
    assert_same(got, jax.tree.map(lambda *x: jnp.stack(x), *alone))


def test_dropout_is_the_same_in_blocks_of_any_size() -> None:
    few = [x[:1, :150, :1] for x in operands()]

    @jax.jit
    def call(key: jax.Array) -> Any:
        return value_and_gradients("tpu", dropout_rate=0.4, dropout_key=key)(*few)

    keys = jax.random.split(jax.random.key(0))
    with interpreted_tpu():
        with small_blocks(128, 128):
            small = call(keys[0])
        with small_blocks(256, 128):
            assert_same(call(keys[0]), small)
            with pytest.raises(AssertionError):  # wrong: other bits
                assert_same(call(keys[1]), small)


def test_shard_map_over_batch_and_heads() -> None:
    """The interpreter of arrays cannot follow what varies over which axis; the compiler for TPUs can (below)."""
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("rows", None, "heads")
    lengths = jnp.array([T, 150])

    def local(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
        return dot_product_attention(query, key, value, is_causal=True, kv_lengths=lengths, implementation="tpu")

    with interpreted_tpu():
        split = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec, P("rows")), out_specs=spec, check_vma=False)
        got = jax.jit(split)(*operands(), lengths)
    want = dot_product_attention(*operands(), is_causal=True, kv_lengths=lengths, implementation="blockwise")
    assert_same(got, want)


# What is visited.


def rules_of(seed: int) -> tuple[dict[str, Any], tuple[int, int]]:
    rng = np.random.default_rng(seed)
    sizes = int(rng.integers(1, 700)), int(rng.integers(1, 700))
    options: dict[str, Any] = {"is_causal": bool(rng.integers(2)), "window": [None, (90, 30)][rng.integers(2)]}
    if options["is_causal"] or options["window"] or sizes[0] != sizes[1]:
        options["q_positions"] = rng.integers(-100, 700, (2, 1)) + np.arange(sizes[0])
    if rng.integers(2):
        options |= {"q_lengths": rng.integers(0, sizes[0] + 1, 2), "kv_lengths": rng.integers(0, sizes[1] + 1, 2)}
    if rng.integers(2):
        options |= {
            "q_segment_ids": np.arange(sizes[0])[None] // 200,
            "kv_segment_ids": np.arange(sizes[1])[None] // 150,
        }
    if rng.integers(2):
        options["mask"] = rng.random((2, 1, sizes[0], sizes[1])) > 0.5
        options["mask"][0, :, :256] = False
    return options, sizes


def visited(options: dict[str, Any], sizes: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mask in full, and which blocks of 128 the schedule computes, and which of them unmasked."""
    mask = make_mask((2, 1, *sizes), **options)
    structure = AttentionStructure(*tpu._rules(mask), mask.explicit)
    words = attention_schedule.steps_by_query(AttentionCall(1.0), structure, sizes, (128, 128))
    counts = tuple(-(-size // 128) for size in sizes)
    computed, full = np.zeros((2, 2, *counts), bool)
    step: Any = jax.tree.map(np.asarray, attention_schedule.unpack(jnp.broadcast_to(words, (2, words.shape[1]))))
    for row in range(2):
        for which, blocks in ((step.full[row] | step.partial[row], computed), (step.full[row], full)):
            blocks[row, step.outer[row][which], step.inner[row][which]] = True
    return np.broadcast_to(np.asarray(mask.full()), (2, 1, *sizes))[:, 0], computed, full


def in_blocks(pairs: np.ndarray, filler: bool) -> np.ndarray:
    """[rows, T, S] in blocks of 128: [rows, q blocks, k blocks, pairs of a block]."""
    padded = np.pad(pairs, [(0, 0), *((0, -size % 128) for size in pairs.shape[1:])], constant_values=filler)
    rows, q, k = padded.shape
    return padded.reshape(rows, q // 128, 128, k // 128, 128).swapaxes(2, 3).reshape(rows, q // 128, k // 128, -1)


@pytest.mark.parametrize("seed", range(4))
def test_every_visible_pair_is_visited_and_none_goes_unmasked(seed: int) -> None:
    pairs, computed, full = visited(*rules_of(seed))
    assert np.all(computed >= in_blocks(pairs, False).any(3))
    assert np.all(full <= in_blocks(pairs, True).all(3))


def test_hidden_blocks_are_not_visited() -> None:
    sizes = (512, 512)
    _, computed, full = visited({"is_causal": True, "kv_lengths": np.array([512, 256])}, sizes)
    tril = np.tril(np.ones((4, 4), bool))
    assert np.array_equal(computed, [tril, tril & (np.arange(4) < 2)])
    assert np.array_equal(full[0], np.tril(tril, -1))
    static = attention_schedule.steps_by_query(
        AttentionCall(1.0, limits=(None, 0)), AttentionStructure(), sizes, (128, 128)
    )
    assert static.shape == (1, 10)  # a constant, as long as the triangle


# What is refused, and the compiler for real chips.


def test_what_is_refused() -> None:
    def reasons(T: int = 64, H: int = 64, dtype: Any = jnp.bfloat16, platform: str = "tpu") -> str:
        x = jax.ShapeDtypeStruct((1, T, 1, H), dtype)
        requests = []
        jax.eval_shape(lambda x: requests.append(make_request(x, x, x, platform=platform)[0]), x)
        return " ".join(BACKENDS["tpu"].supports(requests[0]))

    assert not reasons()
    assert "not on cpu" in reasons(platform="cpu")
    assert "not in float16" in reasons(dtype=jnp.float16)
    assert "head sizes up to 512" in reasons(H=1024)
    assert "query gradient in VMEM" in reasons(T=100_000, H=128)
    half = jax.ShapeDtypeStruct((1, 512, 1, 64), np.float16)
    plan = plan_attention(half, half, half, device="TPU v5 lite")
    assert (plan.forward.implementation, plan.backward.implementation) == ("blockwise", "blockwise")
    assert plan.rejected["tpu"] == ("computes in bfloat16 or float32, not in float16",)


COMPILE = """
    import sys

    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    from flashspec import selection
    from flashspec.attention import DenseView, api, decode, decode_attention, dot_product_attention

    # What a process with these chips would find.
    api.resolve_device = decode.resolve_device = lambda *_: selection.Target("TPU v5 lite", "tpu")
    selection.targets = tuple
    kind = {"shard_map": AxisType.Auto, "explicit axes": AxisType.Explicit}[sys.argv[1]]
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    mesh = Mesh(np.array(devices).reshape(4, 4), ("rows", "heads"), axis_types=(kind, kind))
    heads, rows = P("rows", None, "heads"), P("rows")

    def attend(query, key, value, lengths):
        return dot_product_attention(query, key, value, is_causal=True, kv_lengths=lengths)

    def step(query, key, value, lengths):
        return decode_attention(query, DenseView(key, value, lengths))

    def compiled(call, of, T):
        if kind == AxisType.Auto:
            call = jax.shard_map(call, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads)
        shape = lambda dtype, spec, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))
        query, key = (shape(jnp.bfloat16, heads, 8, *size, 128) for size in ((T, 16), (1024, 4)))
        return jax.jit(of(call)).lower(query, key, key, shape(jnp.int32, rows, 8)).compile().as_text()

    loss = lambda call: lambda *x: jnp.sum(call(*x).astype(jnp.float32) ** 2)
    training = compiled(attend, lambda call: jax.grad(loss(call), argnums=(0, 1, 2)), 1024)
    assert "flashspec_attention_forward" in training
    assert "flashspec_attention_backward" in training
    decoding = compiled(step, lambda call: call, 2)
    assert "flashspec_attention_decode" in decoding
    for text in (training, decoding):
        assert not any(moved in text for moved in ("all-gather", "all-to-all", "collective-permute"))
    print("compiled")
"""


@needs_libtpu
@pytest.mark.parametrize("how", ["shard_map", "explicit axes"])
def test_kernels_compile_for_a_slice_of_v5e(how: str) -> None:
    """Batch and heads over 4 x 4 chips, one key/value head on each; nothing is moved."""
    from experiments.tpu_schedule import environment

    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPILE), how],
        env=environment("v5litepod-16"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.stdout.split()[-1:] == ["compiled"], out.stderr[-2000:]


@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.slow)])
def test_kernels_compile_for_chips(chip: str) -> None:
    from experiments.tpu_kernels import Case
    from experiments.tpu_schedule import compile_cases

    cases = [Case("flashspec", 1024), Case("flashspec", 1024, backward=True), Case("flashspec decode", 1024, page=16)]
    cases += [Case("flashspec decode", 1024, 256), Case("flashspec matmul", 256, gated=True)]
    for case, answer in zip(cases, compile_cases(chip, cases), strict=True):
        assert "error" not in answer, (case, answer)
        assert [s["name"].split(".")[0] for s in answer["schedules"]], case
    (too_large,) = compile_cases(chip, [Case("flashspec", 400_000, backward=True)])
    assert "vmem" in too_large["error"].lower()  # as on the chip
