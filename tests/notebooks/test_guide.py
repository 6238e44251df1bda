"""The guide in notebooks/README.md: its programs run, its commands and links lead somewhere, it leaves nothing out."""

import re
from pathlib import Path

import pytest

from tests.test_readme import FENCE, ROOT, unknown_experiments

FOLDER = ROOT / "notebooks"
GUIDE = (FOLDER / "README.md").read_text(encoding="utf-8")
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#][^)]*)\)")
MODULE = re.compile(r"\.venv/bin/python -m ([a-z_.]+)")


def test_its_programs_run_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    for program in PROGRAM.findall(GUIDE):
        exec(compile(program, "notebooks/README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "time_per_later_token_s: 1 " in shown
    assert "(2, 16, 64)" in shown
    assert "attention on NVIDIA H200" in shown
    with pytest.raises(NameError):
        exec(compile(PROGRAM.findall(GUIDE)[-1], "notebooks/README.md", "exec"), {})


def broken_links(text: str) -> list[str]:
    return [link for link in LINK.findall(text) if not (FOLDER / link).exists()]


def test_its_links_and_commands_lead_somewhere() -> None:
    assert broken_links(GUIDE) == []
    assert broken_links("[33.8](33_8_nothing.ipynb)") == ["33_8_nothing.ipynb"]
    assert unknown_experiments(GUIDE) <= {"list"}
    assert all((ROOT / path).exists() for path in re.findall(r"`((?:experiments|flashspec)/\w+\.py)`", GUIDE))
    modules = {name for block in FENCE.findall(GUIDE) for name in MODULE.findall(block)}
    assert modules == {"experiments", "notebooks.build", "jupyter"}


def left_out(text: str) -> set[str]:
    """Notebooks and examples that the text does not link to."""
    files = [*FOLDER.glob("*.ipynb"), *FOLDER.glob("examples/*.py")]
    return {str(path.relative_to(FOLDER)) for path in files} - set(LINK.findall(text))


def test_it_names_every_notebook_and_example() -> None:
    assert left_out(GUIDE) == set()
    assert Path("33_exercises.ipynb").name in left_out(GUIDE.replace("(33_exercises.ipynb)", ""))
