"""The Hopper matmul with its tail without a GPU: interpreted against numpy in float64, and lowered for one."""

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.hopper import matmul_epilogue as module
from pallas_kernels.gpu.hopper import matmul_epilogue_activations as activations
from pallas_kernels.gpu.hopper.matmul_epilogue import matmul_epilogue
from pallas_kernels.gpu.hopper.matmul_epilogue_config import (
    BLOCK_M,
    TILE,
    FewRowsConfig,
    MatmulEpilogueConfig,
    MatmulShape,
    heuristic,
    passed_over,
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
    paired: bool = False  # the gate and what it gates in one array
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
        (120, 448, 128), "gelu_tanh", biased=True, config=MatmulEpilogueConfig(block_n=128, stages=2, programs=3)
    ),
    "rows and columns past the end, two tiles a program": Case((136, 192, 128), "gelu_tanh", biased=True),
    "gated, all operands": Case(
        (72, 128, 128),
        "silu",
        gated=True,
        biased=True,
        residual=jnp.float32,
        config=MatmulEpilogueConfig(block_n=64, stages=3, programs=2),
    ),
}
SLOW = {
    "gate and value in one array, whose tiles are cut off": Case(
        (72, 192, 128),
        "silu",
        gated=True,
        biased=True,
        paired=True,
        config=MatmulEpilogueConfig(block_n=128, stages=2, programs=2),
    ),
    "no tail, more stages than steps": Case((64, 64, 64), config=MatmulEpilogueConfig(block_n=64, programs=3)),
    "three pieces a tile, float16": Case(
        (72, 192, 128),
        "tanh",
        residual=jnp.float16,
        dtype=jnp.float16,
        config=MatmulEpilogueConfig(block_n=192, stages=3, programs=1),
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
}


def result(case: Case, kernel: Any = matmul_epilogue) -> np.ndarray:
    given = case.operands()
    if case.paired:
        given["w"] = jnp.stack([given.pop("gate"), given["w"]], axis=1)
    with interpreted():
        got = kernel(**given, activation=case.activation, config=case.config)
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
    case = dataclasses.replace(CASES["gated, all operands"], activation=activation, gated=False)
    assert_rounded_once(result(case), case)


def test_the_gate_on_the_wrong_product_is_noticed() -> None:
    blocks = "zip(accumulators, self._blocks(memory, tile, slot)"
    wrong = mutant(module, (blocks, f"{blocks}[::-1]"))
    case = CASES["gated, all operands"]
    with pytest.raises(AssertionError):
        assert_rounded_once(result(case, wrong.matmul_epilogue), case)


def test_a_bias_that_is_not_halved_with_its_sums_is_noticed() -> None:
    wrong = mutant(module, ("self._factor(i) * bias.astype", "bias.astype"))
    case = CASES["narrow tiles at the end"]
    with pytest.raises(AssertionError):
        assert_rounded_once(result(case, wrong.matmul_epilogue), case)


@pytest.mark.slow
def test_the_bias_of_another_piece_is_noticed() -> None:
    wrong = mutant(module, ("biases.at[w, span]", "biases.at[w, : span.stop - span.start]"))
    case = SLOW["four pieces a tile, groups that are cut off"]
    with pytest.raises(AssertionError):
        assert_rounded_once(result(case, wrong.matmul_epilogue), case)


Z = np.concatenate(
    [np.linspace(-16, 16, 64_001), np.geomspace(1e-6, 1e6, 1023), -np.geomspace(1e-6, 1e6, 1024)]
).astype(np.float32)


def assert_within_the_bound(name: str, z: np.ndarray, got: Any) -> None:
    """phi(z) for every z, to what an error of 2^-11 of the hyperbolic tangent leaves, and float32."""
    exact_z = z.astype(np.float64)
    with np.errstate(over="ignore"):
        want = PHI[name](exact_z)
    left = {"gelu_tanh": 2**-12 * np.abs(exact_z), "silu": 2**-12 * np.abs(exact_z), "sigmoid": 2**-12, "tanh": 2**-11}
    allowed = left.get(name, 0) + 2**-21 * (np.abs(exact_z) if name not in ("sigmoid", "tanh") else 1)
    assert np.all(np.abs(np.asarray(got, np.float64) - want) <= allowed)


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_an_activation_is_as_exact_as_it_says(name: str) -> None:
    """With an instruction that is off by its 2^-11 everywhere; with one of bfloat16, by 2^-8, it would not be."""

    def with_error(error: float) -> jax.Array:
        lax = SimpleNamespace(tanh=lambda u: jnp.tanh(u) * np.float32(1 + error))
        return mutant(activations, lax=lax).ACTIVATIONS[name](jnp.asarray(Z) / 2)

    for error in (0, 2**-11, -(2**-11)):
        assert_within_the_bound(name, Z, with_error(error))
    if name != "relu":
        with pytest.raises(AssertionError):
            assert_within_the_bound(name, Z, with_error(-(2**-8)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bound_of_an_activation_is_what_rounding_its_argument_would_cost(dtype: str) -> None:
    """2^-12 |z| is no more than half a unit in the last place of z."""
    z = Z[(np.abs(Z) > float(jnp.finfo(dtype).smallest_normal)) & (np.abs(Z) < float(jnp.finfo(dtype).max))]
    half_unit = float(jnp.finfo(dtype).eps) / 2 * np.exp2(np.floor(np.log2(np.abs(z))))
    assert np.all(2**-12 * np.abs(z) <= half_unit)
    assert not np.all(2**-10 * np.abs(z) <= half_unit) or dtype == "bfloat16"


def test_whole_tiles_then_narrow_ones() -> None:
    """Every column of every tile once."""
    for M, products, programs in itertools.product((256, 8192), (1, 2), (64, 132)):
        shape = MatmulShape(M, 14336, 4096, products)
        config = heuristic(shape, programs)
        assert isinstance(config, MatmulEpilogueConfig)
        rows, columns = config.tiles(shape)
        deal = config.deal(shape)
        assert deal.whole * deal.programs + deal.rest == rows * columns
        assert deal.rest * deal.cut <= deal.programs <= programs
        assert (deal.cut == 4) == ((M, products, programs) == (8192, 1, 132))


LARGE = {
    "the largest tiles": Case((512, 512, 256), "gelu_tanh", biased=True, config=MatmulEpilogueConfig()),
    "gated": Case((512, 512, 256), "silu", gated=True, config=MatmulEpilogueConfig(block_n=128)),
}


@pytest.mark.parametrize("name", [*LARGE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_lowers_for_a_gpu(name: str) -> None:
    case = (LARGE | SLOW)[name]
    call = jax.jit(lambda given: matmul_epilogue(**given, activation=case.activation, config=case.config))
    assert "mosaic_gpu" in call.trace(case.operands()).lower(lowering_platforms=("cuda",)).as_text()


def test_lowers_in_64_bit_mode(x64: None) -> None:
    case = LARGE["the largest tiles"]
    call = jax.jit(lambda given: matmul_epilogue(**given, activation=case.activation, config=case.config))
    assert "mosaic_gpu" in call.trace(case.operands()).lower(lowering_platforms=("cuda",)).as_text()


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_n": 264}, "`block_n`: expected 64, 128, 192 or 256, got 264"),
        ({"stages": 1}, "`stages`: expected 2 to 32, got 1"),
        ({"cut": 3}, "`cut`: expected 1, 2 or 4, got 3"),
        ({"programs": 0}, "`programs`: expected at least 1, got 0"),
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
def test_the_heuristic_is_legal(products: int, residual: int) -> None:
    for M, N in itertools.product((1, 16, 64, 72, 256, 8192), (64, 4096, 6208, 14336)):
        shape = MatmulShape(M, N, 4096, products, residual)
        config = heuristic(shape)
        assert isinstance(config, FewRowsConfig) == (M <= TILE)
        assert not config.refusals(shape)


def test_xla_is_taken_where_most_multiprocessors_would_idle() -> None:
    """At every size that was measured there is work for most; with 56 tiles of 132, where it lost, there is not."""
    for M, products in itertools.product((16, 256, 8192), (1, 2)):
        assert passed_over(MatmulShape(M, 14336, 4096, products)) is None
    for M in (16, BLOCK_M):
        reason = passed_over(MatmulShape(M, 56 * 64, 4096))
        assert reason is not None
        assert "56 tiles" in reason
    assert passed_over(MatmulShape(16, 56 * 64, 4096), programs=64) is None
