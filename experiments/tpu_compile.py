"""What the TPU kernels compile to, beside those that come with jax: the compiler's schedules, for chips not at hand."""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments.harness import Job
from experiments.tpu_kernels import Case, K
from experiments.tpu_schedule import CHIPS, compile_cases

QUESTION = "What do the TPU kernels compile to, beside those that come with jax?"
NEEDS = "libtpu (the extra `tpu`), no TPU"
TIME = "6 minutes on 2 CPU cores; --smoke 30 s"

BLOCKS = tuple(itertools.product((512, 1024), repeat=2))
SHAPES = ((1024, 128), (4096, 128), (32768, 128), (4096, 64), (32768, 256))  # T and H
# Bundles of our kernel over those of splash attention, each at its best blocks.
BARS = {"v5e": 0.93, "v6e": 0.90}
# What the matrix units of a core do in one issue cycle: the peak rate of the device over its clock.
FLOPS_A_BUNDLE = {"v5e": 2**17, "v5p": 2**17, "v6e": 2**19}
PRODUCTS = {False: 2, True: 5}  # of a tile, forward and backward
CACHE, PAGE, CHUNK = 8192, 16, 128


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One case on one chip."""

    chip: str
    case: Case
    answer: dict[str, Any]

    @property
    def schedules(self) -> list[dict[str, Any]]:
        return self.answer.get("schedules", [])

    @property
    def spills(self) -> int:
        return sum(schedule["spills"] for schedule in self.schedules)

    @property
    def matrix_bound(self) -> float | None:
        """Bundles that the matrix units need for a 128 x 128 tile at least; None where nobody says what they do."""
        rate = FLOPS_A_BUNDLE.get(self.chip)
        return None if rate is None else 2 * 128 * 128 * self.case.H * PRODUCTS[self.case.backward] / rate

    def bundles_a_tile(self) -> float:
        """Bundles of a full block and of a step's overhead, for each 128 x 128 tile; the bound where that is more."""
        kernels = [s for s in self.schedules if not (self.case.backward and "fwd" in s["name"])]
        tiles = self.case.block_q * self.case.block_kv / 128**2
        return max(sum(s["body"] + s["overhead"] for s in kernels) / tiles, self.matrix_bound or 0)

    def bytes_a_bundle(self) -> float:
        """Of a decoding step's inner work: bytes of keys and values over bundles."""
        (schedule,) = self.schedules
        pages = self.case.block_kv // max(self.case.page, 1)
        if self.case.kernel == "paged_attention":  # a loop turn computes one head's block, its copies unrolled
            return 4 * self.case.block_kv * self.case.H / max(schedule["product_loops"])
        copies = sum(schedule["other_loops"][1:]) * pages if self.case.page else 0
        work = schedule["overhead"] + copies + schedule["product_loops"][0] * (self.case.block_kv // CHUNK)
        return 4 * self.case.block_kv * K * self.case.H / work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chips", nargs="+", choices=tuple(CHIPS), default=list(CHIPS))


def run(job: Job) -> None:
    """Compile everything and state what the schedules say."""
    if importlib.util.find_spec("libtpu") is None:
        job.say("libtpu is not installed (the extra `tpu` brings it): nothing was compiled.")
        job.record("libtpu", values={"installed": False})
        return
    version = importlib.metadata.version("libtpu")
    job.report["libtpu"] = version
    job.say(
        f"Static schedules of libtpu {version}, not run times: bundles are counted once each, as if nothing stalled. "
        "One head, bfloat16, causal; splash and flash attention get scaled queries, ours scales in the kernel."
    )
    chips = job.args.chips[:1] if job.smoke else job.args.chips
    with ThreadPoolExecutor(max_workers=2) as pool:
        batches = pool.map(lambda chip: compile_for(chip, cases(chip, job.smoke)), chips)
        found = [one for batch in job.track(batches, "chips", total=len(chips)) for one in batch]
    failed = [c for c in found if "error" in c.answer]
    for c in failed:
        job.say(f"{c.chip} {c.case}: {c.answer['error']}")
    job.claim("each of our kernels compiles for every chip", not any("flashspec" in c.case.kernel for c in failed))
    compiled = [c for c in found if "error" not in c.answer]
    for c in compiled:
        settings = {"chip": c.chip, "libtpu": version, **dataclasses.asdict(c.case)}
        job.record(c.case.kernel, settings=settings, values={"schedules": c.schedules})
    _attention(job, compiled)
    _decode(job, compiled)
    job.reaches("TPU kernels", f"compiled for {', '.join(chips)}, never run: {len(compiled)} programs of {len(found)}")


def cases(chip: str, smoke: bool) -> list[Case]:
    """What is compiled for a chip: our kernels at every shape; where there is a bar, the peers at every block size."""
    if smoke:
        return [Case("flashspec", 1024), Case("flashspec", 1024, backward=True), Case("flashspec decode", 1024)]
    passes = (False, True)
    chosen = [Case("flashspec", T, H, backward=b) for T, H in SHAPES for b in passes]
    decoding = [("flashspec decode", tokens, page) for tokens in (1, 5, 16) for page in (0, PAGE)]
    chosen += [Case(kernel, CACHE, block_kv=512, tokens=tokens, page=page) for kernel, tokens, page in decoding]
    chosen += [Case("paged_attention", CACHE, block_kv=512, page=PAGE)]
    if chip in BARS:
        names = ("flashspec", "splash", "flash_attention")
        chosen += [Case(name, block_q=q, block_kv=kv, backward=b) for b in passes for name in names for q, kv in BLOCKS]
    return chosen


def compile_for(chip: str, chosen: list[Case]) -> list[Compiled]:
    """The cases compiled for a chip."""
    return [Compiled(chip, *pair) for pair in zip(chosen, compile_cases(chip, chosen), strict=True)]


def _attention(job: Job, compiled: list[Compiled]) -> None:
    """The tables of attention, and the bars."""
    columns = ["chip", "kernel", "pass", "T", "H", "blocks", "body", "overhead", "matrix use", "spills", "VMEM, MB"]
    columns += ["a tile", "bound"]
    rows = [_row(c) for c in compiled if "decode" not in c.case.kernel and c.case.kernel != "paged_attention"]
    job.table(
        "schedules", "bundles of a full block and of one step's overhead, bound by the matrix unit", columns, rows
    )
    for chip, bar in BARS.items():
        for backward in (False, True):
            best = {}
            for name in ("flashspec", "splash", "flash_attention"):
                found = [c for c in compiled if (c.chip, c.case.kernel, c.case.backward) == (chip, name, backward)]
                tiles = [c.bundles_a_tile() for c in found if c.case.block_q]
                if tiles:
                    best[name] = min(tiles)
            if {"flashspec", "splash"} <= set(best):
                direction = "backward" if backward else "forward"
                text = (
                    f"{chip} {direction}: at most {bar} of splash attention's bundles a tile, each at its best blocks"
                )
                figures = ", ".join(f"{name} {value:.1f}" for name, value in best.items())
                job.claim(f"{text} ({figures})", best["flashspec"] <= bar * best["splash"])


def _row(compiled: Compiled) -> list[Any]:
    case, kernels = compiled.case, compiled.schedules
    blocks = f"{case.block_q} x {case.block_kv}" if case.block_q else "heuristic"
    return [
        compiled.chip,
        case.kernel,
        "backward" if case.backward else "forward",
        case.T,
        case.H,
        blocks,
        " + ".join(str(s["body"]) for s in kernels),
        " + ".join(str(s["overhead"]) for s in kernels),
        " + ".join(f"{s['matrix_use']:.0%}" for s in kernels),
        compiled.spills,
        sum(s["vmem_bytes"] for s in kernels) / 1e6,
        compiled.bundles_a_tile() if case.block_q else None,
        compiled.matrix_bound,
    ]


def _decode(job: Job, compiled: list[Compiled]) -> None:
    """The table of decoding, and what is claimed of it."""
    found = [c for c in compiled if "decode" in c.case.kernel or c.case.kernel == "paged_attention"]
    rows = [
        [c.chip, c.case.kernel, c.case.tokens, c.case.page or None, c.bytes_a_bundle(), c.spills]
        for c in found
        if c.case.block_kv
    ]
    columns = ["chip", "kernel", "new tokens", "page", "bytes a bundle", "spills"]
    job.table("decode", f"decoding over {CACHE} slots of {K} heads: bytes of the cache for each bundle", columns, rows)
    single = [c for c in found if c.case.tokens == 1 and c.case.kernel == "flashspec decode"]
    job.claim("decoding one token spills no register", all(c.spills == 0 for c in single))
    for chip in dict.fromkeys(c.chip for c in found):
        ours = [c.bytes_a_bundle() for c in single if c.chip == chip and c.case.page]
        theirs = [c.bytes_a_bundle() for c in found if c.chip == chip and c.case.kernel == "paged_attention"]
        if ours and theirs:
            text = (
                f"{chip}: paged decoding moves {min(ours):.0f} bytes a bundle, jax's paged attention {max(theirs):.0f}"
            )
            job.claim(text, min(ours) >= max(theirs))
