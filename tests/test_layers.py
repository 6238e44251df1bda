"""Imports point down: every file has a rank, and imports only smaller ranks or its own folder.

The ranks are read from the syntax trees, so an import inside a function counts as well.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FOLDERS = {
    "pallas_kernels": 0,
    "flashspec.sampling": 2,
    "flashspec.costs": 2,
    "flashspec.attention": 3,
    "flashspec.fusion": 3,
    "flashspec.cache": 4,
    "flashspec.specialize": 4,
    "flashspec.models": 6,
    "flashspec.speculative": 6,
    "experiments": 8,
    "notebooks": 9,
    "tests": 10,
}
FILES = {
    "flashspec.version": 1,
    "flashspec.dims": 1,
    "flashspec.checks": 1,
    "flashspec.devices": 1,
    "flashspec.records": 1,
    "flashspec.selection": 2,
    "flashspec.vmap_rules": 2,
    "flashspec.recording": 3,
    "flashspec.online_softmax": 2,
    "flashspec.masks": 2,
    "flashspec.language_model": 5,
    "flashspec.flax_attention": 6,
    "flashspec.generate": 7,
    "flashspec.measure": 7,
    "flashspec.calibration": 7,
    "flashspec": 7,
}
OURS = {name.partition(".")[0] for name in FOLDERS}

KERNEL_CALLERS = {"flashspec.attention.backends", "flashspec.fusion.backends"}
KERNEL_LEAVES = {"launch", "dropout", "attention_mask"}
# Raw kernels never read a clock, a file or the environment: they may import these and nothing else of the library.
PURE_STDLIB = {"__future__", "abc", "collections", "dataclasses", "enum", "functools", "itertools", "math", "typing"}
PURE_STDLIB |= {"decimal", "fractions", "numbers", "operator", "string", "types"}
KERNEL_PACKAGES = {"jax", "numpy"}


def folder(module: str) -> str:
    """The ranked folder that holds a module; `flashspec` for a file directly in it."""
    return next((name for name in FOLDERS if f"{module}.".startswith(f"{name}.")), module.partition(".")[0])


def rank(module: str) -> int | None:
    """The rank of a dotted module name of ours; None for a module that the tables do not place."""
    return FILES.get(module, FOLDERS.get(folder(module)))


def module_name(path: Path) -> str:
    """`flashspec/cache/dense.py` -> `flashspec.cache.dense`; a package's `__init__.py` has the package's name."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def resolve(node: ast.ImportFrom, path: Path) -> str:
    """The absolute module of a `from ... import`, whatever its dots."""
    if not node.level:
        return node.module or ""
    base = path.parent.parts[: len(path.parent.parts) - node.level + 1]
    return ".".join((*base, *([node.module] if node.module else [])))


def exists(module: str) -> bool:
    """Whether a dotted name is a module or package of this repository (and not merely installed)."""
    file = ROOT.joinpath(*module.split("."))
    return file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()


def imports(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """Every imported module with its line; `from package import module` names the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve(node, path)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in FILES or inner in FOLDERS or exists(inner) else base


def is_kernel_body(module: str) -> bool:
    """Whether a module of `pallas_kernels` holds a kernel, not a launch config or arithmetic that all may use."""
    leaf = module.rpartition(".")[2]
    return module != "pallas_kernels" and leaf not in KERNEL_LEAVES and not leaf.endswith("_config")


def complaint(module: str, target: str) -> str | None:
    """Why `module` may not import `target`; None if it may."""
    top = target.partition(".")[0]
    if module.startswith("pallas_kernels") and top not in {*PURE_STDLIB, *KERNEL_PACKAGES, "pallas_kernels"}:
        return "raw kernels import jax and numpy only"
    if top not in OURS:
        return None
    if target == "flashspec" and module.startswith("flashspec"):
        return "nothing inside flashspec imports its re-exports"
    if module.startswith("flashspec.speculative") and target.startswith("flashspec.models"):
        return "speculation never imports models"
    if top == "pallas_kernels" and module.startswith("flashspec") and is_kernel_body(target):
        return None if module in KERNEL_CALLERS else "only a backends.py imports kernel bodies"
    here, there = rank(module), rank(target)
    if here is None or there is None:
        return f"{module if here is None else target} has no rank in the table"
    down = there < here or (there == here and folder(module) == folder(target))
    return None if down else f"rank {here} imports rank {there}"


def complaints(source: str, path: Path) -> list[str]:
    """All breaches in one file, each with its line."""
    module = module_name(path)
    if rank(module) is None:
        return [f"{path}: {module} has no rank in the table"]
    found = ((line, target, complaint(module, target)) for line, target in imports(source, path))
    return [f"{path}:{line}: {module} imports {target}: {why}" for line, target, why in found if why]


SOURCES = sorted(
    file.relative_to(ROOT)
    for package in sorted(OURS)
    for file in (ROOT / package).rglob("*.py")
    if "__pycache__" not in file.parts and ".ipynb_checkpoints" not in file.parts
)


def test_every_import_points_down() -> None:
    found = [line for file in SOURCES for line in complaints((ROOT / file).read_text(), file)]
    assert not found, "\n".join(found)


def test_the_walk_sees_the_library() -> None:
    modules = {module_name(file) for file in SOURCES}
    assert {"flashspec", "flashspec.checks", "pallas_kernels", "experiments", "tests.test_layers"} <= modules


def test_pure_stdlib_is_standard() -> None:
    assert sys.stdlib_module_names >= PURE_STDLIB


WRONG = [
    ("flashspec/masks.py", "import flashspec.attention", "rank 2 imports rank 3"),
    ("flashspec/masks.py", "def f():\n    from flashspec.attention import api", "rank 2 imports rank 3"),
    ("flashspec/masks.py", "from flashspec.sampling import draw", "rank 2 imports rank 2"),
    ("flashspec/masks.py", "from . import costs", "rank 2 imports rank 2"),
    ("flashspec/cache/dense.py", "from ..specialize import buckets", "rank 4 imports rank 4"),
    ("flashspec/models/llama.py", "from flashspec import generate", "rank 6 imports rank 7"),
    ("flashspec/costs/padding.py", "import experiments.harness", "rank 2 imports rank 8"),
    ("flashspec/speculative/rounds.py", "from flashspec.models import load", "speculation never imports models"),
    ("flashspec/speculative/rounds.py", "import flashspec.models.llama", "speculation never imports models"),
    ("flashspec/generate.py", "import flashspec", "re-exports"),
    ("flashspec/generate.py", "from flashspec import dot_product_attention", "re-exports"),
    ("flashspec/new_part.py", "import jax", "no rank"),
    ("flashspec/generate.py", "import flashspec.new_part", "no rank"),
    ("flashspec/attention/api.py", "from pallas_kernels.tpu import attention_forward", "kernel bodies"),
    ("flashspec/attention/api.py", "import pallas_kernels.gpu.hopper.attention_decode as k", "kernel bodies"),
    ("pallas_kernels/launch.py", "import flashspec.checks", "jax and numpy only"),
    ("pallas_kernels/launch.py", "def f():\n    import time", "jax and numpy only"),
    ("pallas_kernels/launch.py", "import os", "jax and numpy only"),
    ("pallas_kernels/launch.py", "from pathlib import Path", "jax and numpy only"),
    ("experiments/speculative.py", "from tests.conftest import x", "rank 8 imports rank 10"),
]


@pytest.mark.parametrize(("path", "source", "why"), WRONG)
def test_a_planted_import_is_flagged(path: str, source: str, why: str) -> None:
    found = complaints(source, Path(path))
    assert len(found) == 1
    assert why in found[0]


RIGHT = [
    ("flashspec/masks.py", "from flashspec.online_softmax import merge\nfrom . import checks"),
    ("flashspec/cache/dense.py", "from flashspec.cache import state\nfrom . import paged\nfrom .paged import x"),
    ("flashspec/cache/__init__.py", "from flashspec.cache.dense import dense_cache\nfrom . import dense"),
    ("flashspec/cache/dense.py", "from flashspec.attention.views import DenseView\nfrom flashspec import checks"),
    ("flashspec/attention/backends.py", "from pallas_kernels.gpu.hopper import attention_forward"),
    ("flashspec/attention/tuning.py", "from pallas_kernels.gpu.hopper.attention_forward_config import Config"),
    ("flashspec/attention/blockwise.py", "from pallas_kernels import dropout, launch\nimport time"),
    ("flashspec/__init__.py", "from flashspec.generate import generate\nfrom flashspec.version import __version__"),
    (
        "pallas_kernels/tpu/attention_forward.py",
        "import math\nimport jax.numpy\nfrom pallas_kernels import launch",
    ),
    ("experiments/speculative.py", "import flashspec as fs\nfrom experiments import harness"),
    (
        "tests/test_x.py",
        "import flashspec\nfrom tests.conftest import x\nfrom pallas_kernels import tpu",
    ),
]


@pytest.mark.parametrize(("path", "source"), RIGHT)
def test_a_legal_import_is_not_flagged(path: str, source: str) -> None:
    assert complaints(source, Path(path)) == []
