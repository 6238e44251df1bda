"""What every experiment gets: its options, an output folder, progress, a report, plots and records.

An experiment is a module with the strings `QUESTION`, `NEEDS` and `TIME`, a function `run(job)` and, where it has
options of its own, `add_arguments(parser)`. `python -m experiments NAME` calls `run` with a `Job`; what the job was
told is then in its folder: report.md and report.json, plots, and records.jsonl with the machine and the command line.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import rich.console
import rich.progress
import rich.table

from experiments import registry
from experiments.readme_tables import markdown_table
from flashspec.checks import fail
from flashspec.records import Environment, PerformanceRecord, command_line, environment, now, write_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Job:
    """One run of an experiment: what it was asked for, and what it found.

    Attributes:
      args: the parsed options; `smoke`, `seed` and `out` are in every experiment's.
      out: the output folder.
      report: the experiment's own part of report.json.
      console: prints to the terminal.
    """

    def __init__(self, experiment: registry.Experiment, args: argparse.Namespace, command: str) -> None:
        self.experiment = experiment
        self.args = args
        self.out = Path(args.out or Path("reports") / experiment.name)
        self.command = command
        self.date = now()
        self.environment: Environment = environment()
        self.report: dict[str, Any] = {}
        self.claims: list[dict[str, Any]] = []
        self.goals: list[dict[str, Any]] = []
        self.tables: dict[str, dict[str, Any]] = {}
        self.headline: dict[str, str] = {}
        self.console = rich.console.Console(markup=False, highlight=False)
        self._sections: list[str] = []
        self._start = time.perf_counter()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "report.json").touch()
            for name in ("records.jsonl", "error.txt", "report.json", "report.md"):
                (self.out / name).unlink(missing_ok=True)
        except OSError as error:
            raise fail("out", "a folder that can be written to", f"{self.out} ({error.strerror})") from error

    @property
    def smoke(self) -> bool:
        """Whether the smallest run that still exercises everything is asked for."""
        return bool(self.args.smoke)

    @property
    def seed(self) -> int:
        """The seed of every random draw of this run."""
        return int(self.args.seed)

    def track[T](self, items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
        """Iterate with a progress bar."""
        yield from rich.progress.track(items, description=what, total=total, console=self.console)

    def say(self, text: str) -> None:
        """A paragraph (Markdown) for the terminal and the report."""
        self.console.print(text)
        self._sections.append(text)

    def claim(self, text: str, holds: bool) -> bool:
        """A statement that the run confirms or refutes; a refuted one makes the process exit with 1."""
        self.claims.append({"claim": text, "holds": bool(holds)})
        self.say(f"{'holds' if holds else 'FAILS'}: {text}")
        return bool(holds)

    def goal(self, text: str, met: bool) -> bool:
        """A figure aimed at, and whether this run met it; a miss is reported and fails nothing."""
        self.goals.append({"goal": text, "met": bool(met)})
        self.say(f"{'met' if met else 'MISSED'}: {text}")
        return bool(met)

    def reaches(self, part: str, what: str) -> None:
        """The one line that the README's table says of this experiment's part of the library."""
        self.headline = {"part": part, "reaches": what}

    def table(self, name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table for the terminal, the report, and (by its name) the README."""
        cells = [[_cell(value) for value in row] for row in rows]
        self.tables[name] = {"title": title, "columns": list(columns), "rows": cells}
        shown = rich.table.Table(*columns, title=title)
        for row in cells:
            shown.add_row(*row)
        self.console.print(shown)
        self._sections.append(f"**{title}**\n\n{markdown_table(columns, cells)}")

    @contextlib.contextmanager
    def figure(self, name: str, title: str) -> Iterator["Axes"]:
        """Axes to draw on; the plot is saved as NAME.png and shown in the report."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(title=title)
        yield axes
        figure.savefig(self.out / f"{name}.png", dpi=120)
        self._sections.append(f"![{title}]({name}.png)")

    def record(self, name: str, **fields: Any) -> PerformanceRecord:
        """Write a measurement to records.jsonl at once; `fields` are those of `flashspec.records.PerformanceRecord`."""
        here: dict[str, Any] = {"environment": self.environment, "command": self.command, "date": self.date}
        record = PerformanceRecord(name=name, **here, **fields)
        write_records(self.out / "records.jsonl", [record], append=True)
        return record

    def write(self, finished: bool) -> None:
        """Write report.json and report.md."""
        summary = {
            "experiment": self.experiment.name,
            "question": self.experiment.question,
            "command": self.command,
            "date": self.date,
            "seconds": round(time.perf_counter() - self._start, 3),
            "finished": finished,
            "device": self.environment.device,
            "jax": self.environment.jax,
            "environment": dataclasses.asdict(self.environment),
            "headline": self.headline,
            "claims": self.claims,
            "goals": self.goals,
            "tables": self.tables,
        }
        text = json.dumps(_plain(summary | self.report), indent=2, allow_nan=False)
        (self.out / "report.json").write_text(text + "\n", encoding="utf-8")
        (self.out / "report.md").write_text(self._markdown(finished), encoding="utf-8")

    def _markdown(self, finished: bool) -> str:
        here = dataclasses.asdict(self.environment)
        parts = [
            f"# {self.experiment.question}",
            f"`{self.command}`, {self.date}, {self.environment.device}, jax {self.environment.jax}",
            *([] if finished else ["**This run did not finish.**"]),
            *self._sections,
            "## Environment\n\n" + markdown_table(["", ""], [[name, _cell(value)] for name, value in here.items()]),
        ]
        return "\n\n".join(parts) + "\n"


def _cell(value: object) -> str:
    """A table cell: four significant digits of a float (all of its whole part), nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


def _plain(value: Any) -> Any:
    """What JSON can hold: arrays as lists, and null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parser_of(experiment: registry.Experiment, module: ModuleType) -> argparse.ArgumentParser:
    """The options that all experiments share, then the experiment's own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments {experiment.name}",
        description=f"{experiment.question} Needs: {experiment.needs}. Time: {experiment.time}.",
        allow_abbrev=False,
    )
    registry.add_shared_options(parser)
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def run_experiment(name: str, argv: Sequence[str]) -> int:
    """Run one experiment with its command-line options.

    Args:
      name: of the experiment.
      argv: its options, such as `["--smoke", "--out", "there"]`.

    Returns:
      The exit code: 0; 1 when a claim failed; 2 when an option's value is wrong (ValueError) or cannot be served here
      (NotImplementedError), with the traceback in the output folder.
    """
    experiment, module = registry.find(name), registry.load(name)
    args = parser_of(experiment, module).parse_args(argv)
    try:
        job = Job(experiment, args, command_line())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return registry.WRONG_USE
    finished = False
    try:
        module.run(job)
        finished = True
    except (ValueError, NotImplementedError) as error:
        trace = job.out / "error.txt"
        trace.write_text(traceback.format_exc(), encoding="utf-8")
        print(f"error: {error}\n(traceback: {trace})", file=sys.stderr)
        return registry.WRONG_USE
    finally:
        job.write(finished)
    job.console.print(f"report: {job.out / 'report.md'}")
    return 0 if all(claim["holds"] for claim in job.claims) else 1
