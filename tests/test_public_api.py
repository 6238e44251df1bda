"""What `__all__` offers can be imported and read: documented, with the shapes of the arrays it takes."""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

SIZE = r"(?:[A-Za-z0-9][A-Za-z0-9_]*|\.\.\.)(?: ?[-+*/|] ?[A-Za-z0-9_]+)*"
SHAPE = re.compile(rf"\[(?=[^\]]*(?:[A-Z]|\.\.\.)){SIZE}(?:, ?{SIZE})*\]")
ARRAY_TYPES = ("Array", "Float[", "Int[", "Bool[", "PRNGKeyArray", "Key[")


PACKAGE = Path(__file__).parents[1] / "flashspec"
MODULES = sorted(
    ".".join(("flashspec", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)


def takes_arrays(function: Callable[..., Any]) -> bool:
    """Whether a parameter is annotated as an array (behind `| None` or not)."""
    parameters = inspect.signature(function).parameters.values()
    return any(any(kind in annotation(p) for kind in ARRAY_TYPES) for p in parameters)


def annotation(parameter: inspect.Parameter) -> str:
    """The annotation as text; `jax.Array` prints in several ways."""
    if parameter.annotation is jax.Array:
        return "Array"
    return str(parameter.annotation)


def complaints(name: str, value: object) -> list[str]:
    """What a reader of one public name would miss."""
    if not (inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)):
        return []
    doc = value.__doc__ or ""
    if not doc.strip() or doc.startswith(f"{name}("):  # a dataclass without a docstring gets its signature
        return [f"{name} has no docstring"]
    if inspect.isroutine(value) and takes_arrays(value) and not SHAPE.search(doc):
        return [f"{name} takes arrays and its docstring gives no shape"]
    return []


@pytest.mark.parametrize("name", MODULES)
def test_module_and_its_public_names_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} does not say what it holds"
    names = list(getattr(module, "__all__", ()))
    assert len(names) == len(set(names)), f"{name}.__all__ repeats a name"
    found = [line for public in names for line in complaints(public, getattr(module, public))]
    assert not found, "\n".join(found)


def test_the_version_is_public() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", importlib.import_module("flashspec.version").__version__)


def undocumented(x: jax.Array) -> jax.Array:
    return x


def shapeless(x: jax.Array | None) -> jax.Array | None:
    """Return `x` unchanged, [see] the source."""
    return x


def documented(x: jax.Array) -> jax.Array:
    """Return x[B, T+1, Hv] unchanged."""
    return x


def test_a_missing_docstring_or_shape_is_flagged() -> None:
    assert "no docstring" in complaints("undocumented", undocumented)[0]
    assert "gives no shape" in complaints("shapeless", shapeless)[0]
    assert complaints("documented", documented) == []


@pytest.mark.parametrize(
    "text", ["q[B,T,N,H]", "scores[B, N, T, S]", "keys[B]", "p[B, D+1, V]", "x[..., V]", "[B|1, N|1]"]
)
def test_shapes_are_recognised(text: str) -> None:
    assert SHAPE.search(text)


@pytest.mark.parametrize("text", ["a list[int]", "[see] above", "no shape", "[1]: a reference", "x[]"])
def test_other_brackets_are_not_shapes(text: str) -> None:
    assert not SHAPE.search(text)
