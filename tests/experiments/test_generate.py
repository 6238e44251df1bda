"""`python -m experiments generate` with checkpoints of a user's own: drafts, a template, wrong options."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import generate, harness, registry
from flashspec import models
from tests.models.examples import CONFIGS, random_params
from tests.models.test_tokenizer import tiny_tokenizer

CONFIG = CONFIGS["gemma 2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of numbers and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    models.save(folder, CONFIG, random_params(CONFIG), tiny_tokenizer(CONFIG.vocab_size))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "1 {{ messages[0].content }} 2"}))
    return folder


def run(model: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report."""
    short = ["--model", str(model), "--out", str(out), "--max-new-tokens", "12"]
    code = harness.run_experiment("generate", [*short, *options])
    return code, json.loads((out / "report.json").read_text())


@pytest.mark.parametrize(
    "options",
    [
        ("--draft", "ngram", "--temperature", "2", "--top-k", "5", "--top-p", "0.7"),
        ("--draft-layers", "1", "--temperature", "0"),
    ],
)
def test_a_model_of_one_s_own(
    model: Path, tmp_path: Path, options: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    code, report = run(model, tmp_path, "--prompt", "5 6 5 6", *options)
    assert code == 0
    printed = " ".join(capfd.readouterr().out.split())  # the terminal breaks lines
    assert len(report["text"].split()) == 12
    assert report["text"].split()[-1] in printed
    assert "12 tokens, " in printed
    assert " tokens per round; loaded in" in printed
    (record,) = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(record)["settings"]["prompt_tokens"] == 6  # with the template's 1 and 2


def test_a_wrong_answer_has_no_speed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = generate.write

    def other(job: Any, request: Any) -> generate.Answer:
        answer = written(job, request)
        answer.logprobs[3] -= 0.1
        return answer

    monkeypatch.setattr(generate, "write", other)
    code, report = run(model, tmp_path, "--prompt", "5 6 5 6", "--draft", "ngram")
    assert code == 1
    assert not report["claims"][0]["holds"]
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "nowhere"], "`draft`: expected a checkpoint directory"),
        (["--draft-layers", "3"], r"`draft`: expected 'layers:L' with L in 1..2"),
        (["--max-new-tokens", "0"], "`max-new-tokens`: expected an integer of at least 1"),
        (["--prompt", ""], "`prompt`: expected a text that is not empty"),
        (
            ["--no-chat", "--system", "be brief", "--prompt", "1"],
            "`system`: expected a checkpoint with a chat template",
        ),
        (["--temperature", "-1"], "`temperature`"),
        (["--devices", "4"], "`mesh`: expected an axis 'model' that divides num_kv_heads = 2"),
    ],
)
def test_a_wrong_option_is_named(
    model: Path, tmp_path: Path, options: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(model, tmp_path, *options)
    assert code == registry.WRONG_USE
    assert message in capfd.readouterr().err


def test_weights_that_overflow_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS["llama, wide heads"]
    params = random_params(config)
    params["norm"]["scale"][...] = params["norm"]["scale"][...] * np.float32(np.nan)
    models.save(tmp_path, config, params, tiny_tokenizer(config.vocab_size))
    code, _ = run(tmp_path, tmp_path / "out", "--prompt", "1 2")
    assert code == registry.WRONG_USE
    assert "`model`: expected finite logits after the prompt" in capfd.readouterr().err
