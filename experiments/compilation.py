"""Programs that are compiled side by side: a compiler waits for one thread most of the time."""

import concurrent.futures
import os
from collections.abc import Callable, Mapping

WORKERS = os.cpu_count() or 1  # programs at a time, which leaves no meaning to the time that each takes


def build_all[Name, Made](builders: Mapping[Name, Callable[[], Made]], workers: int = WORKERS) -> dict[Name, Made]:
    """What all builders make, by name; the first error of one of them ends it."""
    with concurrent.futures.ThreadPoolExecutor(max(1, workers)) as pool:
        waiting = {name: pool.submit(build) for name, build in builders.items()}
        return {name: one.result() for name, one in waiting.items()}
