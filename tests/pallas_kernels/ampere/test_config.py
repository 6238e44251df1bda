"""Launch settings of the portable kernels: what is refused, and that heuristics and candidates are legal."""

import dataclasses
import itertools
from typing import Any

import pytest

from pallas_kernels.gpu.ampere import attention_backward_config, attention_forward_config
from pallas_kernels.gpu.ampere.attention_backward_config import HEAD_SIZES, BackwardConfig
from pallas_kernels.gpu.ampere.attention_forward_config import RESERVED, AttentionShape, ForwardConfig, shared_memory
from tests.mutants import mutant

MEMORY = [shared_memory(capability) for capability in ("8.0", "8.6", "9.0")]
KIB = 1024


def shape(H: int = 128, Hv: int = 128, T: int = 4096) -> AttentionShape:
    return AttentionShape(4, T, T, 16, 16, H, Hv)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (ForwardConfig, "tile_q", 96),
        (ForwardConfig, "block_kv", 48),
        (ForwardConfig, "stages", 3),
        (ForwardConfig, "section", 0),
        (BackwardConfig, "block_q", 32),
        (BackwardConfig, "stages", 0),
        (BackwardConfig, "warpgroups", 3),
        (BackwardConfig, "tile_q", 256),
        (BackwardConfig, "block_kv", 128),
        (BackwardConfig, "section", -1),
    ],
)
def test_illegal_values_are_refused_by_name(kind: Any, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"`{name}`: expected .*, got {value}"):
        kind(**{name: value})


def test_configs_are_frozen_leaves() -> None:
    for config in (ForwardConfig(), BackwardConfig()):
        assert hash(config) == hash(type(config)())
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.stages = 1  # type: ignore[misc]


def test_shared_memory_of_a_gpu() -> None:
    sizes = {"8.0": 163, "8.6": 99, "8.7": 163, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99, None: 99}
    assert {capability: shared_memory(capability) // KIB for capability in sizes} == sizes


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("H", [64, 128, 192, 256])
def test_forward_heuristic_and_candidates_are_legal(H: int, bulk: bool, memory: int) -> None:
    for T in (64, 128, 384, 4096, 2**20):
        call = shape(H, H, T)
        configs = list(attention_forward_config.candidates(call, memory, bulk=bulk))
        assert configs[0] == attention_forward_config.heuristic(call, memory, bulk=bulk)
        assert len(set(configs)) == len(configs) > 1
        assert not any(config.refusals(call, memory) for config in configs)
        assert all(config.bulk == bulk for config in configs)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sizes", HEAD_SIZES)
def test_backward_heuristic_and_candidates_are_legal(
    sizes: tuple[int, int], deterministic: bool, bulk: bool, memory: int
) -> None:
    options = {"bulk": bulk, "deterministic": deterministic}
    for T in (64, 128, 384, 4096, 2**20):
        call = shape(*sizes, T)
        configs = list(attention_backward_config.candidates(call, memory, **options))
        assert configs[0] == attention_backward_config.heuristic(call, memory, **options)
        assert len(set(configs)) == len(configs) >= 1
        if (sizes, deterministic, bulk, memory) == ((128, 128), False, True, shared_memory("8.6")):
            assert configs[0].refusals(call, memory, deterministic=False)  # dQ then has a kernel of its own
        else:
            assert not any(config.refusals(call, memory, deterministic=deterministic) for config in configs)


@pytest.mark.parametrize("sizes", HEAD_SIZES)
def test_halves_are_for_a_copy_engine_and_sums_in_any_order(sizes: tuple[int, int]) -> None:
    """There they have been timed; candidates have both forms, wherever they are legal."""
    for bulk, deterministic in itertools.product((False, True), repeat=2):
        options: dict[str, Any] = {"bulk": bulk, "deterministic": deterministic}
        first, *others = attention_backward_config.candidates(shape(*sizes), shared_memory("9.0"), **options)
        assert first.halves == (bulk and not deterministic)
        assert dataclasses.replace(first, halves=not first.halves) in others
    small = attention_backward_config.heuristic(shape(*sizes), shared_memory("12.0"), bulk=True)
    assert not small.halves  # nor are there two warpgroups


def test_shared_memory_is_counted() -> None:
    """H = 128: 128 queries are 32 KiB, a block of 64 keys and one of values 16 KiB each."""
    assert ForwardConfig().shared_memory(shape()) == (32 + 2 * 32) * KIB + RESERVED
    backward = BackwardConfig()  # K and V 64, two stages of Q and dO 64, dS 16 or with P 32, dQ 32 in float32
    assert backward.key_block_bytes(shape(), fused=False) == 128 * KIB + RESERVED
    assert backward.key_block_bytes(shape(), fused=True) == 144 * KIB + RESERVED
    bulk = dataclasses.replace(backward, bulk=True)
    assert bulk.key_block_bytes(shape(), fused=True) == 176 * KIB + RESERVED
    halves = dataclasses.replace(bulk, halves=True)
    assert halves.key_block_bytes(shape(), fused=True) == 192 * KIB + RESERVED
    assert halves.key_block_bytes(shape(), fused=False) == 160 * KIB + RESERVED


@pytest.mark.parametrize(
    ("H", "settings", "reason"),
    [
        (128, {"block_kv": 128}, "registers"),
        (256, {"tile_q": 64, "stages": 2}, "shared memory"),
        (80, {}, "head sizes in multiples of 64"),
        (320, {}, "head sizes up to 256"),
    ],
)
def test_forward_settings_that_do_not_fit_a_call(H: int, settings: dict[str, Any], reason: str) -> None:
    assert any(reason in text for text in ForwardConfig(**settings).refusals(shape(H, H), shared_memory("8.6")))


@pytest.mark.parametrize(
    ("H", "settings", "deterministic", "reason"),
    [
        (128, {"block_q": 128}, False, "block_q = 128 does not fit the registers"),
        (128, {"block_kv": 64}, True, "block_kv = 64 does not fit the registers"),
        (128, {"bulk": True}, False, "bytes of shared memory are more than"),
        (64, {"block_q": 64}, False, "columns of 64"),
        (128, {"halves": True, "warpgroups": 1}, False, "halves are for two warpgroups"),
        (256, {}, False, "takes head sizes"),
    ],
)
def test_backward_settings_that_do_not_fit_a_call(
    H: int, settings: dict[str, Any], deterministic: bool, reason: str
) -> None:
    found = BackwardConfig(**settings).refusals(shape(H, H), shared_memory("8.0"), deterministic=deterministic)
    assert any(reason in text for text in found)


def test_lengths_that_are_no_multiple_are_refused() -> None:
    call = shape(T=192)
    assert ForwardConfig(tile_q=64).refusals(call, MEMORY[2]) == ()
    assert ForwardConfig().refusals(call, MEMORY[2]) == ("needs T in multiples of 128, not 192",)
    assert "needs S in multiples of 128, not 192" in BackwardConfig().refusals(call, MEMORY[2], deterministic=False)


def test_a_config_that_forgets_the_exchange_is_noticed() -> None:
    """Without dS and dQ in the count, settings would pass that the GPU refuses."""
    wrong = mutant(attention_backward_config, ("return tiles + dq +", "return tiles +"))
    config = {"bulk": True}
    assert BackwardConfig(**config).refusals(shape(), shared_memory("8.0"), deterministic=False)
    assert not wrong.BackwardConfig(**config).refusals(shape(), shared_memory("8.0"), deterministic=False)
