"""The kept notebooks are what their sources do now, and every section checks its law beside a wrong rule."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(package) is None for package in ("jupytext", "nbclient", "ipykernel", "ipywidgets")):
    pytest.skip("needs the packages of the dev group", allow_module_level=True)

import nbclient
import nbformat

from notebooks import build

ROOT = Path(__file__).parents[2]
LAW, WRONG = "assert 1 + 1 == 2", "wrong = 3\nassert wrong != 2"


@pytest.mark.parametrize("name", build.NAMES)
def test_a_notebook_runs_and_shows_what_it_kept(name: str) -> None:
    command = [sys.executable, "-m", "notebooks.build", "--check", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"python -m notebooks.build {name}\n{done.stdout}\n{done.stderr}"


def test_every_section_of_the_chapter_has_one() -> None:
    assert [name.split("_")[1] for name in build.NAMES] == [*"1234567", "exercises"]
    assert sorted(path.stem for path in build.FOLDER.glob("*.ipynb")) == list(build.NAMES)


def notebook(*cells: Any) -> build.Notebook:
    """A notebook of Markdown cells (text) and code cells (source, outputs, tags)."""
    made = nbformat.v4.new_notebook(metadata=build.METADATA)
    for cell in cells:
        if isinstance(cell, str):
            made.cells.append(nbformat.v4.new_markdown_cell(cell))
        else:
            source, outputs, *tags = cell
            made.cells.append(nbformat.v4.new_code_cell(source, outputs=outputs, metadata={"tags": tags}))
    return made


def printed(text: str) -> list[Any]:
    return [nbformat.v4.new_output("stream", name="stdout", text=text)]


def drawn(data: str) -> list[Any]:
    return [nbformat.v4.new_output("display_data", {"image/png": data, "text/plain": "<Figure>"})]


def example(title: str = "# T", text: str = "1", image: str = "AA==", time: str = "10:00", call: str = "f()") -> Any:
    return notebook(title, (call, printed(text)), ("plot()", drawn(image)), ("now()", printed(time), build.VARIES))


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({}, False),
        ({"image": "BB=="}, False),
        ({"time": "11:00"}, False),
        ({"text": "2"}, True),
        ({"call": "f(2)"}, True),
        ({"title": "# U"}, True),
    ],
)
def test_sources_and_text_outputs_are_compared(change: dict[str, str], stale: bool) -> None:
    old, new = example(), example(**change)
    assert bool(build.first_difference(old, new)) is stale
    assert (build.fingerprint(old) != build.fingerprint(new)) is stale


def test_a_missing_cell_is_a_difference() -> None:
    short = example()
    del short.cells[-1]
    assert "4 cells kept, 3 now" in build.first_difference(example(), short)


@pytest.mark.parametrize(
    ("sources", "unchecked"),
    [
        ((LAW, WRONG), []),
        ((f"{LAW}\n{WRONG}",), []),
        ((LAW,), ["## Law"]),
        ((WRONG,), ["## Law"]),
        (("x = 1", "# assert wrong != x"), ["## Law"]),
    ],
)
def test_a_section_asserts_a_law_and_a_wrong_rule(sources: tuple[str, ...], unchecked: list[str]) -> None:
    cells = [(source, []) for source in sources]
    assert build.unchecked_sections(notebook("# Title", ("import math", []), "## Law\ntext", *cells)) == unchecked
    both = notebook("## First", (LAW, []), (WRONG, []), "## Law", *cells, "## Prose alone")
    assert build.unchecked_sections(both) == unchecked


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the source of one small notebook, `33_small`."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "NAMES", ("33_small",))
    write_source(
        tmp_path, f"import ipywidgets\nipywidgets.interact(lambda x: x, x=(0, 5))\n{LAW}\n{WRONG}\nprint(wrong)\n"
    )
    return tmp_path


def write_source(folder: Path, code: str) -> None:
    (folder / "33_small.py").write_text(f"# %% [markdown]\n# ## Small\n\n# %%\n{code}")


def test_build_writes_what_check_accepts_until_something_changes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "33_small.ipynb is missing" in build.complaints("33_small")
    assert build.main([]) == 0
    path = folder / "33_small.ipynb"
    text = path.read_text()
    assert '"3\\n"' in text
    assert "widget" not in text.replace("ipywidgets", "")
    assert "at 0x" not in text
    assert build.main(["--check", "33_small"]) == 0

    path.write_text(text.replace('"3\\n"', '"4\\n"'))
    assert build.complaints("33_small") == []
    assert build.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err

    path.write_text(text)
    write_source(folder, f"{LAW}\n")
    assert ["stale" in found or "no assertion" in found for found in build.complaints("33_small")] == [True]
    path.write_text(text.replace('"execution_count": 1', '"execution_count": null'))
    assert "a cell was not executed" in build.complaints("33_small")
    path.write_text(text + " " * build.LARGEST_FILE)
    assert any("more than 1000000" in found for found in build.complaints("33_small"))


def test_a_run_that_fails_or_warns_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_source(folder, "assert 1 + 1 == 3")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        build.execute(build.source_of("33_small"))
    write_source(folder, "import warnings\nwarnings.warn('a planted warning')")
    assert build.main([]) == 1
    assert "a planted warning" in capsys.readouterr().err
    assert not (folder / "33_small.ipynb").exists()


def test_an_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build.main(["33_8_nothing"])
    assert "there is no notebook '33_8_nothing'" in capsys.readouterr().err
