"""What the TPU kernels compile to, beside those that come with jax: the compiler's schedules, for chips not at hand."""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments import tpu_tables
from experiments.harness import Job
from experiments.tpu_kernels import Case, chosen
from experiments.tpu_schedule import CHIPS, MATRIX_UNIT, compile_cases
from experiments.tpu_tables import Compiled

QUESTION = "What do the TPU kernels compile to, beside those that come with jax?"
NEEDS = "libtpu (the extra `tpu`), no TPU"
TIME = "15 minutes on 2 CPU cores; --smoke 20 s"

BLOCKS = tuple(itertools.product((512, 1024), repeat=2))
LENGTHS, HEADS = (1024, 4096, 32768), (64, 128, 256)
PEERS = ("splash", "flash_attention")
CACHE, PAGE = 8192, 16
ROWS = (256, 8192)


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
        "One head, bfloat16, causal; splash and flash attention get scaled queries, ours scales in the kernel, and "
        "ours alone writes a log-normaliser in the forward. All kernels are compiled without Pallas's bounds checks, "
        "but where checks are named. VMEM is what a kernel's own listing names: the results that stay there for a "
        "whole head (the query gradient of ours, 4 T H bytes) come on top."
    )
    chips = job.args.chips[:1] if job.smoke else job.args.chips
    with ThreadPoolExecutor(max_workers=len(chips)) as pool:
        batches = pool.map(lambda chip: _compile_for(chip, job.smoke), chips)
        found = [one for batch in job.track(batches, "chips", total=len(chips)) for one in batch]
    for c in found:
        if c.error:
            job.say(f"{c.chip} {c.name}: {c.error}")
    job.claim(
        "each of our kernels compiles for every chip", not any(c.error for c in found if "flashspec" in c.case.kernel)
    )
    compiled = [c for c in found if not c.error]
    _record(job, version, found)
    tpu_tables.attention(job, compiled)
    tpu_tables.bars(job, compiled)
    tpu_tables.decoding(job, compiled)
    tpu_tables.matmul(job, compiled)
    job.reaches("TPU kernels", f"compiled for {', '.join(chips)}, never run: {len(compiled)} programs of {len(found)}")


def _compile_for(chip: str, smoke: bool) -> list[Compiled]:
    """All programs for a chip: first the peers at every block size, then at other shapes at the best of them."""
    if smoke:
        return _compile(chip, [Case("flashspec", 1024), Case("flashspec", 1024, backward=True), _decode(), _matmul()])
    first = _compile(chip, [*_ours(chip), *_peers_at_every_block(chip), *_decoding(), *_matmuls()])
    return first + _compile(chip, list(_peers_at_their_best(chip, first)))


def _compile(chip: str, cases: Sequence[Case]) -> list[Compiled]:
    named = [chosen(case, MATRIX_UNIT[chip]) for case in cases]
    return [Compiled(chip, *pair) for pair in zip(named, compile_cases(chip, named), strict=True)]


def _ours(chip: str) -> Iterator[Case]:
    for T, H, backward in itertools.product(LENGTHS, HEADS, (False, True)):
        yield Case("flashspec", T, H, backward=backward)
    if chip in tpu_tables.BARS:
        for (q, kv), backward, checks in itertools.product(BLOCKS, (False, True), (False, True)):
            case = Case("flashspec", block_q=q, block_kv=kv, backward=backward, checks=checks)
            if checks or (q, kv) != (1024, 1024):  # which is the heuristic's choice
                yield case


def _peers_at_every_block(chip: str) -> Iterator[Case]:
    for (q, kv), backward, peer in itertools.product(BLOCKS, (False, True), PEERS):
        for H in HEADS if chip in tpu_tables.BARS else (128,):
            yield Case(peer, H=H, block_q=q, block_kv=kv, backward=backward)
        if chip in tpu_tables.BARS and peer == "splash":
            yield Case(peer, block_q=q, block_kv=kv, backward=backward, checks=True)


def _peers_at_their_best(chip: str, found: Sequence[Compiled]) -> Iterator[Case]:
    for peer, backward, H, T in itertools.product(PEERS, (False, True), HEADS, LENGTHS):
        same = [c for c in found if (c.case.kernel, c.case.backward, c.case.checks) == (peer, backward, False)]
        like = [c for c in same if c.case.H == H and not c.error] or [c for c in same if not c.error]
        best = min(like, key=lambda c: c.bundles_a_tile(), default=None)
        if best is not None and (T, H) not in {(c.case.T, c.case.H) for c in same}:
            yield dataclasses.replace(best.case, T=T, H=H)


def _decode(tokens: int = 1, page: int = 0, H: int = 128) -> Case:
    return Case("flashspec decode", CACHE, H, tokens=tokens, page=page)


def _decoding() -> Iterator[Case]:
    for tokens, page in itertools.product((1, 5, 16), (0, PAGE)):
        yield _decode(tokens, page)
    for page in (0, PAGE):
        yield _decode(1, page, H=256)
    for H, block in itertools.product((128, 256), (256, 512, 1024, 2048)):
        yield Case("paged_attention", CACHE, H, block_kv=block, page=PAGE)


def _matmul(rows: int = 256, gated: bool = False) -> Case:
    return Case("flashspec matmul", rows, gated=gated)


def _matmuls() -> Iterator[Case]:
    return (_matmul(rows, gated) for rows in ROWS for gated in (False, True))


def _record(job: Job, version: str, found: Sequence[Compiled]) -> None:
    """One record for each kernel, direction and chip, its programs by name."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for c in found:
        group = groups.setdefault((c.chip, c.case.kernel, "backward" if c.case.backward else "forward"), {})
        group[c.name] = {"error": c.error[:200]} if c.error else {"schedules": c.schedules}
    for (chip, kernel, direction), programs in groups.items():
        job.record(f"{chip}/{kernel}/{direction}", settings={"libtpu": version}, values=programs)
