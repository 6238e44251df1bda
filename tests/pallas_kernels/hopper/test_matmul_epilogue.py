"""The Hopper matmul with its tail without a GPU: interpreted against numpy in float64, and lowered for one."""

import dataclasses
import itertools
from collections.abc import Callable
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

SMALL = MatmulEpilogueConfig(block_n=64, stages=2, programs=2)
PHI: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {
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
    config: Any = SMALL

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
    "narrow tiles at the end": Case(
        (16, 448, 192),
        "gelu_tanh",
        biased=True,
        config=MatmulEpilogueConfig(warpgroups=1, block_n=128, stages=2, programs=3),
    ),
    "rows and columns past the end, two tiles a program": Case((136, 192, 128), "gelu_tanh", biased=True),
    "few rows, gated, all operands": Case(
        (16, 128, 128),
        "silu",
        gated=True,
        biased=True,
        residual=jnp.float32,
        config=MatmulEpilogueConfig(warpgroups=1, block_n=64, stages=3, programs=2),
    ),
}
SLOW = {
    "no tail, more stages than steps": Case(
        (64, 64, 64), config=MatmulEpilogueConfig(warpgroups=1, block_n=64, programs=3)
    ),
    "pieces of 32 columns, float16": Case(
        (72, 96, 128),
        "tanh",
        residual=jnp.float16,
        dtype=jnp.float16,
        config=MatmulEpilogueConfig(block_n=96, stages=3, programs=1),
    ),
    "four pieces a tile, groups that are cut off": Case(
        (392, 512, 64), "sigmoid", biased=True, config=MatmulEpilogueConfig(stages=2, group=3, programs=3)
    ),
    "narrow tiles at the end, gated": Case(
        (200, 192, 192),
        "silu",
        gated=True,
        biased=True,
        config=MatmulEpilogueConfig(block_n=128, stages=3, programs=3),
    ),
    "blocks of 128 of the contraction": Case(
        (128, 128, 320), "relu", config=MatmulEpilogueConfig(block_n=64, block_k=128, stages=2, programs=2)
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
    wrong = mutant(module, ("zs, *gates = (", "*gates, zs = ("))
    case = CASES["few rows, gated, all operands"]
    with pytest.raises(AssertionError):
        assert_rounded_once(result(case, wrong.matmul_epilogue), case)


@pytest.mark.slow
def test_the_bias_of_another_piece_is_noticed() -> None:
    wrong = mutant(module, ("biases.at[w, span]", "biases.at[w, : span.stop - span.start]"))
    case = SLOW["four pieces a tile, groups that are cut off"]
    with pytest.raises(AssertionError):
        assert_rounded_once(result(case, wrong.matmul_epilogue), case)


@pytest.mark.parametrize("together", [1, 2])
def test_the_fast_activations_are_the_formulas(together: int) -> None:
    z = np.linspace(-12, 12, 4001, dtype=np.float32)
    ends = np.asarray([-1e4, 1e4, 0], np.float32)
    for name, phi in ACTIVATIONS.items():
        for given in (z, ends):
            others = [given, given[::-1]][:together]  # what shares a reciprocal does not disturb its neighbour
            for one, got in zip(others, phi([jnp.asarray(one) for one in others]), strict=True):
                with np.errstate(over="ignore"):
                    want = PHI[name](one.astype(np.float64))
                np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-6, atol=2e-6)


def test_whole_tiles_then_narrow_ones() -> None:
    """Every column of every tile once."""
    for M, products, programs in itertools.product((16, 256, 8192), (1, 2), (64, 132)):
        shape = MatmulShape(M, 14336, 4096, products)
        config = heuristic(shape, programs)
        rows, columns = config.tiles(shape)
        deal = config.deal(shape)
        assert deal.whole * deal.programs + deal.rest == rows * columns
        assert deal.rest * deal.cut <= deal.programs <= programs
    assert heuristic(MatmulShape(8192, 14336, 4096)).deal(MatmulShape(8192, 14336, 4096)).cut == 4


CLUSTERS = {
    "few rows": Case((16, 512, 256), "silu", gated=True, config=MatmulEpilogueConfig(warpgroups=1, block_n=128)),
    "clusters along rows": Case((512, 512, 256), "gelu_tanh", biased=True, config=MatmulEpilogueConfig(cluster_m=2)),
    "clusters along columns": Case((512, 512, 256), residual=jnp.bfloat16, config=MatmulEpilogueConfig(
        cluster_n=2, stages=3
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CLUSTERS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_lowers_for_a_gpu(name: str) -> None:
    case = (CLUSTERS | SLOW)[name]
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
        ({"cut": 3}, "`cut`: expected 1, 2 or 4, got 3"),
        ({"programs": 1, "cluster_m": 2}, "`programs`: expected at least the thread blocks of a cluster, got 1"),
    ],
)
def test_illegal_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatmulEpilogueConfig(**settings)


def test_sizes_that_the_kernel_does_not_take() -> None:
    x, w = jnp.zeros((8, 60), jnp.bfloat16), jnp.zeros((60, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="multiples of 8, 64 and 64, not of"):
        matmul_epilogue(x, w, config=SMALL)
    shape = MatmulShape(128, 256, 64, products=2)
    assert "registers for sums" in " ".join(MatmulEpilogueConfig().refusals(shape))
    assert "shared memory" in " ".join(MatmulEpilogueConfig(stages=5).refusals(shape._replace(products=1)))


@pytest.mark.parametrize("products", [1, 2])
@pytest.mark.parametrize("residual", [0, 2, 4])
def test_the_heuristic_and_all_candidates_are_legal(products: int, residual: int) -> None:
    for M in (1, 16, 64, 72, 256, 8192):
        shape = MatmulShape(M, 14336, 4096, products, residual)
        settings = list(candidates(shape))
        assert settings[0] == heuristic(shape)
        assert all(not config.refusals(shape) for config in settings)
