"""Shared set-up: strict jax, virtual devices, run-time shape checks, reproducible hypothesis.

All of it must happen before jax or the library is imported, hence in `pytest_configure` and not in fixtures.
"""

import gc
import importlib.util
import os
import re
from collections.abc import Iterator

import hypothesis
import pytest

VIRTUAL_DEVICES = 8
CHECKED_PACKAGES = ["flashspec", "pallas_kernels"]
HAS_BEARTYPE = importlib.util.find_spec("beartype") is not None

hypothesis.settings.register_profile("flashspec", derandomize=True, deadline=None, max_examples=25, database=None)
hypothesis.settings.load_profile("flashspec")


def selects_gpu(expression: str) -> bool:
    """Whether a `-m` expression asks for tests that need a GPU; without one nothing is deselected."""
    return not expression.strip() or re.search(r"(?<!not )\bgpu\b", expression) is not None


def pytest_configure(config: pytest.Config) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={VIRTUAL_DEVICES}".strip()
    if not selects_gpu(config.option.markexpr):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if HAS_BEARTYPE:
        from jaxtyping import install_import_hook

        from tests import typechecks

        install_import_hook(CHECKED_PACKAGES, f"{typechecks.__name__}.{typechecks.check_functions.__name__}")

    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_report_header(config: pytest.Config) -> str:
    import jax

    shapes = "checked at run time" if HAS_BEARTYPE else "NOT checked at run time (beartype is not installed)"
    return f"jax {jax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}; annotated shapes: {shapes}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    import jax

    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True, scope="module")
def programs_end_with_their_module() -> Iterator[None]:
    """Compiled programs of a module are dropped after it.

    Each holds some memory mappings; those of the whole suite together are more than Linux allows a process (65,530),
    and the compiler then crashes.
    """
    import jax

    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit mode for one test."""
    import jax

    with jax.enable_x64(True):
        yield
