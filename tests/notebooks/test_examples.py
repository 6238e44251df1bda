"""The examples run as a user runs them, and do what they say."""

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec import LanguageModel, cascade_attention, models, view
from flashspec.attention import DenseView
from flashspec.speculative import STOP
from notebooks.examples import own_model, shared_prefix, stop_strings

FOLDER = Path(own_model.__file__).parent
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"`python notebooks/examples/{name}`" in (FOLDER / name).read_text().splitlines()[0]
    if name == "shared_prefix.py":  # the others are run by the tests below
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        assert "largest difference" in capsys.readouterr().out


def check_greedy(model: LanguageModel, params: Any, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Every new token has the largest logit, to rounding, in one forward over the whole row."""
    logits, _ = jax.jit(model.apply)(params, jnp.asarray(tokens), model.init_cache(*tokens.shape))
    before = np.asarray(logits)[:, :-1]
    gap = before.max(-1) - np.take_along_axis(before, tokens[:, 1:, None], -1)[..., 0]
    new = (np.arange(1, tokens.shape[1]) >= np.array([[3], [2]])) & (np.arange(1, tokens.shape[1]) < lengths[:, None])
    assert new.sum() == 24
    assert (gap[new] < 1e-4).all()


def test_a_module_of_one_s_own_decodes_speculatively(capsys: pytest.CaptureFixture[str]) -> None:
    model, params, result = own_model.main()
    tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    check_greedy(model, params, tokens, lengths)
    assert int(result.info.rounds.sum()) < 24
    assert "24 tokens in" in capsys.readouterr().out
    wrong = tokens.copy()
    wrong[0, 5] = (wrong[0, 5] + 1) % own_model.VOCAB
    with pytest.raises(AssertionError):
        check_greedy(model, params, wrong, lengths)


PIECES = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"\xff", b"aba"]


def check_stops(stop: str, rows: np.ndarray, lengths: np.ndarray, found: np.ndarray) -> None:
    """What `str.find` says: whether the last token completes an occurrence."""
    for row, length, ends in zip(rows, lengths, found, strict=True):
        pieces = [PIECES[token] for token in row[:length]]
        before, text = b"".join(pieces[:-1]), b"".join(pieces)
        completed = any(text[:end].endswith(stop.encode()) for end in range(len(before) + 1, len(text) + 1))
        assert ends == completed, (stop, pieces)


@pytest.mark.parametrize("stop", ["a", "ab", "aab", "abab", "aabaab", "\ufffd"])
def test_stop_strings_are_found_however_they_are_cut_into_tokens(stop: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(1, len(PIECES), size=(500, 8)).astype(np.int32)
    lengths = rng.integers(1, 9, size=500).astype(np.int32)
    auto = stop_strings.automaton(stop, PIECES)
    check_stops(stop, rows, lengths, np.asarray(stop_strings.ends_in_last_token(auto, rows, lengths)))
    if stop == "ab":
        whole_token = rows[np.arange(500), lengths - 1] == PIECES.index(b"ab")
        with pytest.raises(AssertionError):
            check_stops(stop, rows, lengths, whole_token)


def slow_penalty(logits: np.ndarray, tokens: np.ndarray, lengths: np.ndarray, penalty: float) -> np.ndarray:
    result = logits.copy()
    for row, (ids, length) in enumerate(zip(tokens, lengths, strict=True)):
        for token in set(ids[:length].tolist()):
            result[row, token] = (
                logits[row, token] / penalty if logits[row, token] > 0 else logits[row, token] * penalty
            )
    return result


def test_the_penalty_counts_the_row_and_not_its_padding() -> None:
    logits = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    tokens, lengths = np.array([[1, 1, 2, 0], [5, 0, 0, 0], [3, 4, 3, 4]], np.int32), np.array([3, 1, 4], np.int32)
    fast = stop_strings.penalised(jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(lengths), 1.3)
    np.testing.assert_allclose(fast, slow_penalty(logits, tokens, lengths, 1.3), rtol=1e-6)
    wrong = slow_penalty(logits, tokens, np.full(3, 4), 1.3)
    assert not np.allclose(fast, wrong)


def test_generation_ends_with_the_token_that_completes_a_stop_string() -> None:
    stops = ("\n\n", "return")
    texts, result = stop_strings.main(stops)
    tokenizer = models.Tokenizer.load(stop_strings.MODEL / "tokenizer.json")
    starts, ends, reasons = map(
        np.asarray, (result.state.settings.prompt_lengths, result.lengths, result.finish_reason)
    )
    rows = np.asarray(result.tokens)
    assert (reasons == STOP).any()
    for text, row, start, end, reason in zip(texts, rows, starts, ends, reasons, strict=True):
        assert any(stop in text for stop in stops) == (reason == STOP)
        new = row[start:end][row[start:end] != stop_strings.END]
        assert tokenizer.decode(new[None]) == [text]
        assert not any(stop in tokenizer.decode(new[None, :-1])[0] for stop in stops)


def test_a_cascade_is_attention_in_one_piece() -> None:
    query, prefix, own = shared_prefix.example()
    twin = np.asarray(shared_prefix.in_one_piece(query, prefix, own))
    np.testing.assert_allclose(cascade_attention(query, *prefix, view(own, 0)), twin, atol=1e-5)
    # The last keys of the prefix are in every row's cache too: counted twice, and finite.
    key, value = (
        jnp.concatenate([jnp.broadcast_to(shared[-8:], (len(query), 8, *shared.shape[1:])), rest], axis=1)
        for shared, rest in zip(prefix, (own.key[0], own.value[0]), strict=True)
    )
    wrong = np.asarray(cascade_attention(query, *prefix, DenseView(key, value, own.length + 8)))
    assert np.isfinite(wrong).all()
    assert not np.allclose(wrong, twin, atol=1e-3)
