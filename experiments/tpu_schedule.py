"""Compiles kernels ahead of time for TPUs that are not there, and reads the compiler's schedule of each.

libtpu compiles for a named chip on any machine and writes what it emitted: one line for each bundle, the instruction
word of one issue cycle. A Pallas kernel is a prologue, one loop over the flattened grid, and an epilogue; what stands
under `pl.when` is skipped by a branch. So the numbers here are of static code: each bundle counts once, however often
it runs, and nothing stalls.

`compile_cases` starts this module as a process of its own, with the environment that libtpu reads: cases come in on
standard input, a JSON object a line, and each is answered by another.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import tpu_kernels

# Topology and accelerator type by which libtpu knows the smallest slice of a generation.
CHIPS = {
    "v5e": ("v5e:2x2", "v5litepod-4"),
    "v5p": ("v5p:2x2x1", "v5p-8"),
    "v6e": ("v6e:2x2", "v6e-4"),
    "v7x": ("tpu7x:2x2x1", "tpu7x-8"),
}
# Rows and columns of a matrix unit (Google Cloud TPU documentation, the version's page).
MATRIX_UNIT = {"v5e": 128, "v5p": 128, "v6e": 256, "v7x": 256}
WHOLE_STEP = 0.9  # of a step's bundles, from which on a branch skips the step and not a part of it
SHORTEST_BRANCH = 3  # bundles of delay slots, which follow a branch whether or not it is taken


@dataclasses.dataclass(frozen=True)
class Span:
    """Bundles that a branch can skip, or a loop: first and last bundle, how many, and slots used by unit."""

    first: int
    last: int
    slots: dict[str, int]

    @property
    def bundles(self) -> int:
        return self.last - self.first + 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a kernel compiled to.

    Args:
      name: of the kernel.
      bundles: all of them.
      body: of one full block: the first span with matrix products under a branch (or a loop's body, if there is none).
      overhead: of one step of the grid, outside of everything that a branch can skip.
      product_loops, other_loops: bundles of each loop inside a step, with and without matrix products, in order.
      matrix_use: share of the body's matrix-unit slots that are used.
      spills: vector registers stored for want of registers, in the whole kernel.
      vmem_bytes: of the allocations that its own listing names; a result that stays for a whole head is not among them.
    """

    name: str
    bundles: int
    body: int
    overhead: int
    product_loops: tuple[int, ...]
    other_loops: tuple[int, ...]
    matrix_use: float
    spills: int
    vmem_bytes: int


def compile_cases(chip: str, cases: Sequence[tpu_kernels.Case]) -> Iterator[dict[str, Any]]:
    """Compile cases for a chip in a process of its own.

    Args:
      chip: one of `CHIPS`.
      cases: what to compile.

    Yields:
      For each case, in order: seconds to compile and schedules; or the error.
    """
    _, accelerator = CHIPS[chip]
    with tempfile.TemporaryDirectory() as dumps:
        # Of the hundreds of passes the last ones alone: writing all takes most of the time.
        flags = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
        lines = "".join(json.dumps(dataclasses.asdict(case)) + "\n" for case in cases)
        command = [sys.executable, "-m", "experiments.tpu_schedule", chip, dumps]
        with subprocess.Popen(
            command,
            env=environment(accelerator, flags),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(lines)
            child.stdin.close()
            for line in child.stdout:
                if line.startswith("{"):
                    yield json.loads(line)


def environment(accelerator: str, flags: str = "") -> dict[str, str]:
    """What libtpu reads to compile for an accelerator type without one."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": accelerator,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": flags,
    }


def main(chip: str, dumps: Path) -> None:
    """Compile every case on standard input."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip][0]).devices
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())
    for line in sys.stdin:
        case = tpu_kernels.Case(**json.loads(line))
        jax.clear_caches()  # what was traced on other terms, such as with bounds checks
        try:
            call, arguments = tpu_kernels.build(case, MATRIX_UNIT[chip])
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
            start = time.perf_counter()
            jax.jit(call).lower(*shapes).compile()
            answer: dict[str, Any] = {
                "seconds": time.perf_counter() - start,
                "schedules": [dataclasses.asdict(schedule) for schedule in read_schedules(dumps)],
            }
        except Exception as error:  # whatever the compiler says is the answer for this case
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), flush=True)
        for path in dumps.iterdir():
            path.unlink()


def read_schedules(dumps: Path) -> Iterator[Schedule]:
    """The schedules of the Pallas kernels in a folder of dumps, in the order in which they were compiled."""
    stems: dict[tuple[str, str], dict[str, Path]] = {}
    for path in sorted(dumps.glob("*.txt")):
        if parts := re.match(r"(\d+)-(.+?)-\d{2,}-(.*)\.txt$", path.name):
            stems.setdefault((parts[1], parts[2]), {})[parts[3]] = path
    for (_, name), files in stems.items():
        if name.startswith(tpu_kernels.NAMES) and "final_bundles" in files:
            yield read_schedule(name, files)


def read_schedule(name: str, files: dict[str, Path]) -> Schedule:
    """One kernel's schedule."""
    bundles = _bundles(files["final_bundles"])
    units, capacity, use = _utilization(files["final_hlo-static-per-bundle-utilization"])

    def span(first: int, last: int) -> Span:
        rows = use[first : last + 1]
        return Span(first, last, {unit: sum(row[i] for row in rows) for i, unit in enumerate(units)})

    total = span(0, len(bundles) - 1)
    loops = [span(first, last) for first, last in _loops(bundles)]
    outer = [loop for loop in loops if bundles[loop.first].depth == 1]
    step = max(outer, key=lambda loop: loop.bundles) if outer else total  # a grid of one step has no loop
    branches = [span(*ends) for ends in _branches(bundles, step)]
    # The pipeline's own branch around a step is no part of it.
    branches = _outermost([branch for branch in branches if branch.bundles < WHOLE_STEP * step.bundles])
    products = [branch for branch in branches if branch.slots["MXU"]]
    inner = [loop for loop in loops if step.first < loop.first and loop.last < step.last]
    body = products[0] if products else step
    skipped = sum(branch.bundles for branch in branches)
    bundles_of_body = body.bundles if products else step.bundles - skipped
    matrix_slots = capacity[units.index("MXU")] * bundles_of_body
    return Schedule(
        name=name,
        bundles=len(bundles),
        body=bundles_of_body,
        overhead=step.bundles - skipped if products else 0,
        product_loops=tuple(loop.bundles for loop in inner if loop.slots["MXU"]),
        other_loops=tuple(loop.bundles for loop in inner if not loop.slots["MXU"]),
        matrix_use=body.slots["MXU"] / matrix_slots,
        spills=total.slots.get("VSTORE:SPILL", 0),
        vmem_bytes=_vmem_bytes(files["pre-finalize-registers-and-allocations"]),
    )


def _vmem_bytes(path: Path) -> int:
    sizes = re.findall(r"\[shape = '[^']*', space=vmem, size = (0x[0-9a-f]+)", path.read_text(errors="replace"))
    return sum(int(size, 16) for size in sizes)


@dataclasses.dataclass
class _Bundle:
    tag: str
    depth: int
    text: str


_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+((?:LH|LB|LE|PB|PF|CT)?)\s*:\s*((?:>\s*)*)\{(.*)$")


def _bundles(path: Path) -> list[_Bundle]:
    found: list[_Bundle] = []
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        if match := _BUNDLE.match(line):
            found.append(_Bundle(match[1], match[2].count(">"), match[3]))
        elif found and not line.startswith("="):
            found[-1].text += line
    return found


def _utilization(path: Path) -> tuple[list[str], list[int], list[list[int]]]:
    """Units, slots of each in a bundle, and slots used in every bundle."""
    lines = path.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if "UTILIZATION" in line)
    use = [[int(x) for x in line.split()] for line in lines[begin + 1 :] if line.strip()]
    return [unit.strip() for unit in lines[1].split(",")], [int(x) for x in lines[2].split()], use


def _loops(bundles: list[_Bundle]) -> Iterator[tuple[int, int]]:
    """First and last bundle of each loop: it lasts while bundles stand at least as deep (empty ones stand nowhere)."""
    for i, bundle in enumerate(bundles):
        if bundle.tag != "LB":
            continue
        last = i
        for j in range(i + 1, len(bundles)):
            if bundles[j].depth >= bundle.depth:
                last = j
            elif bundles[j].text.strip(" }") and not re.match(r"^\s*\}\s*(/\*.*)?$", bundles[j].text):
                break
        yield i, last


def _branches(bundles: list[_Bundle], within: Span) -> Iterator[tuple[int, int]]:
    """What each forward branch can skip, from behind its delay slots to the region that it jumps to."""
    regions: dict[str, int] = {}
    for i, bundle in enumerate(bundles):
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", bundle.text):
            regions[region] = i
    for i in range(within.first, within.last + 1):
        if target := re.search(r"sbr\.rel \(.*?target = \$region(\d+)", bundles[i].text):
            end = regions.get(target[1], 0)
            if end > i + SHORTEST_BRANCH + 1:
                yield i + SHORTEST_BRANCH + 1, end - 1


def _outermost(spans: list[Span]) -> list[Span]:
    def inside(a: Span, b: Span) -> bool:
        return a is not b and b.first <= a.first and a.last <= b.last

    return [span for span in spans if not any(inside(span, other) for other in spans)]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
