"""Wrong variants of the library's own code, made by editing its source text.

A test of a law proves little until a wrong law fails it. An edit that no longer applies fails loudly, so a mutant
cannot quietly turn into the original when the code changes.
"""

import inspect
from types import ModuleType
from typing import Any


def mutant(module: ModuleType, *edits: tuple[str, str], **names: Any) -> ModuleType:
    """A copy of `module` in which each `old` text is replaced by `new`, and global names are rebound.

    Args:
      module: the module to copy; it is not changed.
      *edits: (old, new) pairs; each old text must occur exactly once.
      **names: globals of the copy to set after it has run, such as a function imported from another mutant.
    """
    source = inspect.getsource(module)
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module.__name__}"
        source = source.replace(old, new)
    copy = ModuleType(module.__name__, module.__doc__)
    exec(compile(source, f"<mutant of {module.__name__}>", "exec"), copy.__dict__)
    for name, value in names.items():
        assert hasattr(copy, name), f"{module.__name__} has no global {name}"
        setattr(copy, name, value)
    return copy
