"""The portable kernels in an interpreter, against array code and equations in float64; and lowered for GPUs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mosaic

from pallas_kernels.gpu.ampere import (
    attention_backward,
    attention_backward_halves,
    attention_backward_keys,
    attention_backward_queries,
    attention_forward,
    attention_queries,
)
from pallas_kernels.gpu.ampere.attention_backward_config import BackwardConfig
from pallas_kernels.gpu.ampere.attention_forward_config import ForwardConfig
from tests.attention import hopper_twin
from tests.mutants import mutant
from tests.pallas_kernels.ampere.interpreter import interpreted
from tests.pallas_kernels.hopper.test_attention_backward import TOLERANCE, Case, exact, mask_of

FORWARD = ForwardConfig(64, 64, 2, 1, bulk=True)
ONE_STAGE = ForwardConfig(128, 32, 1, 1, bulk=True)
BACKWARD = BackwardConfig(64, 2, 2, 64, 32, 1, bulk=True)
HALVES = dataclasses.replace(BACKWARD, block_q=128, halves=True)
ONE_WARPGROUP = BackwardConfig(64, 1, 1, 64, 32, 1, bulk=True)

CAUSAL = Case(N=2, right=0)
WINDOW = Case(B=1, T=256, S=128, N=2, left=70, right=30, q_start=-20, kv_lengths=(120,), q_lengths=(250,))
SEGMENTS = Case(segments=True, N=2, K=2, soft_cap=2.0, scale=-0.2)


def parameters(table: dict[str, Any], first: tuple[str, ...]) -> Any:
    """Cases; all but the first ones take the default run too long."""
    return [pytest.param(x, id=name, marks=() if name in first else pytest.mark.slow) for name, x in table.items()]


# Forward.


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the forward."""

    case: Case
    config: ForwardConfig = FORWARD
    traced: bool = False
    sinks: bool = False
    statistics: bool = False

    def operands(self) -> tuple[Any, ...]:
        arrays = tuple(jnp.asarray(x) for x in self.case.arrays[:3])
        bounds = jnp.asarray(self.case.bounds) if self.traced else None
        sinks = jnp.linspace(-1.0, 2.0, self.case.B * self.case.N).reshape(self.case.B, -1) if self.sinks else None
        return *arrays, bounds, self.case.segment_ids, sinks

    def options(self) -> dict[str, Any]:
        return {
            "mask": mask_of(self.case, static=not self.traced),
            "scale": self.case.scale,
            "soft_cap": self.case.soft_cap,
            "statistics": self.statistics,
            "config": self.config,
        }


CALLS = {
    "causal, grouped": Call(CAUSAL),
    "window and lengths, traced, one stage": Call(WINDOW, ONE_STAGE, traced=True, sinks=True),
    "statistics of segments and a soft cap": Call(SEGMENTS, statistics=True),
    "statistics of a negative scale": Call(Case(T=64, S=64, scale=-0.2), statistics=True),
    "nothing visible": Call(Case(T=64, S=64, right=0, q_start=-100)),
    "statistics with a sink": Call(CAUSAL, ONE_STAGE, sinks=True, statistics=True),
}


def assert_like_the_twin(call: Call, module: Any = attention_forward) -> None:
    with interpreted():
        got = module.attention_forward(*call.operands(), **call.options())
    want = hopper_twin.forward(*call.operands(), **call.options())
    for x, y in zip(got, want, strict=True):
        expected = np.asarray(y, float)
        largest = np.max(np.abs(expected[np.isfinite(expected)]), initial=1.0)
        np.testing.assert_allclose(
            np.asarray(x, float), expected, atol=2**-8 * largest
        )  # the kernel rounds weights to bfloat16


@pytest.mark.parametrize("call", parameters(CALLS, ("causal, grouped", "window and lengths, traced, one stage")))
def test_forward(call: Call) -> None:
    assert_like_the_twin(call)


WRONG_FORWARD = {
    "what was summed before is not scaled anew": (
        "causal, grouped",
        (("add_product(u * lax.broadcast_in_dim(alpha, u.shape, [0])", "add_product(u"),),
    ),
    "a negative scale turns the maximum": ("statistics of a negative scale", (("if scale < 0:", "if False:"),)),
    "m without its base": ("statistics with a sink", (("rows = [m * LN2, l]", "rows = [m, l]"),)),
}


@pytest.mark.parametrize("wrong", parameters(WRONG_FORWARD, ("what was summed before is not scaled anew",)))
@pytest.mark.filterwarnings("ignore:overflow")
def test_wrong_forwards_fail(wrong: Any) -> None:
    name, edits = wrong
    with pytest.raises(AssertionError):
        assert_like_the_twin(CALLS[name], mutant(attention_forward, *edits))


WRONG_TILES = {
    "a window one key too short": (("column >= lax.broadcast_in_dim(begin", "column > lax.broadcast_in_dim(begin"),),
    "keys past the length": (("column < (tile.row.kv_length if end is None else", "column < (9999 if True else"),),
}


@pytest.mark.parametrize("edits", parameters(WRONG_TILES, ()))
def test_wrong_masks_fail(edits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(attention_queries, *edits).QueryTiles
    monkeypatch.setattr(attention_queries.QueryTiles, "visible", wrong.visible)
    with pytest.raises(AssertionError):
        assert_like_the_twin(CALLS["window and lengths, traced, one stage"])


@pytest.mark.parametrize(
    ("t", "order"), [((0, 2, 5, 7), [2, 3, 4, 0, 1, 5, 6]), ((3, 6, 6, 6), [3, 4, 5]), ((1, 1, 3, 3), [1, 2])]
)
def test_full_blocks_come_first_and_every_block_once(t: tuple[int, ...], order: list[int]) -> None:
    begin, full_begin, full_end, end = t
    tile = attention_queries.Tile(0, 0, 0, None, begin, full_begin, full_end, end)
    assert [int(tile.block(i)) for i in range(end - begin)] == order


# Backward.


def launch(case: Case, config: BackwardConfig, *, deterministic: bool, static: bool, module: Any) -> Any:
    """The kernels as a function of (query, key, value, gradient, lse, delta)."""
    return functools.partial(
        module.attention_backward,
        bounds=None if static else jnp.asarray(case.bounds),
        segments=case.segment_ids,
        mask=mask_of(case, static=static),
        scale=case.scale,
        soft_cap=case.soft_cap,
        deterministic=deterministic,
        config=config,
    )


def errors(
    case: Case, config: BackwardConfig, *, deterministic: bool, static: bool = True, module: Any = attention_backward
) -> list[float]:
    """Relative errors of dQ, dK and dV; NaN is one."""
    expected, lse, delta = exact(case)
    rows = (jnp.asarray(x, jnp.float32) for x in (lse, delta))
    call = launch(case, config, deterministic=deterministic, static=static, module=module)
    with interpreted():
        results = [np.asarray(x, np.float64) for x in jax.jit(call)(*case.arrays, *rows)]
    return [np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-9) for x, y in zip(results, expected, strict=True)]


WIDE = Case(T=128, S=128, H=128, right=0)
TALL = Case(T=128, S=64, N=2, right=0, q_start=-30)
BACKWARDS: dict[str, tuple[Case, BackwardConfig, bool, bool]] = {  # case, config, deterministic, static
    "two warpgroups, columns": (WIDE, BACKWARD, False, True),
    "two warpgroups, queries": (CAUSAL, dataclasses.replace(BACKWARD, block_q=128), False, True),
    "halves, columns": (WIDE, dataclasses.replace(BACKWARD, halves=True), False, True),
    "halves, queries": (CAUSAL, HALVES, False, True),
    "halves, window and lengths, traced": (WINDOW, HALVES, False, False),
    "halves, segments and a soft cap": (SEGMENTS, HALVES, False, True),
    "halves, deterministic": (WIDE, dataclasses.replace(BACKWARD, halves=True, stages=1), True, True),
    "one warpgroup": (TALL, ONE_WARPGROUP, False, True),
    "rows without keys": (Case(right=0, q_lengths=(100,)), ONE_WARPGROUP, False, True),
    "deterministic": (CAUSAL, ONE_WARPGROUP, True, True),
    "deterministic, two warpgroups": (WIDE, BACKWARD, True, True),
    "window and lengths, traced": (WINDOW, dataclasses.replace(BACKWARD, block_q=128), False, False),
    "window and lengths, traced, deterministic": (WINDOW, ONE_WARPGROUP, True, False),
    "segments and a soft cap": (SEGMENTS, ONE_WARPGROUP, False, True),
    "segments and a soft cap, deterministic": (SEGMENTS, BACKWARD, True, True),
}


@pytest.mark.parametrize("call", parameters(BACKWARDS, ("halves, queries", "deterministic")))
def test_backward(call: tuple[Case, BackwardConfig, bool, bool]) -> None:
    case, config, deterministic, static = call
    assert max(errors(case, config, deterministic=deterministic, static=static)) < TOLERANCE


def keys_mutant(*edits: tuple[str, str]) -> Any:
    return mutant(attention_backward, KeyBlocks=mutant(attention_backward_keys, *edits, sync=lambda: None).KeyBlocks)


def halves_mutant(*edits: tuple[str, str]) -> Any:
    wrong = mutant(attention_backward_halves, *edits).HalfQueryBlocks
    return mutant(attention_backward, HalfQueryBlocks=wrong)


def queries_mutant(*edits: tuple[str, str]) -> Any:
    return mutant(attention_backward, QueryBlocks=mutant(attention_backward_queries, *edits).QueryBlocks)


WRONG_BACKWARD = {
    "delta left out": ("one warpgroup", keys_mutant((" - lax.broadcast_in_dim(delta, p.shape, [1])", ""))),
    "dK without the scale": ("one warpgroup", keys_mutant(("dk * self.facts.scale", "dk"))),
    "group's other head": ("one warpgroup", keys_mutant(("block.kv_head * G + member", "block.kv_head * G"))),
    "columns of the other warpgroup": ("two warpgroups, columns", keys_mutant(("(0, w * columns)", "(0, 0)"))),
    "queries of the other warpgroup": ("two warpgroups, queries", keys_mutant(("(w * rows, 0)", "(0, 0)"))),
    "halves: dK of weights": (
        "halves, queries",
        halves_mutant(("else (self.chip.ds_smem, q)", "else (self.chip.p_smem, q)")),
    ),
    "halves: the normaliser of others": (
        "halves, queries",
        halves_mutant(("pl.ds(q_start + w * half, half)]", "pl.ds(q_start, half)]")),
    ),
    "halves: hidden as the first half is": (
        "halves, queries",
        halves_mutant(("block.k_start, q_start + w * half)", "block.k_start, q_start)")),
    ),
    "halves: slope of the soft cap": (
        "halves, segments and a soft cap",
        halves_mutant(("p if slope is None else p * slope", "p")),
    ),
    "slope of the soft cap": ("segments and a soft cap", keys_mutant(("p if slope is None else p * slope", "p"))),
    "dQ without the scale": ("deterministic", queries_mutant(("dq * self.facts.scale", "dq"))),
    "dQ of weights": ("deterministic", queries_mutant(("add_product(dq, ds, k)", "add_product(dq, p, k)"))),
    "empty rows": (
        "rows without keys",
        mutant(attention_backward, ("jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)", "lse * LOG2E")),
    ),
}


@pytest.mark.parametrize("wrong", parameters(WRONG_BACKWARD, ("delta left out",)))
@pytest.mark.filterwarnings("ignore:invalid value")  # a wrong kernel may well multiply infinities
def test_wrong_backwards_fail(wrong: Any) -> None:
    name, module = wrong
    case, config, deterministic, static = BACKWARDS[name]
    assert not max(errors(case, config, deterministic=deterministic, static=static, module=module)) < TOLERANCE


# Lowering.


@pytest.mark.parametrize("capability", [(9, 0), pytest.param((8, 0), marks=pytest.mark.slow)], ids=["9.0", "8.0"])
@pytest.mark.parametrize(
    "deterministic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fused", "deterministic"]
)
def test_lowers_for_cuda(capability: tuple[int, int], deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are operands, and segments; forward and backward."""
    monkeypatch.setattr(mosaic, "_infer_arch", lambda: capability)
    bulk, case = capability[0] >= 9, Case(B=2, T=256, S=128, N=4, K=2, left=5, right=3, segments=True)
    forward = Call(case, dataclasses.replace(FORWARD, bulk=bulk), traced=True)
    calls: dict[Any, Any] = {
        lambda *x: attention_forward.attention_forward(*x, **forward.options()): forward.operands(),
        launch(
            case,
            dataclasses.replace(ONE_WARPGROUP, bulk=bulk),
            deterministic=deterministic,
            static=False,
            module=attention_backward,
        ): (*case.arrays, *[jax.ShapeDtypeStruct((case.B, case.N, case.T), jnp.float32)] * 2),
    }
    for (call, operands), count in zip(calls.items(), (1, 2 if deterministic else 1), strict=True):
        text = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == count


def test_sizes_that_the_kernels_do_not_take() -> None:
    x = jnp.zeros((1, 12, 1, 80), jnp.bfloat16)
    options: dict[str, Any] = {"mask": mask_of(Case(T=12, S=12), static=True), "scale": 1.0}
    with pytest.raises(ValueError, match="multiples of 64, not 80 and 80; needs T in multiples of 64, not 12"):
        attention_forward.attention_forward(x, x, x, config=FORWARD, **options)
    rows = jnp.zeros((1, 1, 12))
    with pytest.raises(ValueError, match="takes head sizes"):
        attention_backward.attention_backward(x, x, x, x, rows, rows, config=BACKWARD, **options)
