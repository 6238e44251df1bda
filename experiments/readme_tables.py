"""`python -m experiments.readme_tables [--check]`: the tables of README.md, written anew from the kept results.

A table stands between `<!-- table:NAME/TABLE -->` and `<!-- /table -->` and shows the table TABLE of
experiments/results/NAME/report.json; `<!-- table:results -->` has one line for each kept result.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MARKED = re.compile(r"(?P<open><!-- table:(?P<name>\S+) -->\n)(?P<body>.*?)(?P<close><!-- /table -->)", re.DOTALL)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def load(folder: Path) -> dict[str, Any]:
    """The report of one kept result.

    Raises:
      ValueError: it is missing, is no JSON, or its run did not finish or refuted a claim.
    """
    path = folder / "report.json"
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a kept result: {error}") from error
    if not report["finished"] or not all(claim["holds"] for claim in report["claims"]):
        raise ValueError(f"{path}: expected a finished run whose claims hold")
    return report


def render(name: str, results: Path = RESULTS) -> str:
    """The Markdown of one marked table, with the command, date and device that it comes from.

    Raises:
      ValueError: there is no such result or no such table in it.
    """
    if name == "results":
        return summary(results)
    folder, _, table = name.partition("/")
    report = load(results / folder)
    if table not in report["tables"]:
        raise ValueError(f"table:{name}: expected one of {sorted(report['tables'])}, got {table!r}")
    shown = report["tables"][table]
    source = f"{shown['title']}. `{report['command']}`, {report['date'][:10]}, {report['device']}, jax {report['jax']}."
    return f"{markdown_table(shown['columns'], shown['rows'])}\n\n{source}\n"


def summary(results: Path) -> str:
    """One line for each kept result that states what its part of the library reaches."""
    reports = [load(path.parent) for path in sorted(results.glob("*/report.json"))]
    rows = [
        [r["headline"]["part"], r["headline"]["reaches"], r["device"], f"`python -m experiments {r['experiment']}`"]
        for r in reports
        if r["headline"]
    ]
    return markdown_table(["part", "reaches", "measured on", "command"], rows) + "\n"


def rewrite(text: str, results: Path = RESULTS) -> str:
    """The text with every marked table written anew; everything else stays as it is."""
    if text.count("<!-- table:") != len(MARKED.findall(text)):
        raise ValueError("README.md: a table marker has no name, or no closing <!-- /table -->")
    return MARKED.sub(lambda found: found["open"] + render(found["name"], results) + found["close"], text)


def main(argv: Sequence[str]) -> int:
    """Rewrite README.md, or with `--check` say whether that would change it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.readme_tables", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a table is out of date")
    args = parser.parse_args(argv)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = rewrite(text)
    if args.check:
        return int(new != text)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
