"""The Hopper attention forward without a GPU: interpreted against array code, and lowered for one."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.hopper import attention_forward as attention_forward_module
from pallas_kernels.gpu.hopper import attention_forward_tiles, attention_forward_warpgroups
from pallas_kernels.gpu.hopper.attention_forward import attention_forward
from pallas_kernels.gpu.hopper.attention_forward_config import (
    FAST,
    PLAIN,
    AttentionShape,
    ForwardConfig,
    candidates,
    heuristic,
)
from pallas_kernels.gpu.hopper.attention_forward_tiles import Tiles, deal
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, Bounds, SegmentIds
from tests.attention import hopper_twin
from tests.mutants import mutant
from tests.pallas_kernels.hopper.interpreter import interpreted, races_found

SMALL = ForwardConfig(block_kv=64, programs=2, heads_per_section=1)
DEFAULT = dataclasses.replace(SMALL, programs=1, **FAST)  # the loop of heads of 128
EARLY = dataclasses.replace(DEFAULT, early_turn=2)


@dataclasses.dataclass
class Case:
    """One call of the raw kernel."""

    sizes: tuple[int, int, int, int]  # T, S, N, K
    bounds: Bounds
    left: bool = False
    right: bool = False
    traced: bool = False
    segments: bool = False
    sinks: bool = False
    soft_cap: float | None = None
    statistics: bool = False
    scale: float = 0.1
    config: ForwardConfig = SMALL

    def operands(self) -> tuple[Any, ...]:
        T, S, N, K = self.sizes
        rng = np.random.default_rng(0)
        query, key, value = (jnp.asarray(rng.normal(size=(1, *s, 64)), jnp.bfloat16) for s in ((T, N), (S, K), (S, K)))
        bounds = jnp.asarray([self.bounds], jnp.int32) if self.traced else None
        ids = [jnp.asarray(np.sort(rng.integers(0, 3, (1, size))), jnp.int32) for size in (T, S)]
        sinks = jnp.asarray(rng.normal(size=(1, N)), jnp.float32) if self.sinks else None
        return query, key, value, bounds, SegmentIds(*ids) if self.segments else None, sinks

    def options(self) -> dict[str, Any]:
        mask = AttentionMask(self.left, self.right, self.segments, None if self.traced else self.bounds)
        return {
            "mask": mask,
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "statistics": self.statistics,
            "config": self.config,
        }


CASES = {
    "causal, grouped": Case((128, 128, 2, 1), Bounds(0, 0, 128, 128), right=True),
    "window and lengths, traced": Case(
        (136, 200, 1, 1), Bounds(-70, 64, 130, 190), True, True, traced=True, sinks=True
    ),
    "segments": Case((136, 136, 1, 1), Bounds(0, 0, 136, 136), segments=True),
    "statistics of capped scores": Case(
        (64, 72, 1, 1), Bounds(0, 0, 64, 72), statistics=True, soft_cap=2.0, scale=-0.1
    ),
    "early turn, three tiles in turn": Case((384, 128, 1, 1), Bounds(0, 0, 384, 128), right=True, config=EARLY),
    "default of 128, three tiles in turn": Case(
        (384, 192, 1, 1), Bounds(-70, 0, 384, 190), True, True, sinks=True, config=DEFAULT
    ),
}
SLOW = {
    "nothing visible": Case((64, 64, 1, 1), Bounds(0, -100, 64, 64), right=True),
    "three warpgroups, no dealing": Case(
        (200, 128, 1, 1),
        Bounds(0, 0, 200, 128),
        right=True,
        config=ForwardConfig(block_kv=64, warpgroups=3, shared_output=True, programs=0),
    ),
    "early turn, three warpgroups": Case(
        (392, 200, 1, 1),
        Bounds(0, 0, 392, 200),
        segments=True,
        sinks=True,
        config=dataclasses.replace(EARLY, warpgroups=3),
    ),
    "early turn, statistics": Case(
        (256, 200, 1, 1),
        Bounds(-70, 64, 250, 190),
        True,
        True,
        statistics=True,
        soft_cap=2.0,
        config=dataclasses.replace(EARLY, query_buffers=1),
    ),
    "default of 128, statistics": Case(
        (384, 200, 1, 1),
        Bounds(0, 0, 380, 200),
        segments=True,
        statistics=True,
        soft_cap=2.0,
        config=DEFAULT,
    ),
    "turn ahead of scores, one stage": Case(
        (384, 256, 1, 1),
        Bounds(0, 0, 384, 256),
        right=True,
        config=dataclasses.replace(SMALL, stages=1, warpgroups=3, early_turn=1),
    ),
    "lazy sum, two buffers": Case(
        (384, 192, 1, 1), Bounds(0, 0, 384, 192), config=dataclasses.replace(EARLY, early_turn=0)
    ),
}
# Two tiles of one block each, so that no buffer and no stage is used twice.
TINY = Case((128, 64, 1, 1), Bounds(0, 0, 128, 64), config=dataclasses.replace(EARLY, warpgroups=1))


def assert_like_the_twin(case: Case, kernel: Any = attention_forward) -> None:
    with interpreted():
        got = kernel(*case.operands(), **case.options())
    want = hopper_twin.forward(*case.operands(), **case.options())
    for x, y in zip(got, want, strict=True):
        if x.ndim == 3:  # rows past T may hold anything
            x, y = x[:, :, : case.sizes[0]], y[:, :, : case.sizes[0]]
        x, y = np.asarray(x, float), np.asarray(y, float)
        largest = np.max(np.abs(y[np.isfinite(y)]), initial=1.0)
        np.testing.assert_allclose(x, y, atol=2**-8 * largest)  # the kernel rounds weights to bfloat16


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_interpreted(name: str) -> None:
    assert_like_the_twin((CASES | SLOW)[name])


def test_a_window_one_key_too_wide_is_noticed() -> None:
    case = CASES["causal, grouped"]

    def wrong(*operands: Any, mask: AttentionMask, **options: Any) -> Any:
        bounds = mask.bounds._replace(last=1)  # type: ignore[union-attr]
        return attention_forward(*operands, mask=dataclasses.replace(mask, bounds=bounds), **options)

    with pytest.raises(AssertionError):
        assert_like_the_twin(case, wrong)


def test_a_last_block_without_its_values_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the last block wait for a product of their own."""
    original = attention_forward_warpgroups.Warpgroups._store

    def forgetful(self: Any, inputs: Any, outputs: Any, memory: Any, tile: Any, w: Any, folded: Any) -> None:
        original(self, inputs, outputs, memory, tile, w, folded._replace(u=folded.u * 0))

    monkeypatch.setattr(attention_forward_warpgroups.Warpgroups, "_store", forgetful)
    with pytest.raises(AssertionError):
        assert_like_the_twin(CASES["causal, grouped"])


def changed(*edits: tuple[str, str]) -> Any:
    """The kernel, with other text in what its warpgroups do."""
    wrong = mutant(attention_forward_warpgroups, *edits)
    names = {name: getattr(wrong, name) for name in ("Softmax", "Warpgroups")}
    return mutant(attention_forward_module, **names).attention_forward


def test_a_lazy_sum_of_one_thread_is_noticed() -> None:
    with pytest.raises(AssertionError):
        assert_like_the_twin(TINY, changed(("return l.sum(axis=1) if", "return l[:, 0] if")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "edit"),
    [
        # The turn after a tile's first block is passed on to a warpgroup that takes it for granted.
        (128, ("        if ahead_of_values:\n            plgpu", "        if False:\n            plgpu")),
        (192, ("i >= c.query_buffers", "i > c.query_buffers")),
    ],
    ids=("a turn", "a buffer of queries"),
)
def test_what_nobody_waits_for_is_noticed(T: int, edit: tuple[str, str]) -> None:
    """The interpreter raises where a barrier goes on and nobody has seen it."""
    case = dataclasses.replace(TINY, sizes=(T, 64, 1, 1), bounds=Bounds(0, 0, T, 64))
    with pytest.raises(jax.errors.JaxRuntimeError, match="phase"):
        assert_like_the_twin(case, changed(edit))


def test_tiles_that_share_a_buffer_of_queries_race() -> None:
    """Found from the order of accesses alone, whatever comes out; with a buffer each there is no race."""
    edits = [(f"{before}, memory.q.at[buffer]", f"{before}, memory.q.at[w]") for before in ("source", "memory")]
    for kernel, races in ((changed(*edits), True), (attention_forward, False)):
        with interpreted(detect_races=True):
            jax.block_until_ready(kernel(*TINY.operands(), **TINY.options()))
        assert races_found() == races


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_a_gpu(name: str) -> None:
    case = CASES[name]
    call = jax.jit(lambda *operands: attention_forward(*operands, **case.options()))
    text = call.trace(*case.operands()).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_lowers_in_64_bit_mode(x64: None) -> None:
    case = CASES["window and lengths, traced"]
    call = jax.jit(lambda *operands: attention_forward(*operands, **case.options()))
    assert "mosaic_gpu" in call.trace(*case.operands()).lower(lowering_platforms=("cuda",)).as_text()


# The order of the tiles.


def test_every_tile_is_dealt_out_once_and_evenly() -> None:
    costs = np.concatenate([np.arange(32, 0, -1.0)] * 5)
    order = deal(costs, 7)
    mine = [order[1 : 1 + order[0, p], p].tolist() for p in range(7)]
    assert sorted(itertools.chain(*mine)) == list(range(len(costs)))
    sums = [costs[tiles].sum() for tiles in mine]
    assert max(sums) - min(sums) <= costs.max()
    in_turn = [costs[p::7].sum() for p in range(7)]
    assert max(in_turn) - min(in_turn) > max(sums) - min(sums)  # what dealing them in turn would leave


@pytest.mark.parametrize(
    ("mask", "visited"),
    [
        (AttentionMask(bounds=Bounds(0, 0, 512, 512)), [5, 5, 5, 5]),
        (AttentionMask(right=True, bounds=Bounds(0, 0, 512, 512)), [5, 4, 3, 2]),
        (AttentionMask(left=True, right=True, bounds=Bounds(-100, 0, 512, 512)), [3, 3, 3, 2]),
    ],
)
def test_costs_count_the_blocks_that_a_tile_visits(mask: AttentionMask, visited: list[int]) -> None:
    tiles = Tiles(AttentionShape(1, 512, 512, 1, 1, 64, 64), mask, ForwardConfig())
    assert tiles._costs().tolist() == visited


def test_many_tiles_are_left_to_the_hardware() -> None:
    shape = AttentionShape(1, 128, 128, attention_forward_tiles.MOST_DEALT + 1, 1, 64, 64)
    tiles = Tiles(shape, AttentionMask(bounds=Bounds(0, 0, 128, 128)), ForwardConfig())
    assert (tiles.order, tiles.programs) == (None, tiles.count)


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_kv": 96}, "`block_kv`: expected a multiple of 64 from 64 to 256, got 96"),
        ({"stages": 0}, "`stages`: expected 1 to 8, got 0"),
        ({"warpgroups": 4}, "`warpgroups`: expected 1, 2 or 3, got 4"),
        ({"programs": -1}, "`programs`: expected at least 0, got -1"),
        ({"heads_per_section": 0}, "`heads_per_section`: expected at least 1, got 0"),
        ({"query_buffers": 3}, "`query_buffers`: expected 1, or 2 without `shared_output`, got 3"),
        (
            {"query_buffers": 2, "shared_output": True},
            "`query_buffers`: expected 1, or 2 without `shared_output`, got 2",
        ),
        ({"early_turn": 3}, "`early_turn`: expected 0, 1, or 2 with several stages, got 3"),
        ({"early_turn": 2, "stages": 1}, "`early_turn`: expected 0, 1, or 2 with several stages, got 2"),
    ],
)
def test_illegal_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForwardConfig(**settings)


def test_sizes_that_the_kernel_does_not_take() -> None:
    x = jnp.zeros((1, 12, 1, 80), jnp.bfloat16)
    mask = AttentionMask(bounds=Bounds(0, 0, 12, 12))
    with pytest.raises(ValueError, match="multiples of 64, not 80 and 80; needs lengths in multiples of 8"):
        attention_forward(x, x, x, mask=mask, scale=1.0, config=SMALL)


@pytest.mark.parametrize("H", [64, 128, 192, 256])
@pytest.mark.parametrize("statistics", [False, True])
def test_the_heuristic_is_legal(H: int, statistics: bool) -> None:
    for T in (8, 1024, 32768):
        shape = AttentionShape(2, T, T, 8, 2, H, H)
        assert not heuristic(shape, statistics).refusals(shape, statistics)


@pytest.mark.parametrize(("H", "Hv", "loop"), [(64, 64, PLAIN), (64, 128, PLAIN), (128, 128, FAST), (256, 256, PLAIN)])
@pytest.mark.parametrize("statistics", [False, True])
def test_heads_of_128_have_the_loop_that_was_fastest_for_them(
    H: int, Hv: int, loop: dict[str, Any], statistics: bool
) -> None:
    config = heuristic(AttentionShape(2, 1024, 1024, 8, 2, H, Hv), statistics)
    assert config == dataclasses.replace(config, **loop)


@pytest.mark.parametrize("H", [64, 128, 192, 256])
def test_candidates(H: int) -> None:
    """All are legal, and each setting of the loop is tried with the heuristic's order of work."""
    for T in (1024, 2048, 4096):
        shape = AttentionShape(4, T, T, 16, 16, H, H)
        configs = list(candidates(shape))
        first = configs[0]
        assert first == heuristic(shape)
        assert dataclasses.replace(first, **PLAIN) in configs
        assert len(set(configs)) == len(configs)
        assert not any(config.refusals(shape) for config in configs)
        alike = [config for config in configs if config.heads_per_section == first.heads_per_section]
        loops = {(config.early_turn, config.lazy_sum) for config in alike}
        assert loops == {(0, False), (1, False), (2, False), (2, True), *([(1, True)] if H <= 128 else [])}
        assert (2 in {config.query_buffers for config in alike}) == (H <= 128)  # there is no room beyond
        assert not any(config.refusals(shape, True) for config in candidates(shape, statistics=True))
