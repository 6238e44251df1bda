"""The tokenizer: padded arrays, round trips, and a size that must fit the model."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from flashspec.models import Tokenizer


def tiny_tokenizer(size: int) -> Tokenizer:
    """A word-level tokenizer of `size` ids: <s> and the numbers after it."""
    vocab = {"<s>": 0} | {str(number): number for number in range(1, size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(backend)


def test_rows_are_padded_on_the_right() -> None:
    tokens, lengths = tiny_tokenizer(9).encode(["1 2 3", "", "8"])
    assert tokens.dtype == lengths.dtype == np.int32
    assert tokens.tolist() == [[1, 2, 3], [0, 0, 0], [8, 0, 0]]
    assert lengths.tolist() == [3, 0, 1]


def test_decode_stops_at_the_length() -> None:
    tokens = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    assert tiny_tokenizer(9).decode(tokens, np.array([3, 1], np.int32)) == ["1 2 3", "4"]
    assert tiny_tokenizer(9).decode(tokens) == ["1 2 3", "4 5 6"]


def test_no_texts() -> None:
    tokens, lengths = tiny_tokenizer(9).encode([])
    assert tokens.shape == (0, 0)
    assert lengths.shape == (0,)


def test_load_reads_what_was_saved(tmp_path: Path) -> None:
    tiny_tokenizer(9).backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path / "tokenizer.json").encode(["7"])[0].tolist() == [[7]]


def test_prompts_are_neither_cut_nor_padded_by_the_file(tmp_path: Path) -> None:
    saved = tiny_tokenizer(9).backend
    saved.enable_truncation(2)
    saved.enable_padding(length=5)
    saved.save(str(tmp_path / "tokenizer.json"))
    texts = ["1 2 3", "8"]
    assert Tokenizer(saved).encode(texts)[1].tolist() == [5, 5]  # what the file asks for
    tokens, lengths = Tokenizer.load(tmp_path / "tokenizer.json").encode(texts)
    assert lengths.tolist() == [3, 1]
    assert tokens.tolist() == [[1, 2, 3], [8, 0, 0]]


def test_load_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.json: no such file"):
        Tokenizer.load(tmp_path / "nothing.json")


def test_the_size_must_fit_up_to_padding() -> None:
    tokenizer = tiny_tokenizer(100)
    tokenizer.check(100)
    tokenizer.check(128)
    tokenizer.backend.add_special_tokens(["<image>"])  # past the model's ids, as in Gemma 3
    tokenizer.check(100)
    for vocab_size in (99, 1125):
        with pytest.raises(ValueError, match="`tokenizer`"):
            tokenizer.check(vocab_size)
