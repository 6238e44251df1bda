"""The main job's parts: prompts, batches, pairs, the greedy check, and what it says of exactness."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import harness, pairs, registry, round_costs, speculative, speculative_report
from experiments.greedy_check import Greedy, check_greedy, worst_of
from experiments.law_check import Law
from experiments.pairs import Pair, load_pair
from experiments.programs import Outcome, Prompts, batches_of
from flashspec import models
from flashspec.sampling import SamplingParams
from flashspec.speculative import ModelDrafter, NgramDrafter, ShallowDrafter
from tests.models.examples import example
from tests.models.test_tokenizer import tiny_tokenizer
from tests.speculative import toys


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"prompt": None, "prompt_file": None} | given)


def test_prompts_of_the_command_line_and_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("été 🙂\n", encoding="utf-8")
    (tmp_path / "b.json").write_text('["x", "y\\n"]')
    files = [tmp_path / "a.txt", tmp_path / "b.json"]
    assert speculative.read_prompts(options(prompt=["one"], prompt_file=files)) == ["one", "été 🙂\n", "x", "y\n"]
    assert speculative.read_prompts(options()) == pairs.bundled_prompts()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "a file that exists"),
        ("a.txt", b"", 'not empty, got .*a.txt with ""'),
        ("a.txt", b"\xff\xfe", "text in UTF-8.*a.txt"),
        ("a.json", b"{", "JSON in a .json file, got .*a.json"),
        ("a.json", b'{"prompt": 1}', "a list of strings"),
        ("a.json", b'"abc"', "a list of strings"),
        ("a.json", b"3", "a list of strings"),
        ("a.json", b"[]", "a list of strings"),
        ("a.json", b'["a", 1]', "texts and not empty, got .* with 1"),
        ("a.json", b'["a", ""]', "texts and not empty"),
    ],
)
def test_a_prompt_file_that_holds_anything_else_is_refused(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="`prompt-file`: expected .*" + message):
        speculative.read_prompts(options(prompt_file=[tmp_path / name]))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="`prompt`: expected a text that is not empty"):
        speculative.read_prompts(options(prompt=["a", ""]))


def test_a_prompt_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["\\ud800"]')
    for given in (
        options(prompt=["a\udcff"]),
        options(prompt_file=[tmp_path / "a.json"]),
    ):  # a lone byte of the shell's
        with pytest.raises(ValueError, match="`prompt`: expected text in Unicode"):
            speculative.read_prompts(given)


WRONG_OPTIONS = [
    (["--batch", "0"], "`batch`"),
    (["--repeats", "0"], "`repeats`"),
    (["--max-new-tokens", "0"], "`max-new-tokens`"),
    (["--law-draws", "0"], "`law-draws`"),
    *((["--draft-length", length], "`draft-length`") for length in ("0", "-1", "abc", "2.5", "")),
    *((["--temperature", value], "`temperature`") for value in ("-1", "nan", "inf")),
    *((["--top-p", value], "`top_p`") for value in ("0", "1.5", "nan")),
    (["--top-k", "-1"], "`top_k`"),
    (["--min-p", "1"], "`min_p`"),
    (["--draft", "/nowhere"], "`draft`"),
    (["--draft", "layers:0"], "`draft`: expected 'layers:L' with L in 1..12"),
    (["--draft", "layers:99"], "`draft`: expected 'layers:L' with L in 1..12"),
    (["--target", "/nowhere", "--draft", "ngram"], "`target`"),
    (["--target", str(pairs.FOLDER / "target")], "`draft`"),
    (["--out", "/dev/null/here"], "`out`: expected a folder that can be written to"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG_OPTIONS)
def test_a_wrong_option_is_one_line_and_exit_code_2(argv: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    # Smaller runs replace some of the options, but not before they are checked.
    assert harness.run_experiment("speculative", ["--smoke", "--out", str(tmp_path), *argv]) == registry.WRONG_USE
    error = capsys.readouterr().err.splitlines()[0]
    assert error.startswith(f"error: {message}")
    assert "expected" in error
    assert "got" in error


@pytest.mark.parametrize("seed", ["-1", "x", str(2**31)])
def test_a_seed_that_numpy_or_jax_would_refuse_late_is_refused_at_once(seed: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        harness.run_experiment("speculative", ["--seed", seed])
    assert f"expected a number in 0..2147483647, got '{seed}'" in capsys.readouterr().err


def test_batches_fill_up_with_the_first_prompts() -> None:
    prompts = Prompts(np.arange(8, dtype=np.int32)[:, None], np.ones(8, np.int32))
    assert [batch.tokens[:, 0].tolist() for batch in batches_of(prompts, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    assert [batch.tokens[:, 0].tolist() for batch in batches_of(prompts, 10)] == [[*range(8), 0, 1]]
    assert len(batches_of(prompts, 8)) == 1


def save(directory: Path, tokenizer: models.Tokenizer | None) -> Path:
    models.save(directory, *example("llama"), tokenizer)
    return directory


def swapped_tokenizer() -> models.Tokenizer:
    """As `tiny_tokenizer`, with the meanings of two ids exchanged."""
    values = json.loads(tiny_tokenizer(37).backend.to_str())
    vocab = values["model"]["vocab"]
    vocab["3"], vocab["4"] = vocab["4"], vocab["3"]
    return models.Tokenizer(type(tiny_tokenizer(2).backend).from_str(json.dumps(values)))


def test_what_may_draft_for_a_target_of_one_s_own(tmp_path: Path) -> None:
    target = save(tmp_path / "target", tiny_tokenizer(37))
    lone = load_pair(target, "ngram")
    assert isinstance(lone.drafter, NgramDrafter)
    assert lone.draft_forwards(4) == 0
    shallow = load_pair(target, "layers:1")
    assert isinstance(shallow.drafter, ShallowDrafter)
    assert isinstance(load_pair(target, str(target)).drafter, ModelDrafter)
    assert load_pair(target, str(target)).draft_forwards(4) == 5


def test_a_draft_that_cannot_be_is_refused(tmp_path: Path) -> None:
    target = save(tmp_path / "target", tiny_tokenizer(37))
    other = save(tmp_path / "other", swapped_tokenizer())
    with pytest.raises(
        ValueError, match=r"`draft`: expected the target's tokenizer, got 2 ids .* that mean other text"
    ):
        load_pair(target, str(other))
    with pytest.raises(ValueError, match="`draft`: expected a checkpoint directory, 'ngram' or 'layers:L'"):
        load_pair(target, None)
    for layers in ("0", "3", "x", "-1"):
        with pytest.raises(ValueError, match=r"`draft`: expected 'layers:L' with L in 1\.\.2"):
            load_pair(target, f"layers:{layers}")
    (other / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"`draft`: .*config\.json: `architectures`"):
        load_pair(target, str(other))


def test_a_target_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`target`: expected a directory with a tokenizer"):
        load_pair(save(tmp_path / "target", None), "ngram")


def toy_pair() -> Pair:
    absent: Any = None
    return Pair(absent, toys.model(vocab=5), toys.table(0, 5), NgramDrafter(), absent, jnp.float32)


def greedy_tokens(prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by whole forwards."""
    table, row_of = np.asarray(toys.table(0, 5)), toys.toy(vocab=5).row_of
    for _ in range(count):
        prompt = [*prompt, int(table[row_of(prompt)].argmax())]
    return prompt


def judge(tokens: list[int], plain: list[int]) -> Greedy:
    rows = (jnp.asarray([row], jnp.int32) for row in (tokens, plain))
    return check_greedy(toy_pair(), *rows, np.array([2]), np.array([8]))


def test_the_greedy_check_rejects_a_token_that_is_no_maximum() -> None:
    right = greedy_tokens([1, 2], 6)
    judged = judge(right, right)
    assert judged.equal
    assert judged.first_mismatch is None
    assert judged.max_logit_diff <= judged.tolerance
    wrong = [*right[:5], (right[5] + 1) % 5, *right[6:]]
    judged = judge(wrong, right)
    assert not judged.equal
    assert judged.first_mismatch == 3
    assert judged.mismatch_gap is not None
    assert judged.mismatch_gap > judged.tolerance


def test_one_wrong_batch_makes_the_verdict() -> None:
    right = greedy_tokens([1, 2], 6)
    wrong = [*right[:5], (right[5] + 1) % 5, *right[6:]]
    good, bad = judge(right, right), judge(wrong, right)
    for order in ([good, bad], [bad, good]):
        assert worst_of(order) == bad
    assert worst_of([good, good]) == good
    assert worst_of([good, bad]) != good


def test_the_greedy_check_looks_at_new_tokens_only() -> None:
    right = greedy_tokens([1, 2], 6)
    other_prompt = [3, 2]  # no maxima, nor should they be
    assert judge(greedy_tokens(other_prompt, 6), greedy_tokens(other_prompt, 6)).equal
    assert judge([*right[:8], 0], [*right[:8], 1]).first_mismatch is None  # what follows the end is padding


GREEDY = Greedy(equal=True, max_logit_diff=0.0, tolerance=1e-3, first_mismatch=None, mismatch_gap=None)
LAW = Law([1], draws=50_000, tv=0.01, bound=0.02, control_draws=6_250, control_tv=0.12, control_expected=0.12)


@pytest.fixture
def job(tmp_path: Path) -> harness.Job:
    return harness.Job(registry.find("speculative"), argparse.Namespace(smoke=True, seed=0, out=tmp_path), "a command")


@pytest.mark.parametrize(
    ("change", "passed", "control_tv"),
    [
        ({}, True, 0.12),
        ({"tv": 0.021}, False, 0.12),
        ({"tv": float("nan")}, False, 0.12),
        ({"control_tv": 0.03}, False, 0.03),  # it had to show, and did not
        ({"control_tv": 0.01, "control_expected": 0.01}, True, None),  # no power here: said, not claimed
        ({"tv": 0.0, "bound": 0.0, "control_tv": 0.0, "control_expected": 0.0}, True, None),  # temperature 0
        ({"tv": 1e-4, "bound": 0.0, "control_tv": 0.0, "control_expected": 0.0}, False, None),
    ],
)
def test_what_is_said_of_exactness(
    job: harness.Job, change: dict[str, float], passed: bool, control_tv: float | None, capsys: Any
) -> None:
    law = dataclasses.replace(LAW, **change)
    assert speculative_report.write_exactness(job, GREEDY, [law]).passed is passed
    exact = job.report["exact"]
    np.testing.assert_equal(exact["law_tv"], law.tv)
    assert exact["law_bound"] == law.bound
    assert exact["control_tv"] == control_tv
    assert len(job.claims) == (2 if control_tv is None else 3)
    assert ("control: not applicable" in capsys.readouterr().out) == (control_tv is None)


def test_greedy_tokens_that_are_no_maxima_fail_the_check(job: harness.Job) -> None:
    wrong = dataclasses.replace(GREEDY, equal=False)
    assert speculative_report.write_exactness(job, GREEDY, [LAW]).passed
    assert not speculative_report.write_exactness(job, wrong, [LAW]).passed


def test_short_prompts_are_continued_for_the_law() -> None:
    decoded: Any = Outcome(np.ones((1, 30), np.int32), np.array([30]), None)  # type: ignore[arg-type]
    short = Prompts(np.zeros((1, 3), np.int32), np.array([3]))
    assert speculative.law_prompts(short, decoded).lengths.tolist() == [30]
    long = Prompts(np.zeros((2, 24), np.int32), np.array([3, 24]))
    assert speculative.law_prompts(long, decoded) is long


def test_every_part_of_a_round_takes_time() -> None:
    model, shape = toys.model("dense", 5), round_costs.Shape(batch=1, capacity=16, steps=2, repeats=1)
    drafter = ModelDrafter(model, toys.table(1, 5))
    assert round_costs.draft_seconds(drafter, 1, shape) > 0
    assert round_costs.draft_seconds(NgramDrafter(), 1, shape) == 0
    assert round_costs.management_seconds(5, NgramDrafter(), 1, SamplingParams(), shape) > 0
    parts = round_costs.Costs(draft_step=1.0, verify=5.0, management=0.5, round=10.0, predicates=0)
    assert parts.overhead(3) == pytest.approx(0.1)
