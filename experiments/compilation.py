"""Programs that are compiled side by side: a compiler waits for one thread most of the time."""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Mapping

WORKERS = os.cpu_count() or 1  # programs at a time, which leaves no meaning to the time that each takes


def build_all[Name, Made](builders: Mapping[Name, Callable[[], Made]], workers: int = WORKERS) -> dict[Name, Made]:
    """What all builders make, by name; the first error of one of them ends it."""
    return build_both(builders, {}, workers)[0]


def build_both[Name, Made, Other, Thing](
    builders: Mapping[Name, Callable[[], Made]], others: Mapping[Other, Callable[[], Thing]], workers: int = WORKERS
) -> tuple[dict[Name, Made], dict[Other, Thing]]:
    """What the builders of two kinds of things make, all side by side."""
    with concurrent.futures.ThreadPoolExecutor(max(1, workers)) as pool:
        waiting = {name: pool.submit(build) for name, build in builders.items()}
        also = {name: pool.submit(build) for name, build in others.items()}
        made = {name: one.result() for name, one in waiting.items()}
        return made, {name: one.result() for name, one in also.items()}


def build_those_that_can[Name, Made](
    builders: Mapping[Name, Callable[[], Made]], workers: int = WORKERS
) -> tuple[dict[Name, Made], dict[Name, str]]:
    """What the builders make that can, and for the others the reason, both by name."""

    def attempt(build: Callable[[], Made]) -> tuple[list[Made], str]:
        try:
            return [build()], ""
        except Exception as error:  # whatever stops another library, or settings that nobody has tried
            return [], f"{type(error).__name__}: {str(error)[:200]}"

    found = build_all({name: functools.partial(attempt, build) for name, build in builders.items()}, workers)
    made = {name: one for name, (ones, _) in found.items() for one in ones}
    return made, {name: reason for name, (_, reason) in found.items() if reason}
