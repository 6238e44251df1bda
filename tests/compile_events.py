"""Counts what JAX compiles, down to the smallest copy."""

import contextlib
from collections.abc import Iterator

import jax

_events: list[str] = []


def _note(event: str, _: float, **__: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _events.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


@contextlib.contextmanager
def compilations() -> Iterator[list[int]]:
    """Yields a list that gets the number of compilations when the block ends."""
    before, count = len(_events), []
    yield count
    count.append(len(_events) - before)
