"""README.md says what the kept results say, and its commands exist."""

import json
import re
import shlex
from pathlib import Path

import pytest

from experiments import readme_tables, registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXPERIMENT = re.compile(r"python -m experiments +([A-Za-z_]\w*)")
LINK = re.compile(r"\]\(([^)#:]+)\)")
PATH = re.compile(r"`([a-z_]+/(?:[a-z_/]+(?:\.py)?)?)`")

REPORT = {
    "experiment": "speed",
    "command": "python -m experiments speed",
    "date": "2026-01-02T03:04:05+00:00",
    "device": "a device",
    "jax": "0.0",
    "finished": True,
    "claims": [{"claim": "the tokens agree", "holds": True}],
    "headline": {"part": "the loop", "reaches": "1.5 times"},
    "tables": {"main": {"title": "Speed", "columns": ["D", "ratio"], "rows": [["4", "1.5"]]}},
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    save(tmp_path, REPORT)
    return tmp_path


def save(results: Path, report: dict[str, object]) -> None:
    (results / "speed").mkdir(exist_ok=True)
    (results / "speed" / "report.json").write_text(json.dumps(report))


def assert_up_to_date(text: str, results: Path = readme_tables.RESULTS) -> None:
    assert readme_tables.rewrite(text, results) == text, "run python -m experiments.readme_tables"


def test_tables_are_those_of_the_kept_results() -> None:
    assert_up_to_date(README)


def test_a_changed_number_is_noticed(results: Path) -> None:
    marked = "before\n<!-- table:speed/main -->\n<!-- /table -->\n<!-- table:results -->\n<!-- /table -->\nafter\n"
    text = readme_tables.rewrite(marked, results)
    assert_up_to_date(text, results)
    changes = [("| 1.5 |", "| 1.6 |"), ("1.5 times", "1.6 times"), ("2026-01-02", "2026-01-03"), ("a device", "a toy")]
    for old, new in changes:
        assert old in text
        with pytest.raises(AssertionError, match="readme_tables"):
            assert_up_to_date(text.replace(old, new), results)
    save(results, json.loads(json.dumps(REPORT).replace("1.5", "1.6")))
    with pytest.raises(AssertionError, match="readme_tables"):
        assert_up_to_date(text, results)


def test_text_outside_the_markers_stays(results: Path) -> None:
    text = readme_tables.rewrite("a | b\n<!-- table:speed/main -->\nold\n<!-- /table -->\nc\n", results)
    assert text.startswith("a | b\n<!-- table:speed/main -->\n| D | ratio |")
    assert text.endswith("<!-- /table -->\nc\n")
    assert "old" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:none/main -->\n<!-- /table -->", "not a kept result"),
        ("<!-- table:speed/none -->\n<!-- /table -->", r"expected one of \['main'\]"),
        ("<!-- table:speed/main -->\n", "closing"),
        ("<!-- table: -->\n<!-- /table -->", "no name"),
    ],
)
def test_a_table_that_cannot_be_made_is_an_error(results: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        readme_tables.rewrite(text, results)


@pytest.mark.parametrize("change", [{"finished": False}, {"claims": [{"claim": "the tokens agree", "holds": False}]}])
def test_an_unfinished_or_refuted_result_is_not_shown(results: Path, change: dict[str, object]) -> None:
    save(results, REPORT | change)
    with pytest.raises(ValueError, match="whose claims hold"):
        readme_tables.render("speed/main", results)


@pytest.mark.parametrize("folder", sorted(path.name for path in readme_tables.RESULTS.glob("*/")))
def test_a_kept_result_says_where_it_comes_from(folder: str) -> None:
    report = readme_tables.load(readme_tables.RESULTS / folder)
    assert report["experiment"] in registry.discover()
    assert all(report[field] for field in ("command", "date", "environment", "device", "jax"))


def unknown_experiments(text: str) -> set[str]:
    return {name for name in EXPERIMENT.findall(text) if name not in registry.discover()} - {"NAME", "all"}


def test_experiments_named_in_the_readme_exist() -> None:
    assert EXPERIMENT.search(README)
    assert unknown_experiments(README) == set()
    assert unknown_experiments("python -m experiments speculativ") == {"speculativ"}


def missing_files(text: str) -> list[str]:
    """Paths of this repository that the text names, in shell blocks or as `folder/`, and that are not there."""
    lines = [line for block in FENCE.findall(text) for line in block.splitlines()]
    words = [word for line in lines for word in shlex.split(line, comments=True)]
    named = [word for word in words if word.endswith((".txt", ".py", ".toml"))] + PATH.findall(text)
    return [path for path in named if not (ROOT / path).exists()]


def test_files_named_in_the_readme_exist() -> None:
    assert PATH.findall(README)
    assert missing_files(README) == []
    assert missing_files("```bash\npip install -r requirements.txt\n```\n") == ["requirements.txt"]
    assert missing_files("`flashspec/no_such.py`, `no_such/`, `experiments/`") == ["flashspec/no_such.py", "no_such/"]


def missing_pictures(text: str) -> list[str]:
    """Pictures and pages that the text links to and that are not there."""
    return [path for path in LINK.findall(text) if not (ROOT / path).exists()]


def test_pictures_and_pages_of_the_readme_exist() -> None:
    assert {"experiments/results/speculative/acceptance.png", "notebooks/README.md"} <= set(LINK.findall(README))
    assert missing_pictures(README) == []
    assert missing_pictures("![a plot](experiments/results/none.png)") == ["experiments/results/none.png"]


def test_the_example_in_python_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.startswith("def fibonacci(n):")
    assert "64 tokens in" in shown
    assert "blockwise" in shown
    with pytest.raises(NameError):
        exec(compile(example.replace("import jax\n", "", 1), "README.md", "exec"), {})
