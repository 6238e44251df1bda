"""The run-time type checker that the import hook puts on every function of the library."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_strict = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_functions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check annotations of arguments and results, but leave constructors alone.

    jax rebuilds pytrees through `__init__` with whatever a transformation puts at the leaves (axis numbers under
    vmap, shapes, sentinels), so a field's shape holds for the values that users build and not for every instance.
    """
    return function if function.__name__ == "__init__" else _strict(function)
