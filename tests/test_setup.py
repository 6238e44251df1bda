"""The test session is as strict as `conftest.py` claims: each rule is broken here once, and must object."""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import HAS_BEARTYPE, VIRTUAL_DEVICES, selects_gpu


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(Exception, match="no available implicit dtype promotion path"):
        jnp.ones(2, jnp.bfloat16) + jnp.ones(2, jnp.float32)


def test_mixed_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((2, 2)) + jnp.ones(2)


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning, match="a planted warning"):
        warnings.warn("a planted warning", stacklevel=1)


def test_virtual_devices_are_there() -> None:
    assert len(jax.devices("cpu")) >= VIRTUAL_DEVICES


def test_x64_is_on_for_one_test_only(x64: None) -> None:
    assert jnp.ones(2, jnp.float64).dtype == jnp.float64


def test_x64_is_off_again() -> None:
    assert not jax.config.jax_enable_x64


@pytest.mark.skipif(not HAS_BEARTYPE, reason="beartype is not installed")
def test_annotations_of_the_library_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
from jaxtyping import Array, Float

def double(x: Float[Array, "B T N"]) -> Float[Array, "B T N"]:
    return 2 * x
"""
    package = tmp_path / "pallas_kernels_planted"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    from jaxtyping import install_import_hook

    with install_import_hook("pallas_kernels_planted", "tests.typechecks.check_functions"):
        import pallas_kernels_planted as planted
    assert planted.double(jnp.ones((1, 2, 3))).shape == (1, 2, 3)
    with pytest.raises(Exception, match="Type-check error"):
        planted.double(jnp.ones((2, 3)))


@pytest.mark.parametrize(
    ("expression", "gpu"),
    [("not slow and not gpu", False), ("slow", False), ("gpu", True), ("slow or gpu", True), ("", True)],
)
def test_gpu_is_only_looked_for_where_it_is_asked_for(expression: str, gpu: bool) -> None:
    assert selects_gpu(expression) is gpu
