"""`python -m experiments all`: runs every experiment in a process of its own, and makes one index of their reports."""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import registry
from experiments.readme_tables import markdown_table

ACCELERATORS = ("nvidia[0-9]*", "accel*", "vfio/[0-9]*")  # under /dev: NVIDIA GPUs, TPUs


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the run of one experiment ended.

    Attributes:
      experiment: what was asked.
      exit_code: 0; 1 where a claim failed; another where the run did not finish.
      seconds: wall time of the process.
      report: its report.json, empty where it left none.
    """

    experiment: registry.Experiment
    exit_code: int
    seconds: float
    report: dict[str, Any]

    @property
    def succeeded(self) -> bool:
        """Whether it finished and all its claims hold."""
        return self.exit_code == 0 and bool(self.report.get("finished"))

    @property
    def result(self) -> str:
        """In words."""
        refuted = [claim["claim"] for claim in self.report.get("claims", ()) if not claim["holds"]]
        if refuted:
            return "FAILS: " + "; ".join(refuted)
        if not self.succeeded:
            return f"did not finish (exit code {self.exit_code})"
        claims, goals = len(self.report["claims"]), self.report.get("goals", ())
        missed = sum(not goal["met"] for goal in goals)
        held = f"{claims} claim{'s' if claims > 1 else ''} hold{'' if claims > 1 else 's'}" if claims else "finished"
        return held + (f"; {missed} of {len(goals)} goals missed" if missed else "")


def command(name: str, args: argparse.Namespace, out: Path) -> list[str]:
    """The command line of one experiment."""
    smoke = ["--smoke"] if args.smoke else []
    return [sys.executable, "-m", "experiments", name, *smoke, "--seed", str(args.seed), "--out", str(out)]


def has_accelerator() -> bool:
    """Whether this machine shows a GPU or TPU that jax may use; one process at a time can have it."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    return any(any(Path("/dev").glob(pattern)) for pattern in ACCELERATORS)


def default_jobs(smoke: bool) -> int:
    """Two at a time for smoke runs on a CPU; one where times are measured, or an accelerator is shared."""
    return 2 if smoke and not has_accelerator() and (os.cpu_count() or 1) > 1 else 1


def run_one(experiment: registry.Experiment, line: Sequence[str], out: Path, alone: bool) -> Outcome:
    """Run one experiment; its output is shown as it comes where it runs `alone`, else at its end."""
    (out / "report.json").unlink(missing_ok=True)
    if alone:
        print(f"== {experiment.name}", flush=True)
    start = time.perf_counter()
    pipes: dict[str, Any] = {} if alone else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(line, check=False, text=True, errors="replace", **pipes)
    seconds = time.perf_counter() - start
    if not alone:
        print(f"== {experiment.name}\n{done.stdout}", flush=True)
    try:
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        report = {}
    return Outcome(experiment, done.returncode, seconds, report)


def index(outcomes: Sequence[Outcome]) -> str:
    """All reports on one page (Markdown), in alphabetical order."""
    columns = ["experiment", "question", "result", "reaches", "device", "seconds"]
    rows = [
        [
            f"[{o.experiment.name}]({o.experiment.name}/report.md)" if o.report else o.experiment.name,
            o.experiment.question,
            o.result,
            o.report.get("headline", {}).get("reaches", ""),
            o.report.get("device", ""),
            f"{o.seconds:.1f}",
        ]
        for o in sorted(outcomes, key=lambda o: o.experiment.name)
    ]
    return f"# Experiments\n\n{summary(outcomes)}\n\n{markdown_table(columns, rows)}\n"


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line: how many succeeded, and which did not."""
    failed = [f"{o.experiment.name} (exit code {o.exit_code})" for o in outcomes if not o.succeeded]
    return "; ".join([f"{len(outcomes) - len(failed)} of {len(outcomes)} experiments succeeded", *failed])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options that all experiments share, and how many run at once."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments all",
        description="Run every experiment in a process of its own; OUT/index.md is one index of their reports.",
        allow_abbrev=False,
    )
    registry.add_shared_options(parser)
    parser.add_argument("--jobs", type=int, help="experiments at once (default: 2 for --smoke on a CPU, else 1)")
    args = parser.parse_args(argv)
    args.jobs = default_jobs(args.smoke) if args.jobs is None else args.jobs
    if args.jobs < 1:
        parser.error(f"argument --jobs: expected at least 1, got {args.jobs}")
    return args


def run_all(argv: Sequence[str]) -> int:
    """Run every experiment; OUT/NAME holds its report and OUT/index.md the index, which grows as they end.

    Args:
      argv: options, as `parse` has them.

    Returns:
      The exit code: 0, or 1 when an experiment failed.
    """
    args = parse(argv)
    out = Path(args.out or "reports")
    out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(run_one, experiment, command(name, args, out / name), out / name, args.jobs == 1)
            for name, experiment in registry.discover().items()
        ]
        for run in concurrent.futures.as_completed(runs):
            outcomes.append(run.result())
            (out / "index.md").write_text(index(outcomes), encoding="utf-8")
    print(summary(outcomes), f"index: {out / 'index.md'}", sep="\n")
    return int(not all(outcome.succeeded for outcome in outcomes))
