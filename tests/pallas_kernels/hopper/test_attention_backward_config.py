"""Launch settings of the Hopper backward: what is refused, and that heuristic and candidates are legal."""

import dataclasses
from typing import Any

import pytest

from pallas_kernels.gpu.hopper import attention_backward_config
from pallas_kernels.gpu.hopper.attention_backward_config import (
    HEAD_SIZES,
    SHARED_MEMORY,
    WIDE_HEAD_SIZES,
    BackwardConfig,
    BackwardShape,
    candidates,
    config_refusals,
    heuristic,
    key_block_bytes,
    query_block_bytes,
    refusals,
)
from tests.mutants import mutant


def shape(H: int = 128, Hv: int = 128, T: int = 4096, N: int = 16) -> BackwardShape:
    return BackwardShape(4, T, T, N, 16, H, Hv)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_q", 96),
        ("block_q", "64"),
        ("block_kv", 32),
        ("stages", 0),
        ("stages", True),
        ("kv_stages", 2.0),
        ("section", 0),
        ("compute_registers", 244),
        ("compute_registers", 256),
        ("copy_registers", 8),
    ],
)
def test_illegal_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"`{name}`" if name != "compute_registers" else "`compute_registers`"):
        BackwardConfig(**{name: value})


def test_a_config_is_a_frozen_leaf():
    config = BackwardConfig()
    assert hash(config) == hash(BackwardConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stages = 3


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("T", [8, 104, 4096, 10**6])
@pytest.mark.parametrize("sizes", HEAD_SIZES + WIDE_HEAD_SIZES)
def test_heuristic_and_candidates_are_legal(sizes, T, deterministic):
    call = shape(*sizes, T=T)
    configs = candidates(call, deterministic=deterministic)
    assert configs[0] == heuristic(call)
    assert len(set(configs)) == len(configs) > 1
    assert not any(config_refusals(call, config, deterministic=deterministic) for config in configs)


# (B, T, N, K, H) and the heads of a section. At H = 128 and T = 4096, 6 heads of 4 MiB are within 24 MiB, and 4 of them
# divide 64; in groups of four it is one head of 16 MiB, but 32 blocks of keys a head take 4 heads for 128 programs.
SECTIONS = {
    (4, 4096, 16, 16, 128): 4,
    (4, 4096, 32, 8, 128): 4,
    (1, 4096, 13, 13, 128): 6,
    (1, 16384, 16, 16, 128): 1,
    (4, 1024, 16, 16, 128): 16,
    (1, 64, 2, 1, 64): 1,
}


def wrong_sections(module: Any) -> list[tuple[int, ...]]:
    """Calls whose heuristic has another section."""
    found = {
        (B, T, N, K, H): module.heuristic(BackwardShape(B, T, T, N, K, H, H)).section for B, T, N, K, H in SECTIONS
    }
    return [call for call, section in SECTIONS.items() if found[call] != section]


def test_a_section_divides_the_heads_and_fills_the_device():
    assert not wrong_sections(attention_backward_config)


def test_wrong_sections_are_noticed():
    """A section by the cache alone ends with a few long blocks, and one that divides nothing with a short section."""
    cache_alone = mutant(attention_backward_config, (", cdiv(PROGRAMS, blocks))", ", 1)"))
    any_number = mutant(attention_backward_config, ("divisor if 2 * divisor > limit else limit", "limit"))
    assert wrong_sections(cache_alone)
    assert wrong_sections(any_number)


def test_shared_memory_is_counted():
    """H = 128: K and V 64 KiB, two stages of Q and dO with lse and delta 65 KiB, dS twice 32 KiB."""
    kib = 1024
    fused, alone = (key_block_bytes(shape(), BackwardConfig(), fused=fused) for fused in (True, False))
    assert fused == (64 + 65 + 32 + 2) * kib
    assert alone == (64 + 65 + 2) * kib
    assert query_block_bytes(shape(), BackwardConfig()) == (64 + 128 + 2) * kib


@pytest.mark.parametrize(
    ("sizes", "settings", "deterministic", "reason"),
    [
        ((128, 128), {"stages": 4}, False, "shared memory"),
        ((128, 128), {"kv_stages": 3}, True, "shared memory"),
        ((128, 128), {"block_q": 128}, True, "registers"),
        ((64, 64), {"block_q": 64}, False, "columns"),
        ((256, 256), {"block_kv": 128, "kv_stages": 1}, False, "block_kv"),
    ],
)
def test_settings_that_do_not_fit_a_call_are_refused(sizes, settings, deterministic, reason):
    found = config_refusals(shape(*sizes), BackwardConfig(**settings), deterministic=deterministic)
    assert any(reason in text for text in found)


def test_a_config_that_forgets_the_exchange_is_noticed():
    """Without dS in the count, settings would pass that the chip refuses."""
    wrong = mutant(
        attention_backward_config, (" if fused else 0\n    return keys", " if not fused else 0\n    return keys")
    )
    config = BackwardConfig(stages=4)
    assert config_refusals(shape(), config, deterministic=False)
    assert not wrong.config_refusals(shape(), config, deterministic=False)
    assert key_block_bytes(shape(), config, fused=True) > SHARED_MEMORY


def test_what_the_kernels_do_not_take_is_refused_with_every_reason():
    assert not refusals(shape(), itemsize=2)
    assert len(refusals(shape(192, 192, T=100), itemsize=4)) == 3
