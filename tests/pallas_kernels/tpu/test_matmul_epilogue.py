"""The TPU matmul with its tail, in the interpreter, against float64 in numpy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.matmul_epilogue import matmul_epilogue
from pallas_kernels.tpu.matmul_epilogue_config import MatmulEpilogueConfig, heuristic

M, K, N = 20, 300, 200
SMALL = MatmulEpilogueConfig(16, 128, 128)  # two blocks of rows, two of columns, three of the contraction


def operands(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"x": (M, K), "w": (K, N), "bias": (N,), "gate": (K, N), "gate_bias": (N,), "residual": (M, N)}
    size = {"residual": 300}  # of the size of what it is added to
    return {name: jnp.asarray(size.get(name, 1) * rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def expected(x: Any, w: Any, bias: Any, gate: Any = None, gate_bias: Any = None, residual: Any = 0.0) -> np.ndarray:
    x, w, bias, residual = (np.asarray(a, float) for a in (x, w, bias, residual))
    z = x @ w + bias
    if gate is None:
        return z / (1 + np.exp(-z)) + residual
    gated = x @ np.asarray(gate, float) + np.asarray(gate_bias, float)
    return gated / (1 + np.exp(-gated)) * z + residual


def assert_close(got: Any, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(got, float), want, rtol=tolerance, atol=tolerance * np.max(np.abs(want)))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("interpreter", ["arrays", "memory"])
def test_against_float64(dtype: Any, interpreter: str) -> None:
    interpret = interpreter == "arrays" or pltpu.InterpretParams(detect_races=True, vector_clock_size=64)
    given = operands(dtype)
    call = functools.partial(matmul_epilogue, activation=jax.nn.silu, config=SMALL, interpret=interpret)
    tolerance = 1e-5 if dtype == np.float32 else 1e-2
    got = jax.jit(call)(**given)
    assert got.dtype == dtype
    assert_close(got, expected(**given), tolerance)
    without = {name: given[name] for name in ("x", "w", "bias")}
    assert_close(jax.jit(call)(**without), expected(**without), tolerance)
    for wrong in (given | {"gate": given["w"], "w": given["gate"]}, given | {"residual": 2 * given["residual"]}):
        with pytest.raises(AssertionError):  # gate and weights swapped; the residual added twice
            assert_close(got, expected(**wrong), tolerance)


def test_blocks_change_rounding_alone() -> None:
    given = operands()
    whole = heuristic(M, N, K, 4, products=2)
    outputs = [
        matmul_epilogue(**given, activation=jnp.tanh, config=config, interpret=True) for config in (SMALL, whole)
    ]
    np.testing.assert_allclose(*map(np.asarray, outputs), rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="`block_m`: expected multiples of 16, 128 and 128"):
        MatmulEpilogueConfig(8, 128, 128)
