"""The Hopper matmul with its tail for few rows without a GPU: interpreted against numpy, and lowered for one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gpu.hopper import matmul_epilogue_rows as module
from pallas_kernels.gpu.hopper.matmul_epilogue_config import FewRowsConfig, MatmulShape
from pallas_kernels.gpu.hopper.matmul_epilogue_rows import matmul_epilogue_rows
from tests.mutants import mutant
from tests.pallas_kernels.hopper.test_matmul_epilogue import Case, assert_rounded_once, result

CASES = {
    "sixteen rows, bias": Case((16, 256, 192), "gelu_tanh", biased=True, config=FewRowsConfig(stages=2)),
    "five rows, gated, all operands": Case(
        (5, 64, 128),
        "silu",
        gated=True,
        biased=True,
        residual=jnp.float32,
        config=FewRowsConfig(warpgroups=1, stages=3),
    ),
}
PAIRED = dataclasses.replace(CASES["five rows, gated, all operands"], sizes=(5, 128, 128), residual=None, paired=True)
CASES["five rows, gate and value in one array"] = PAIRED
SLOW = {
    "one row, float16, more stages than steps": Case(
        (1, 128, 64), "tanh", residual=jnp.float16, dtype=jnp.float16, config=FewRowsConfig()
    ),
    "as many rows as there can be": Case(
        (64, 192, 128), config=FewRowsConfig(warpgroups=3, stages=2), residual=jnp.bfloat16
    ),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_interpreted(name: str) -> None:
    case = (CASES | SLOW)[name]
    assert_rounded_once(result(case, matmul_epilogue_rows), case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(memory.w, memory.gate), strict=False", "(memory.gate, memory.w), strict=False"),
        ("rows = pl.ds(self.column * 0, self.rows)", "rows = pl.ds(self.column * 0 + 1, self.rows)"),
    ],
)
def test_a_wrong_kernel_is_noticed(old: str, new: str) -> None:
    case = CASES["five rows, gated, all operands"]
    with pytest.raises(AssertionError):
        assert_rounded_once(result(case, mutant(module, (old, new)).matmul_epilogue_rows), case)


def test_the_value_for_the_gate_is_noticed() -> None:
    wrong = mutant(module, ("zip(sources, (memory.w", "zip(sources[::-1], (memory.w"))
    with pytest.raises(AssertionError):
        assert_rounded_once(result(PAIRED, wrong.matmul_epilogue_rows), PAIRED)


def lowered(case: Case) -> str:
    call = jax.jit(lambda given: matmul_epilogue_rows(**given, activation=case.activation, config=case.config))
    return call.trace(case.operands()).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_a_gpu(name: str) -> None:
    assert "mosaic_gpu" in lowered(CASES[name])


def test_lowers_in_64_bit_mode(x64: None) -> None:
    assert "mosaic_gpu" in lowered(CASES["five rows, gated, all operands"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warpgroups": 5}, "`warpgroups`: expected 1 to 4, got 5"),
        ({"stages": 1}, "`stages`: expected 2 to 32, got 1"),
    ],
)
def test_illegal_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FewRowsConfig(**settings)


def test_sizes_that_the_kernel_does_not_take() -> None:
    shape = MatmulShape(65, 192, 60)
    reasons = " ".join(FewRowsConfig(stages=16).refusals(shape))
    for reason in (
        "up to 64 rows, not 65",
        "multiples of 8, 64 and 128, not of (65, 192, 60)",
        "bytes of shared memory",
    ):
        assert reason in reasons
    x, w = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="64 and 128, not of"):
        matmul_epilogue_rows(x, w, config=FewRowsConfig())
