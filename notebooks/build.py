"""`python -m notebooks.build [NAME ...] [--check]`: runs the notebooks and keeps them with their outputs.

The source of a notebook is notebooks/NAME.py (jupytext's percent format), which is what one edits and reviews.
notebooks/NAME.ipynb is the same cells with what they printed and drew, to be read where nothing can run.

With `--check` nothing is written, and a kept notebook is stale when its cells differ from the source, or its text
outputs from those of a fresh run. Images are left out of the comparison, and so is what a cell tagged "varies" shows:
times, and texts sampled from a real model, which rounding may change from one machine to another.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
from traitlets.config import Config

type Notebook = nbformat.NotebookNode
type Cell = nbformat.NotebookNode

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("33_*.py")))
VARIES = "varies"
LARGEST_FILE = 10**6
CELL_TIMEOUT_S = 300
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def source_of(name: str) -> Notebook:
    """The notebook of notebooks/NAME.py, without outputs."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # jupytext draws a new one each time
    return notebook


def kept(name: str) -> Notebook:
    """The executed notebook in notebooks/NAME.ipynb."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(notebook: Notebook) -> Notebook:
    """Run all cells in a kernel of their own, on the CPU, in this folder; outputs are added to the notebook.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised, such as by an assertion.
      ValueError: a cell wrote to stderr: a notebook shows no warnings.
    """
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with tempfile.TemporaryDirectory() as profile:
        # Sockets are files of this folder: kernels that start at once cannot take each other's ports.
        connection = {"transport": "ipc", "connection_file": f"{profile}/kernel.json"}
        client = nbclient.NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=CRITICAL"],  # its notes on start and end are no output of a cell
            resources={"metadata": {"path": str(FOLDER)}},
            config=Config(KernelManager=connection),
        )
        client.execute(env=plain | {"JAX_PLATFORMS": "cpu", "IPYTHONDIR": profile})
    notebook.metadata = nbformat.from_dict(METADATA)  # without the kernel's version and the state of sliders
    for cell in code_cells(notebook):
        warned = [output.text for output in cell.outputs if output.get("name") == "stderr"]
        if warned:
            raise ValueError(f"expected no output on stderr, got {''.join(warned)!r} from the cell\n{cell.source}")
        cell.outputs = [output for output in cell.outputs if _is_kept(output.get("data", {}))]
    return notebook


def _is_kept(shown: Mapping[str, Any]) -> bool:
    """Not a slider, dead without its kernel (its plot stands above it at one setting); not `<an object at 0x7f..>`."""
    names_an_object = shown.get("text/plain", "").startswith(("<", "[<"))
    return WIDGET not in shown and (not names_an_object or len(shown) > 1)


def code_cells(notebook: Notebook) -> list[Cell]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def compared(cell: Cell) -> tuple[str, str, list[str]]:
    """What makes a cell stale when it changes: its type, its source and its text outputs."""
    shown = cell.cell_type == "code" and VARIES not in cell.metadata.get("tags", ())
    return cell.cell_type, cell.source, list(_texts(cell)) if shown else []


def _texts(cell: Cell) -> Iterator[str]:
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        elif not any(kind.startswith("image/") for kind in output.data):
            yield from (output.data[kind] for kind in sorted(output.data) if kind.startswith("text/"))


def fingerprint(notebook: Notebook) -> str:
    """A hash of all that is compared."""
    return hashlib.sha256(json.dumps([compared(cell) for cell in notebook.cells]).encode()).hexdigest()


def first_difference(old: Notebook, new: Notebook) -> str:
    """The first cell that differs, in words; empty where the fingerprints agree."""
    if fingerprint(old) == fingerprint(new):
        return ""
    for before, after in zip(old.cells, new.cells, strict=False):
        if compared(before) != compared(after):
            return f"kept:\n{_show(before)}\n\nnow:\n{_show(after)}"
    return f"{len(old.cells)} cells kept, {len(new.cells)} now"


def _show(cell: Cell) -> str:
    kind, source, texts = compared(cell)
    return f"[{kind}]\n{source}\n" + "".join(f"-> {text}" for text in texts)


def without_outputs(notebook: Notebook) -> Notebook:
    """A copy as its source would be."""
    bare = nbformat.from_dict(notebook)
    for cell in code_cells(bare):
        cell.outputs, cell.execution_count = [], None
    return bare


def unchecked_sections(notebook: Notebook) -> list[str]:
    """Sections that run code without an assertion, or without one of a wrong rule beside it.

    A section begins at a `## ` heading; an assertion of a wrong rule mentions a name with "wrong" in it.
    """
    sections: dict[str, list[ast.AST]] = {}
    title = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            title = next((line for line in cell.source.splitlines() if line.startswith("## ")), title)
        elif title:
            sections.setdefault(title, []).append(ast.parse(cell.source))
    return [title for title, trees in sections.items() if not _asserts_both(trees)]


def _asserts_both(trees: Sequence[ast.AST]) -> bool:
    asserts = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    of_wrong = [node for node in asserts if any("wrong" in name.id for name in _names(node))]
    return bool(of_wrong) and len(of_wrong) < len(asserts)


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))


def complaints(name: str) -> list[str]:
    """What is wrong with a kept notebook, as far as it can be seen without running it."""
    path = FOLDER / f"{name}.ipynb"
    if not path.exists():
        return [f"{path.name} is missing"]
    notebook = kept(name)
    found = [f"no assertion of a law and of a wrong rule in {title!r}" for title in unchecked_sections(notebook)]
    if path.stat().st_size > LARGEST_FILE:
        found.append(f"{path.name} has {path.stat().st_size} bytes, more than {LARGEST_FILE}")
    if any(cell.execution_count is None for cell in code_cells(notebook)):
        found.append("a cell was not executed")
    difference = first_difference(without_outputs(notebook), source_of(name))
    return [*found, *([f"{path.name} is stale: {difference}"] if difference else [])]


def check(name: str) -> list[str]:
    """`complaints`, and what a fresh run shows otherwise than the kept notebook.

    Raises:
      As `execute`.
    """
    found = complaints(name)
    fresh = execute(source_of(name))
    if not found:
        difference = first_difference(kept(name), fresh)
        found += [f"{name}.ipynb is stale: {difference}"] if difference else []
    return found


def write(name: str) -> bool:
    """Run a notebook and keep it, and say whether the file changed: not where only images or what varies would."""
    fresh, path = execute(source_of(name)), FOLDER / f"{name}.ipynb"
    if path.exists() and not first_difference(kept(name), fresh):
        return False
    nbformat.validate(fresh)
    nbformat.write(fresh, path)
    return True


def build_or_check(name: str, only_check: bool) -> list[str]:
    """One notebook of the command line; what is wrong with it, empty when nothing is."""
    try:
        done = "checked" if only_check else "written" if write(name) else "runs, and shows what it showed"
        found = check(name) if only_check else complaints(name)
    except (nbclient.exceptions.CellExecutionError, SyntaxError, ValueError) as error:
        return [COLOURS.sub("", f"{name}: {error}")]
    if not found:
        print(f"{name}: {done}", flush=True)
    return found


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.build", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when one is stale")
    args = parser.parse_args(argv)
    names: list[Any] = [Path(name).stem for name in args.names] or list(NAMES)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"there is no notebook {unknown[0]!r}; there is {', '.join(NAMES)}")
    found = [complaint for name in names for complaint in build_or_check(name, args.check)]
    for complaint in found:
        print(complaint, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
