"""The contract of attention, held by every implementation against one naive oracle in float64."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from flashspec.attention import attention_stats, dot_product_attention
from flashspec.online_softmax import finalize, merge, merge_axis
from tests.contracts.attention_oracle import (
    LEVELS,
    WRONG_BACKWARD,
    WRONG_FORWARD,
    Case,
    Result,
    assert_close,
    assert_no_worse,
    oracle,
    pairwise,
    random_case,
    run,
    small_tiles,
)
from tests.contracts.interpreted_tpu import interpreted_tpu, races_found, small_blocks

PAIRS = list(pairwise(LEVELS))
# "tiles" is "blockwise" with tiles smaller than these arrays, which are otherwise a single one; "tpu" is interpreted.
every_implementation = pytest.mark.parametrize("implementation", ["reference", "tiles", "tpu"])
and_default_tiles = pytest.mark.parametrize("implementation", ["reference", "tiles", "blockwise", "tpu"])
slow_on_tpu = pytest.mark.parametrize(
    "implementation", ["reference", "tiles", pytest.param("tpu", marks=pytest.mark.slow)]
)
in_float64 = pytest.mark.parametrize("implementation", ["reference", "tiles"])
# Interpretation is slow: a part of the pairs unless `-m slow` asks for all of them.
BY_DEFAULT = 4


@pytest.fixture(scope="module", autouse=True)
def tiles() -> Iterator[None]:
    with small_tiles(), interpreted_tpu():
        yield


def describe(choice: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in choice.items() if value != LEVELS[name][0]) or "plain"


# Options.


def pairs_of_options() -> Iterator[Any]:
    for i, choice in enumerate(PAIRS):
        for implementation in ("reference", "tiles", "tpu"):
            slow = [pytest.mark.slow] if implementation == "tpu" and i % BY_DEFAULT else []
            yield pytest.param(choice, implementation, id=f"{describe(choice)}-{implementation}", marks=slow)


@pytest.mark.parametrize(("choice", "implementation"), list(pairs_of_options()))
def test_pairs_of_options(choice: dict[str, Any], implementation: str) -> None:
    case = random_case(PAIRS.index(choice), **choice)
    assert_close(run(case, implementation), oracle(case))


@pytest.mark.slow
@pytest.mark.parametrize("choice", PAIRS, ids=describe)
@pytest.mark.parametrize("copies", ["on_wait", "eager"])
def test_pairs_of_options_in_simulated_memory(choice: dict[str, Any], copies: Any) -> None:
    """The TPU kernels where uninitialised memory is NaN, copies come early or late, and races are looked for."""
    case = random_case(PAIRS.index(choice), **choice)
    memory = pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode=copies)
    with interpreted_tpu(memory):
        assert_close(run(case, "tpu"), oracle(case))
    assert not races_found()


@pytest.mark.slow
@pytest.mark.parametrize("choice", PAIRS, ids=describe)
def test_pairs_of_options_over_several_blocks(choice: dict[str, Any]) -> None:
    """The same where 200 queries and 330 keys are cut into blocks of 128."""
    *_, N, K, H, Hv = choice.get("sizes", LEVELS["sizes"][0])
    case = random_case(PAIRS.index(choice), **(choice | {"sizes": (2, 200, 330, N, K, H, Hv)}))
    with interpreted_tpu(pltpu.InterpretParams()), small_blocks():
        assert_close(run(case, "tpu"), oracle(case))


def test_the_cover_has_every_pair_of_options() -> None:
    for (a, xs), (b, ys) in itertools.combinations(LEVELS.items(), 2):
        assert {(c[a], c[b]) for c in PAIRS} >= set(itertools.product(xs, ys))


def spelled_out(case: Case) -> Case:
    """The same call with a neutral array for every option that it leaves out, so that few programs serve all."""
    B, T, S, N, *_ = case.sizes
    neutral = {
        "mask": np.ones((B, N, T, S), bool),
        "bias": np.zeros((B, N, T, S), np.float32),
        "q_lengths": np.full(B, T),
        "kv_lengths": np.full(B, S),
        "q_segment_ids": np.zeros((B, T), int),
        "kv_segment_ids": np.zeros((B, S), int),
        "sinks": np.full(N, -np.inf, np.float32),
    }
    return dataclasses.replace(case, arguments=neutral | case.arguments)


@pytest.mark.slow
@every_implementation
@pytest.mark.parametrize("sizes", LEVELS["sizes"])
def test_the_full_product_of_options(sizes: tuple[int, ...], implementation: str) -> None:
    levels = LEVELS | {"sizes": [sizes]}
    for seed, values in enumerate(itertools.product(*levels.values())):
        case = spelled_out(random_case(seed, **dict(zip(levels, values, strict=True))))
        assert_close(run(case, implementation), oracle(case))


def everything(seed: int = 0, dtype: Any = np.float32) -> Case:
    """A call that uses every option at once, and in which each planted mistake shows."""
    return random_case(
        seed,
        dtype,
        sizes=(2, 6, 9, 4, 2, 8, 6),
        positions="causal window",
        explicit="full",
        bias="broadcast",
        soft_cap=1.5,
        sinks=True,
        dropout=0.3,
        scale=0.7,
    )


@and_default_tiles
def test_every_option_at_once(implementation: str) -> None:
    assert_close(run(everything(), implementation), oracle(everything()))


@in_float64
def test_float64(implementation: str, x64: None) -> None:
    case = everything(dtype=np.float64)
    got = run(case, implementation)
    assert got.output.dtype == got.lse.dtype == np.float64
    assert_close(got, oracle(case), tolerance=1e-12)


@every_implementation
def test_float32_with_64_bit_mode(implementation: str, x64: None) -> None:
    got = run(everything(), implementation)
    assert got.output.dtype == got.lse.dtype == np.float32
    assert_close(got, oracle(everything()))


# Planted mistakes: the comparison above has to notice each one.


def decoding() -> Case:
    """One query at the latest of S positions (section 33.3)."""
    case = random_case(7, sizes=(2, 1, 8, 4, 2, 8, 6))
    case.arguments |= {"is_causal": True, "q_positions": np.array([7])}
    return case


@pytest.mark.parametrize("wrong", [*WRONG_FORWARD, *WRONG_BACKWARD])
def test_the_comparison_notices(wrong: str) -> None:
    case = everything()
    assert_close(oracle(case), oracle(case))
    with pytest.raises(AssertionError):
        assert_close(oracle(case), oracle(case, wrong))


@pytest.mark.parametrize("wrong", WRONG_BACKWARD)
def test_mistakes_of_the_backward_are_invisible_forward(wrong: str) -> None:
    case = everything()
    assert np.array_equal(oracle(case).output, oracle(case, wrong).output)


@and_default_tiles
def test_a_decoding_query_sees_every_key(implementation: str) -> None:
    got = run(decoding(), implementation)
    assert_close(got, oracle(decoding()))
    top_left = oracle(decoding(), "top-left alignment")
    np.testing.assert_allclose(top_left.output[:, 0], decoding().arguments["value"][:, 0].repeat(2, axis=1), rtol=1e-6)
    with pytest.raises(AssertionError):
        assert_close(got, top_left)


# Low precision: at most twice the error of the plain dense formula in the input dtype.


def low_precision_case(dtype: Any) -> Case:
    case = random_case(11, dtype, sizes=(2, 24, 24, 4, 2, 16, 16))
    case.arguments["is_causal"] = True
    case.g_output, case.g_lse = (np.asarray(jnp.asarray(x, dtype), float) for x in (case.g_output, case.g_lse))
    return case


@and_default_tiles
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_low_precision(implementation: str, dtype: Any) -> None:
    if implementation == "tpu" and dtype == np.float16:
        pytest.skip("the TPU kernels refuse float16")
    case = low_precision_case(dtype)
    got = run(case, implementation)
    assert (got.output.dtype, got.lse.dtype) == (dtype, np.float32)
    assert_no_worse(got, case)


def test_low_precision_notices_a_shorter_window() -> None:
    case = low_precision_case(jnp.bfloat16)
    wrong = dataclasses.replace(case, arguments=case.arguments | {"window": (20, None)})
    with pytest.raises(AssertionError):
        assert_no_worse(run(wrong, "reference"), case)


# What nobody sees.


def poison(case: Case, name: str, where: Any, value: float) -> Case:
    arguments = dict(case.arguments)
    arguments[name] = arguments[name].copy()
    arguments[name][where] = value
    return dataclasses.replace(case, arguments=arguments)


def assert_clean(got: Result, clean: Result) -> None:
    for x, y in zip(jax.tree.leaves(dataclasses.asdict(got)), jax.tree.leaves(dataclasses.asdict(clean)), strict=True):
        assert np.array_equal(x, y)


def hidden_cases() -> dict[str, tuple[Case, list[tuple[str, Any]]]]:
    """Calls with the places that no visible pair touches, by what hides them."""
    base = {"sizes": (2, 6, 9, 4, 2, 8, 6), "soft_cap": 1.5, "sinks": True}
    row = {"key": (0, slice(5, None)), "value": (0, slice(5, None))}
    lengths = random_case(1, **base, bias="full")
    lengths.arguments |= {"kv_lengths": np.array([5, 9]), "q_lengths": np.array([6, 4])}
    causal = random_case(2, **base)
    causal.arguments |= {"is_causal": True, "q_positions": np.array([[-1, 0, 1, 2, 3, 4], [3, 4, 5, 6, 7, 8]])}
    window = random_case(3, **base)
    window.arguments |= {"window": (1, 1), "q_positions": np.tile(np.array([0, 1, 2, 3, 3, 3]), (2, 1))}
    segments = random_case(4, **base)
    ids = np.zeros((2, 9), int)
    ids[0, 5:] = 7
    segments.arguments |= {"q_segment_ids": np.zeros((2, 6), int), "kv_segment_ids": ids}
    explicit = random_case(5, **base)
    mask = np.ones((2, 4, 6, 9), bool)
    mask[0, :, :, 5:] = False
    mask[1, :2, :, 0] = False  # key 0 of row 1 is hidden from the first key/value head alone
    explicit.arguments["mask"] = mask
    bias = random_case(6, **base)
    bias.arguments["bias"] = np.where(mask, 0.5, -np.inf).astype(np.float32)
    one_head = [("key", (1, 0, 0)), ("value", (1, 0, 0))]
    return {
        "lengths": (
            lengths,
            [*row.items(), ("query", (1, slice(4, None))), ("bias", (0, slice(None), slice(None), 5))],
        ),
        "causal": (causal, [*row.items(), ("query", (0, 0))]),
        "window": (window, list(row.items())),
        "segments": (segments, list(row.items())),
        "explicit": (explicit, [*row.items(), *one_head]),
        "bias": (bias, [*row.items(), *one_head]),
    }


@every_implementation
@pytest.mark.parametrize("rule", hidden_cases())
def test_hidden_operands_touch_nothing(rule: str, implementation: str) -> None:
    case, places = hidden_cases()[rule]
    clean = run(case, implementation)
    assert_close(clean, oracle(case))
    for value in (np.nan, np.inf):
        dirty = case
        for name, where in places:
            dirty = poison(dirty, name, where, value)
        assert_clean(run(dirty, implementation), clean)


@every_implementation
def test_a_seen_nan_is_noticed(implementation: str) -> None:
    case, _ = hidden_cases()["lengths"]
    dirty = poison(case, "value", (0, 4), np.nan)
    with pytest.raises(AssertionError):
        assert_clean(run(dirty, implementation), run(case, implementation))


@every_implementation
def test_rows_without_a_key(implementation: str) -> None:
    case = random_case(8, explicit="full")
    case.arguments["mask"] = np.zeros((2, 4, 5, 7), bool)
    got = run(case, implementation)
    assert not got.output.any()
    assert (got.lse == -np.inf).all()
    assert not any(gradient.any() for gradient in got.gradients.values())
    case.arguments["sinks"] = np.arange(4, dtype=np.float32)
    got = run(case, implementation)
    assert not got.output.any()
    np.testing.assert_allclose(got.lse, np.broadcast_to(np.arange(4), got.lse.shape), rtol=1e-6)


@slow_on_tpu
@pytest.mark.parametrize(
    "sizes", [(2, 0, 5, 4, 2, 8, 6), (2, 5, 0, 4, 2, 8, 6), (0, 5, 5, 4, 2, 8, 6), (2, 0, 0, 4, 2, 8, 6)]
)
def test_empty_operands(sizes: tuple[int, ...], implementation: str) -> None:
    for options in ({}, {"bias": "full", "sinks": True, "explicit": "full", "positions": "causal", "dropout": 0.3}):
        case = random_case(9, sizes=sizes, **options)
        assert_close(run(case, implementation), oracle(case))


# Layout, bias gradients, statistics.


@slow_on_tpu
def test_strided_operands(implementation: str) -> None:
    case = random_case(10)
    B, T, _, N, _, H, _ = case.sizes
    wide = np.zeros((N, B, 2 * T, H + 3), np.float32)
    strided = wide[:, :, ::2, :H].transpose(1, 2, 0, 3)
    strided[...] = case.arguments["query"]
    backwards = np.ascontiguousarray(case.arguments["key"][:, ::-1])[:, ::-1]
    given = case.arguments | {"query": strided, "key": backwards}
    want = run(case, implementation)
    assert_clean(run(dataclasses.replace(case, arguments=given), implementation), want)

    @jax.jit
    def transposed(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        operands = (jnp.transpose(x, (1, 2, 0, 3)) for x in (query, key, value))
        return dot_product_attention(*operands, implementation=implementation)

    operands = (case.arguments[name].transpose(2, 0, 1, 3) for name in ("query", "key", "value"))
    np.testing.assert_allclose(np.asarray(transposed(*operands)), want.output, rtol=1e-6, atol=1e-6)


@slow_on_tpu
@pytest.mark.parametrize("shape", [(2, 1, 5, 1), (1, 4, 1, 7), (1, 1, 5, 7), (2, 4, 1, 1)])
def test_a_bias_gradient_has_the_shape_of_the_bias(shape: tuple[int, ...], implementation: str) -> None:
    case = random_case(12)
    case.arguments["bias"] = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    assert_close(run(case, implementation), oracle(case))


@every_implementation
def test_a_large_finite_bias_is_no_mask(implementation: str) -> None:
    case = random_case(13)
    case.arguments["bias"] = np.full((1, 1, 1, 7), -1e9, np.float32)
    got = run(case, implementation)
    assert np.isfinite(got.lse).all()
    assert got.output.any()


def in_parts(case: Case, implementation: str, fold: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Attention over four disjoint parts of the keys, each computed alone; the last one is empty."""
    given = dict(case.arguments)
    query, key, value, sinks = (given.pop(name) for name in ("query", "key", "value", "sinks"))
    positions = np.broadcast_to(np.arange(9), (2, 9))
    parts = []
    for s in (slice(0, 2), slice(2, 3), slice(3, 9), slice(9, 9)):
        local = given | {"kv_positions": positions[:, s]}
        local |= {name: given[name][..., s] for name in ("bias", "mask") if name in given}
        parts.append(attention_stats(query, key[:, s], value[:, s], **local, implementation=implementation))
    output, lse = finalize(fold(parts), sinks=sinks)
    return np.asarray(output), np.asarray(lse)


def merge_all(parts: list[Any]) -> Any:
    return merge(merge(parts[2], parts[0]), merge(parts[3], parts[1]))


def merge_stacked(parts: list[Any]) -> Any:
    return merge_axis(jax.tree.map(lambda *xs: jnp.stack(xs), *parts), 0)


def parts_case() -> Case:
    options = {"positions": "causal", "explicit": "full", "bias": "broadcast", "soft_cap": 1.5, "sinks": True}
    return random_case(14, sizes=(2, 6, 9, 4, 2, 8, 6), **options)


@every_implementation
@pytest.mark.parametrize("fold", [merge_all, merge_stacked])
def test_statistics_of_parts_merge_into_the_whole(implementation: str, fold: Callable) -> None:
    output, lse = in_parts(parts_case(), implementation, fold)
    want = oracle(parts_case())
    np.testing.assert_allclose(output, want.output, rtol=3e-5, atol=3e-5)
    np.testing.assert_allclose(lse, want.lse, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("fold", [lambda parts: parts[2], lambda parts: merge(merge_all(parts), parts[1])])
def test_a_part_forgotten_or_counted_twice_is_noticed(fold: Callable) -> None:
    output, _ = in_parts(parts_case(), "reference", fold)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(output, oracle(parts_case()).output, rtol=3e-5, atol=3e-5)


# Dropout.


@pytest.mark.parametrize("broadcast", [("batch", "head"), ("query",), ("key",)])
@slow_on_tpu
def test_dropout_shared_along_axes(implementation: str, broadcast: tuple[str, ...]) -> None:
    case = random_case(15, dropout=0.4)
    case.arguments["dropout_broadcast"] = broadcast
    assert_close(run(case, implementation), oracle(case))


@every_implementation
def test_dropout_offsets_place_a_shard(implementation: str) -> None:
    whole = random_case(16, sizes=(3, 5, 7, 4, 2, 8, 6), dropout=0.4)
    arguments = dict(whole.arguments)
    shard = {"query": arguments["query"][1:, :, 2:], "key": arguments["key"][1:, :, 1:]}
    shard |= {"value": arguments["value"][1:, :, 1:]}
    want = run(whole, implementation).output[1:, :, 2:]

    def output(offsets: tuple[int, ...]) -> np.ndarray:
        given = arguments | shard | {"dropout_offsets": offsets, "implementation": implementation}
        return np.asarray(dot_product_attention(**given))

    np.testing.assert_allclose(output((1, 2, 0, 0)), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(output((0, 0, 0, 0)), want, rtol=1e-6, atol=1e-6)
