"""The sources of Python's own standard library as a training corpus, as they lie on this machine."""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers

# Installed packages are not the standard library; character tables and test data are not prose or code.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings", "cjkencodings", "data"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
BYTES_PER_FILE = (64, 1_000_000)
SEPARATOR = "<|file|>"


@dataclasses.dataclass(frozen=True)
class Document:
    """One source file: its path in the library, and its text."""

    name: str
    text: str

    @property
    def digest(self) -> int:
        """A number of 32 bits from the text alone, so that a split depends neither on order nor on place."""
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:4], "big")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents to learn from, documents to watch training by, and documents for the report alone."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    held_out: tuple[Document, ...]


def library_folder() -> Path:
    """Where this Python keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_documents(root: Path, with_tests: bool) -> Iterator[Document]:
    """Every readable source file below `root`, each text once, in the order of their paths."""
    skipped = SKIPPED_FOLDERS | (frozenset() if with_tests else TEST_FOLDERS)
    seen = set()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if skipped & set(place.parts) or not BYTES_PER_FILE[0] <= path.stat().st_size <= BYTES_PER_FILE[1]:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, PermissionError):
            continue  # the library's tests hold files that are undecodable on purpose
        if text not in seen:
            seen.add(text)
            yield Document(place.as_posix(), text)


def load_corpus(root: Path, with_tests: bool, held_out: float = 0.05, max_bytes: int | None = None) -> Corpus:
    """Documents below `root`, split by a hash of their text, so that files and not chunks of them are held out.

    Args:
      root: a folder of Python sources.
      with_tests: include the library's tests.
      held_out: share of the documents kept from training, half for validation and half for the report.
      max_bytes: stop after about so much text; None for all.

    Raises:
      ValueError: the folder holds too few documents for both parts.
    """
    parts: tuple[list[Document], ...] = ([], [], [])
    size = 0
    # A limit must not mean the first letters of the alphabet; the low bits have no part in the split.
    for document in sorted(read_documents(root, with_tests), key=lambda document: document.digest & 0xFFFF):
        if max_bytes is not None and size > max_bytes:
            break
        size += len(document.text)
        place = document.digest / 2**32
        parts[0 if place >= held_out else 1 if place >= held_out / 2 else 2].append(document)
    if not all(parts):
        raise ValueError(f"{root}: expected Python sources for every part, got {', '.join(str(len(p)) for p in parts)}")
    return Corpus(*map(tuple, parts))


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE that reaches every string; it puts the separator, id 0, before each text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    # Runs of spaces stay whole words of their own, which indentation needs; one space leads the word after it.
    words = tokenizers.Regex(r" ?[A-Za-z]+| ?\d{1,3}| ?[^\sA-Za-z\d]+|\n+|[ \t]+(?=\S)|\s+")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(words, "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, tokenizer.token_to_id(SEPARATOR))]
    )
    return tokenizer


def token_stream(tokenizer: tokenizers.Tokenizer, documents: Sequence[Document]) -> np.ndarray:
    """All documents end to end, each after a separator; int32 [tokens]."""
    encoded = tokenizer.encode_batch([document.text for document in documents])
    return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encoded])


def opening(text: str, max_bytes: int = 1200) -> str | None:
    """The beginning of a file up to the end of its first function signature, or None where there is none early on."""
    lines: list[str] = []
    for line in text.splitlines():
        lines.append(line)
        if sum(map(len, lines)) > max_bytes:
            return None
        if line.lstrip().startswith("def ") and line.rstrip().endswith(":"):
            return "\n".join(lines) + "\n"
    return None
