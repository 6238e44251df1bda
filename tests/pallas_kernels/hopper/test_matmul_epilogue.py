"""The Hopper matmul with its tail without a GPU: interpreted against numpy in float64, and lowered for one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.hopper import matmul_epilogue as module
from pallas_kernels.gpu.hopper.matmul_epilogue import matmul_epilogue
from pallas_kernels.gpu.hopper.matmul_epilogue_activations import ACTIVATIONS
from pallas_kernels.gpu.hopper.matmul_epilogue_config import (
    MatmulEpilogueConfig,
    MatmulShape,
    candidates,
    heuristic,
)
from tests.mutants import mutant
from tests.pallas_kernels.hopper.interpreter import interpreted

SMALL = MatmulEpilogueConfig(block_n=64, stages=2, lead=1, programs=2)
PHI = {
    None: lambda z: z,
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "relu": lambda z: np.maximum(z, 0),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
}


@dataclasses.dataclass
class Case:
    """One call of the raw kernel."""

    sizes: tuple[int, int, int]  # M, N, K
    activation: str | None = None
    gated: bool = False
    biased: bool = False
    residual: Any = None
    dtype: Any = jnp.bfloat16
    config: MatmulEpilogueConfig = SMALL

    def operands(self) -> dict[str, Any]:
        M, N, K = self.sizes
        rng = np.random.default_rng(0)

        def normal(*size: int, dtype: Any = self.dtype) -> Any:
            return jnp.asarray(rng.normal(size=size) * (K**-0.5 if size == (K, N) else 1), dtype)

        made = {"x": normal(M, K), "w": normal(K, N)}
        made |= {"bias": normal(N)} if self.biased else {}
        made |= {"gate": normal(K, N)} if self.gated else {}
        made |= {"gate_bias": normal(N, dtype=jnp.float32)} if self.gated and self.biased else {}
        return made | ({} if self.residual is None else {"residual": normal(M, N, dtype=self.residual)})


CASES = {
    "rows and columns past the end, two tiles a program": Case((136, 200, 136), "gelu_tanh", biased=True),
    "few rows, gated, all operands": Case(
        (16, 72, 72),
        "silu",
        gated=True,
        biased=True,
        residual=jnp.float32,
        config=MatmulEpilogueConfig(warpgroups=1, block_n=64, stages=3, lead=0, programs=2),
    ),
}
SLOW = {
    "no tail, more stages than steps": Case(
        (64, 64, 64), config=MatmulEpilogueConfig(warpgroups=1, block_n=64, lead=0, programs=3)
    ),
    "pieces of 32 columns, float16": Case(
        (72, 96, 128),
        "tanh",
        residual=jnp.float16,
        dtype=jnp.float16,
        config=MatmulEpilogueConfig(block_n=96, stages=3, lead=1, programs=1),
    ),
    "pieces of 64 columns, groups that are cut off": Case(
        (392, 256, 64),
        "sigmoid",
        biased=True,
        config=MatmulEpilogueConfig(block_n=128, stages=2, lead=0, group=3, programs=3),
    ),
    "blocks of 128 of the contraction": Case(
        (128, 128, 328), "relu", config=MatmulEpilogueConfig(block_n=64, block_k=128, stages=2, lead=1, programs=2)
    ),
}


def result(case: Case, kernel: Any = matmul_epilogue) -> np.ndarray:
    with interpreted():
        got = kernel(**case.operands(), activation=case.activation, config=case.config)
    assert got.dtype == case.dtype
    return np.asarray(got, np.float64)


def exact(case: Case) -> np.ndarray:
    """The formula, in float64."""
    given = {name: np.asarray(a, np.float64) for name, a in case.operands().items()}
    z = given["x"] @ given["w"] + given.get("bias", 0)
    if case.gated:
        y = PHI[case.activation](given["x"] @ given["gate"] + given.get("gate_bias", 0)) * z
    else:
        y = PHI[case.activation](z)
    return y + given.get("residual", 0)


def assert_rounded_once(got: np.ndarray, case: Case) -> None:
    """Half a unit in the last place of the result's dtype, and what sums and fast functions of float32 leave."""
    want, unit = exact(case), float(jnp.finfo(case.dtype).eps)
    allowed = 0.505 * unit * np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 1e-4)))) + 2e-5
    assert np.all(np.abs(got - want) <= allowed)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_interpreted(name: str) -> None:
    case = (CASES | SLOW)[name]
    assert_rounded_once(result(case), case)


@pytest.mark.slow
@pytest.mark.parametrize("activation", PHI)
def test_every_activation(activation: str | None) -> None:
    case = dataclasses.replace(CASES["few rows, gated, all operands"], activation=activation, gated=False)
    assert_rounded_once(result(case), case)


def test_the_gate_on_the_wrong_product_is_noticed() -> None:
    wrong = mutant(module, ("z, *gates = (", "*gates, z = ("))
    case = CASES["few rows, gated, all operands"]
    with pytest.raises(AssertionError):
        assert_rounded_once(result(case, wrong.matmul_epilogue), case)


@pytest.mark.slow
def test_the_bias_of_another_piece_is_noticed() -> None:
    wrong = mutant(module, ("span = pl.ds(tile.column + i *", "span = pl.ds(tile.column + 0 * i *"))
    case = SLOW["pieces of 64 columns, groups that are cut off"]
    with pytest.raises(AssertionError):
        assert_rounded_once(result(case, wrong.matmul_epilogue), case)


def test_the_fast_activations_are_the_formulas() -> None:
    z = np.linspace(-12, 12, 4001, dtype=np.float32)
    for name, phi in ACTIVATIONS.items():
        want = PHI[name](z.astype(np.float64))
        np.testing.assert_allclose(np.asarray(phi(jnp.asarray(z)), np.float64), want, rtol=2e-6, atol=2e-6)
    for name in ("gelu_tanh", "silu", "sigmoid", "tanh"):  # no NaN at the ends
        ends = np.asarray(ACTIVATIONS[name](jnp.asarray([-1e4, 1e4], jnp.float32)), np.float64)
        np.testing.assert_allclose(ends, PHI[name](np.asarray([-700.0, 1e4])), rtol=1e-6, atol=1e-6)


CLUSTERS = {
    "few rows": Case((16, 512, 256), "silu", gated=True, config=MatmulEpilogueConfig(warpgroups=1, block_n=128)),
    "clusters along rows": Case((512, 512, 256), "gelu_tanh", biased=True, config=MatmulEpilogueConfig(cluster_m=2)),
    "clusters along columns": Case((512, 512, 256), residual=jnp.bfloat16, config=MatmulEpilogueConfig(
        cluster_n=2, stages=3
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", CLUSTERS)
def test_lowers_for_a_gpu(name: str) -> None:
    case = CLUSTERS[name]
    call = jax.jit(lambda given: matmul_epilogue(**given, activation=case.activation, config=case.config))
    assert "mosaic_gpu" in call.trace(case.operands()).lower(lowering_platforms=("cuda",)).as_text()


def test_lowers_in_64_bit_mode(x64: None) -> None:
    case = CLUSTERS["clusters along rows"]
    call = jax.jit(lambda given: matmul_epilogue(**given, activation=case.activation, config=case.config))
    assert "mosaic_gpu" in call.trace(case.operands()).lower(lowering_platforms=("cuda",)).as_text()


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warpgroups": 3}, "`warpgroups`: expected 1 or 2, got 3"),
        ({"block_n": 264}, "`block_n`: expected a multiple of 32 from 32 to 256, got 264"),
        ({"block_k": 32}, "`block_k`: expected a multiple of 64 from 64 to 256, got 32"),
        ({"stages": 1}, "`stages`: expected 2 to 32, got 1"),
        ({"lead": 4}, "`lead`: expected at least 0 and below `stages`, got 4"),
        ({"programs": 1, "cluster_m": 2}, "`programs`: expected at least the thread blocks of a cluster, got 1"),
    ],
)
def test_illegal_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatmulEpilogueConfig(**settings)


def test_sizes_that_the_kernel_does_not_take() -> None:
    x, w = jnp.zeros((8, 60), jnp.bfloat16), jnp.zeros((60, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="K and N of 60 and 64 are not"):
        matmul_epilogue(x, w, config=SMALL)
    shape = MatmulShape(128, 256, 64, products=2)
    assert "registers for sums" in " ".join(MatmulEpilogueConfig().refusals(shape))
    assert "shared memory" in " ".join(MatmulEpilogueConfig(stages=5).refusals(shape._replace(products=1)))


@pytest.mark.parametrize("products", [1, 2])
@pytest.mark.parametrize("residual", [0, 2, 4])
def test_the_heuristic_and_all_candidates_are_legal(products: int, residual: int) -> None:
    for M in (1, 16, 64, 65, 256, 8192):
        shape = MatmulShape(M, 14336, 4096, products, residual)
        settings = list(candidates(shape))
        assert settings[0] == heuristic(shape)
        assert all(not config.refusals(shape) for config in settings)
