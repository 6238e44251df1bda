"""`python -m experiments`: lists the experiments, runs one by name, or runs all of them."""

import sys
from collections.abc import Sequence

import rich.console
import rich.table

from experiments import all as everything
from experiments import registry

USAGE = "python -m experiments [NAME | all] [--smoke] [--out DIR] [--seed N] [...]; NAME --help lists its options"


def list_experiments() -> None:
    """Print every experiment with its question, needs and time."""
    table = rich.table.Table(title=USAGE, show_lines=True)
    table.add_column("name", no_wrap=True)  # it is what one types
    for column in ("question", "needs", "time"):
        table.add_column(column)
    for experiment in registry.discover().values():
        table.add_row(experiment.name, experiment.question, experiment.needs, experiment.time)
    rich.console.Console().print(table)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "list"):
        list_experiments()
        return 0
    name, *options = argv
    if name == "all":
        return everything.run_all(options)
    try:
        registry.find(name)
    except registry.UnknownExperiment as error:
        print(f"error: {error}\nusage: {USAGE}", file=sys.stderr)
        return registry.WRONG_USE
    from experiments import harness  # imports jax, which a listing need not wait for

    return harness.run_experiment(name, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
