"""Finds the experiments: the modules of this folder that ask a `QUESTION`.

Their questions are read from the syntax trees, so that listing them imports neither them nor jax.
"""

import argparse
import ast
import dataclasses
import difflib
import importlib
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
WRONG_USE = 2  # the exit code of a wrong command line, as argparse has it
LARGEST_SEED = 2**31 - 1
STATED = ("QUESTION", "NEEDS", "TIME")


class UnknownExperiment(ValueError):
    """There is no experiment of that name."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What an experiment says of itself.

    Attributes:
      name: of its module, and on the command line.
      question: the one question that it answers.
      needs: hardware and data.
      time: how long it takes, and where.
    """

    name: str
    question: str
    needs: str
    time: str


def discover(folder: Path = FOLDER) -> dict[str, Experiment]:
    """All experiments by name, in alphabetical order.

    Raises:
      ValueError: a module asks a QUESTION without stating what it NEEDS and the TIME it takes.
    """
    stated = {path.stem: _strings(path) for path in sorted(folder.glob("*.py"))}
    return {name: _experiment(name, strings) for name, strings in stated.items() if "QUESTION" in strings}


def _strings(path: Path) -> dict[str, str]:
    """The module's top-level constants among `STATED`."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= {t.id: node.value.value for t in node.targets if isinstance(t, ast.Name) and t.id in STATED}
    return found


def _experiment(name: str, strings: dict[str, str]) -> Experiment:
    missing = [field for field in STATED if field not in strings]
    if missing:
        raise ValueError(f"experiment {name}: expected string constants {', '.join(STATED)}, missing {missing}")
    return Experiment(name, *(strings[field] for field in STATED))


def find(name: str) -> Experiment:
    """One experiment by name.

    Raises:
      UnknownExperiment: there is none; the message names the nearest, or all.
    """
    experiments = discover()
    if name not in experiments:
        near = difflib.get_close_matches(name, experiments) or list(experiments)
        raise UnknownExperiment(f"there is no experiment {name!r}; there is {', '.join(near)}")
    return experiments[name]


def load(name: str) -> ModuleType:
    """Import an experiment's module: it has `run(job)`, and `add_arguments(parser)` where it has options."""
    return importlib.import_module(f"{__package__}.{find(name).name}")


def _seed(text: str) -> int:
    """What both jax and numpy take as a seed, on every machine."""
    if not text.isdecimal() or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"expected a number in 0..{LARGEST_SEED}, got {text!r}")
    return int(text)


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """The options that every experiment has."""
    parser.add_argument("--smoke", action="store_true", help="the smallest run, under 30 s on a CPU")
    parser.add_argument("--out", type=Path, help="output folder (default: reports/, by experiment)")
    parser.add_argument("--seed", type=_seed, default=0, help="of every random draw (default: 0)")
