"""Rates measured on the spot, and the work that a compiled program says it does."""

import jax.numpy as jnp
import numpy as np
import pytest

from flashspec import calibration, costs
from flashspec.calibration import calibrate, program_work
from flashspec.measure import compile_call

N = 256


def assert_work_of_product(work: calibration.Work) -> None:
    """A product of N x N matrices: 2 N^3 operations; two operands read, one result written."""
    assert work.flops == pytest.approx(2 * N**3, rel=0.01)
    assert work.bytes_moved == pytest.approx(3 * 4 * N**2, rel=0.01)


def test_the_work_of_a_program_is_the_compiler_s_count() -> None:
    square = jnp.ones((N, N), jnp.float32)
    assert_work_of_product(program_work(compile_call(lambda a, b: a @ b, square, square).executable))
    with pytest.raises(AssertionError):
        assert_work_of_product(program_work(compile_call(lambda a, b: a + b, square, square).executable))


def test_measured_rates_bound_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SIZES", {"cpu": (N, 2**16), "gpu": (N, 2**16), "tpu": (N, 2**16)})
    rates = calibrate(repeats=3)
    assert rates.launch_s > 0
    assert "measured on" in rates.source
    assert f"{N} x {N} float32 product" in rates.source
    empty = program_work(compile_call(lambda x: x + np.float32(1), jnp.zeros((), jnp.float32)).executable)
    assert costs.roofline(empty.flops, empty.bytes_moved, rates).bound_by == "launch"
    with pytest.raises(ValueError, match="`repeats`"):
        calibrate(repeats=0)
