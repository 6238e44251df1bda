"""The tables of `tpu_compile`, and what is claimed of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.harness import Job
from experiments.tpu_kernels import INPUTS, OUTPUTS, Case, K, decode_block

# Bundles of our kernel over those of splash attention, each at its best blocks.
BARS = {"v5e": 0.93, "v6e": 0.90}
# What the matrix units of a core do in one issue cycle: the peak rate of the device over its clock.
FLOPS_A_BUNDLE = {"v5e": 2**17, "v5p": 2**17, "v6e": 2**19}
PRODUCTS = {False: 2, True: 5}  # of a tile, forward and backward
CHUNK = 128  # slots that our decode kernel computes in a turn
KERNELS = ("flashspec", "splash", "flash_attention")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One case on one chip."""

    chip: str
    case: Case
    answer: dict[str, Any]

    @property
    def name(self) -> str:
        """The case in words."""
        case = self.case
        words = [case.kernel, f"T{case.T}", f"H{case.H}"]
        words += [f"{case.block_q}x{case.block_kv}"] if case.block_q else []
        words += [f"tokens {case.tokens} page {case.page} block {case.block_kv}"] if case.kernel in DECODING else []
        words += [word for word in ("backward", "gated", "checks") if getattr(case, word)]
        return " ".join(words)

    @property
    def error(self) -> str:
        return self.answer.get("error", "").split("\n")[0]

    @property
    def schedules(self) -> list[dict[str, Any]]:
        return self.answer.get("schedules", [])

    @property
    def timed(self) -> list[dict[str, Any]]:
        """The schedules of the direction asked for: the forward that precedes a backward is none of it."""
        return [s for s in self.schedules if not (self.case.backward and "fwd" in s["name"])]

    @property
    def spills(self) -> int:
        return sum(schedule["spills"] for schedule in self.timed)

    @property
    def matrix_bound(self) -> float | None:
        """Bundles that the matrix units need for a 128 x 128 tile at least; None where nobody says what they do."""
        rate = FLOPS_A_BUNDLE.get(self.chip)
        return None if rate is None else 2 * 128 * 128 * self.case.H * PRODUCTS[self.case.backward] / rate

    def bundles_a_tile(self) -> float:
        """Bundles of a full block and of a step's overhead, for each 128 x 128 tile; the bound where that is more."""
        tiles = self.case.block_q * self.case.block_kv / 128**2
        return max(sum(s["body"] + s["overhead"] for s in self.timed) / tiles, self.matrix_bound or 0)

    def bytes_a_bundle(self) -> float:
        """Of a decoding step's inner work: bytes of keys and values over bundles."""
        (schedule,) = self.schedules
        if self.case.kernel == "paged_attention":  # a loop turn computes one head's block, its copies unrolled
            return 4 * self.case.block_kv * self.case.H / max(schedule["product_loops"])
        block = decode_block(self.case)
        copies = sum(schedule["other_loops"][1:]) * (block // self.case.page) if self.case.page else 0
        work = schedule["overhead"] + copies + schedule["product_loops"][0] * (block // CHUNK)
        return 4 * block * K * self.case.H / work


DECODING = ("flashspec decode", "paged_attention")


def best_of(
    compiled: Sequence[Compiled], chip: str, kernel: str, T: int, H: int, backward: bool, checks: bool = False
) -> Compiled | None:
    """The program with the fewest bundles a tile."""
    wanted = Case(kernel, T, H, backward=backward, checks=checks)

    def same(c: Compiled) -> bool:
        return c.chip == chip and dataclasses.replace(c.case, block_q=0, block_kv=0) == wanted

    return min(filter(same, compiled), key=lambda c: c.bundles_a_tile(), default=None)


def attention(job: Job, compiled: Sequence[Compiled]) -> None:
    """Every shape: each kernel at its best blocks."""
    shapes = {(c.chip, c.case.backward, c.case.H, c.case.T): c for c in compiled if c.case.kernel == "flashspec"}
    rows, short = [], []
    for (chip, backward, H, T), c in sorted(shapes.items(), key=lambda item: item[0]):
        found = {kernel: best_of(compiled, chip, kernel, T, H, backward) for kernel in KERNELS}
        what = [chip, "backward" if backward else "forward", H, T]
        tiles = [None if best is None else best.bundles_a_tile() for best in found.values()]
        ratio = tiles[0] / tiles[1] if tiles[0] and tiles[1] else None
        short.append([*what, *tiles, c.matrix_bound, ratio])
        rows += [[*what, *_details(best)] for best in found.values() if best is not None]
    columns = ["chip", "pass", "H", "T"]
    job.table(
        "attention",
        "bundles of a full block and a step's overhead for each 128 x 128 tile, at the best blocks of each kernel; "
        "the bound of the matrix units; ours over splash",
        [*columns, *KERNELS, "bound", "ratio"],
        short,
    )
    job.table(
        "schedules",
        "the same programs: bundles of a full block and of one step's overhead, for each of its kernels; use of the "
        "matrix units; register spills; VMEM",
        [*columns, "kernel", "blocks", "body", "overhead", "matrix use", "spills", "VMEM, MB"],
        rows,
    )


def _details(compiled: Compiled) -> list[Any]:
    case, kernels = compiled.case, compiled.timed
    return [
        case.kernel,
        f"{case.block_q} x {case.block_kv}",
        " + ".join(str(s["body"]) for s in kernels),
        " + ".join(str(s["overhead"]) for s in kernels),
        " + ".join(f"{s['matrix_use']:.0%}" for s in kernels),
        compiled.spills,
        sum(s["vmem_bytes"] for s in kernels) / 1e6,
    ]


def bars(job: Job, compiled: Sequence[Compiled]) -> None:
    """Our bundles a tile over splash attention's on equal terms: both without bounds checks, and both with them."""
    for chip, bar in BARS.items():
        for backward in (False, True):
            for checks in (False, True):
                found = {name: best_of(compiled, chip, name, 4096, 128, backward, checks) for name in KERNELS}
                best = {name: one.bundles_a_tile() for name, one in found.items() if one is not None}
                if {"flashspec", "splash"} <= set(best):
                    figures = ", ".join(f"{name} {value:.1f}" for name, value in best.items())
                    ratio = best["flashspec"] / best["splash"]
                    job.claim(
                        f"{chip} {'backward' if backward else 'forward'}, T = S = 4096, H = 128, "
                        f"{'with' if checks else 'without'} bounds checks: {ratio:.3f} of splash attention's bundles a "
                        f"tile, at most {bar}, each at its best blocks ({figures})",
                        ratio <= bar,
                    )


def decoding(job: Job, compiled: Sequence[Compiled]) -> None:
    """The table of decoding, and what is claimed of it."""
    found = [c for c in compiled if c.case.kernel in DECODING]
    rows = []
    for c in found:
        block = decode_block(c.case) if c.case.kernel == "flashspec decode" else c.case.block_kv
        (schedule,) = c.schedules
        vmem = schedule["vmem_bytes"] / 1e6
        rows.append(
            [
                c.chip,
                c.case.kernel,
                c.case.H,
                c.case.tokens,
                c.case.page or None,
                block,
                c.bytes_a_bundle(),
                c.spills,
                vmem,
            ]
        )
    columns = ["chip", "kernel", "H", "new tokens", "page", "block", "bytes a bundle", "spills", "VMEM, MB"]
    slots = max((c.case.T for c in found), default=0)
    job.table("decode", f"decoding over {slots} slots of {K} heads: bytes of the cache for each bundle", columns, rows)
    single = [c for c in found if c.case.tokens == 1 and c.case.kernel == "flashspec decode"]
    usual = [c for c in single if c.case.H == 128]
    job.claim("decoding one token with heads of 128 spills no register", all(c.spills == 0 for c in usual))
    for chip, H in dict.fromkeys((c.chip, c.case.H) for c in found):
        ours = [c.bytes_a_bundle() for c in single if (c.chip, c.case.H) == (chip, H) and c.case.page]
        peers = [c for c in found if (c.chip, c.case.H, c.case.kernel) == (chip, H, "paged_attention")]
        theirs = [c.bytes_a_bundle() for c in peers]
        if ours and theirs:
            text = f"paged decoding moves {min(ours):.0f} bytes a bundle, jax's paged attention {max(theirs):.0f}"
            job.claim(f"{chip}, H = {H}: {text} at its best block", min(ours) >= max(theirs))


def matmul(job: Job, compiled: Sequence[Compiled]) -> None:
    """The table of the matmul with its tail."""
    rows = []
    for c in compiled:
        if c.case.kernel == "flashspec matmul":
            (schedule,) = c.schedules
            vmem = schedule["vmem_bytes"] / 1e6
            use = f"{schedule['matrix_use']:.0%}"
            rows.append([c.chip, c.case.T, c.case.gated, schedule["body"], use, schedule["spills"], vmem])
    columns = ["chip", "rows", "gated", "bundles a step", "matrix use", "spills", "VMEM, MB"]
    title = f"matmul with bias and activation, rows x {INPUTS} x {OUTPUTS}: a step of its grid "
    title += "but for the tail of the last one"
    job.table("matmul", title, columns, rows)
