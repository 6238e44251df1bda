"""The corpus: what is read, how it is split, and a tokenizer that reaches every string."""

from pathlib import Path

import numpy as np
import pytest

from experiments import corpus

CODE = "def f(x):\n    return x + {}\n" * 4


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(60):
        (tmp_path / f"module{number}.py").write_text(CODE.format(*[number] * 4))
    for folder in ("test", "site-packages", "encodings"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "inside.py").write_text(f"# {folder}\n" + CODE)
    (tmp_path / "copy.py").write_text(CODE.format(*[3] * 4))
    (tmp_path / "latin.py").write_bytes(b"# \xe9" + b"x" * 100)
    (tmp_path / "tiny.py").write_text("x")
    return tmp_path


def names(library: Path, with_tests: bool) -> set[str]:
    return {document.name for document in corpus.read_documents(library, with_tests)}


def test_each_text_once_and_only_the_library(library: Path) -> None:
    found = names(library, with_tests=False)
    assert len(found) == 60
    assert not found & {"tiny.py", "latin.py", "test/inside.py", "site-packages/inside.py", "encodings/inside.py"}
    assert names(library, with_tests=True) == found | {"test/inside.py"}


def test_parts_are_disjoint_and_follow_from_the_text(library: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    parts = corpus.load_corpus(library, False, held_out=0.5)
    texts = [{document.text for document in part} for part in (parts.train, parts.validation, parts.held_out)]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 60
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for number, document in enumerate(parts.held_out):
        (elsewhere / f"renamed{number}.py").write_text(document.text)
    moved = {document.digest for document in corpus.read_documents(elsewhere, False)}
    assert all(digest / 2**32 < 0.25 for digest in moved)


def test_a_limit_stops_early_and_an_empty_part_is_an_error(library: Path) -> None:
    limited = corpus.load_corpus(library, False, held_out=0.5, max_bytes=1000)
    assert 1 < len(limited.train + limited.validation + limited.held_out) < 60
    with pytest.raises(ValueError, match="Python sources for every part"):
        corpus.load_corpus(library, False, held_out=0.0)


def test_every_string_survives_the_tokenizer(library: Path) -> None:
    documents = list(corpus.read_documents(library, False))
    tokenizer = corpus.train_tokenizer(documents, 270)
    assert tokenizer.get_vocab_size() == 270
    for text in (documents[0].text, "\tπ = '☃'  \n\n  # 1234567\r\n", " leading and trailing "):
        ids = tokenizer.encode(text).ids
        assert ids[0] == tokenizer.token_to_id(corpus.SEPARATOR) == 0
        assert tokenizer.decode(ids) == text


def test_documents_lie_end_to_end(library: Path) -> None:
    documents = list(corpus.read_documents(library, False))[:3]
    tokenizer = corpus.train_tokenizer(documents, 270)
    stream = corpus.token_stream(tokenizer, documents)
    assert stream.dtype == np.int32
    assert (stream == 0).sum() == 3
    assert tokenizer.decode(stream.tolist()) == "".join(document.text for document in documents)


def test_an_opening_ends_at_the_first_signature() -> None:
    assert corpus.opening('"""Doc."""\n\nclass A:\n    def f(self):\n        pass\n') == (
        '"""Doc."""\n\nclass A:\n    def f(self):\n'
    )
    assert corpus.opening("x = 1\n") is None
    assert corpus.opening("# comment\n" * 200 + "def f():\n") is None
