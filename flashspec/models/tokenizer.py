"""Text to padded token arrays and back, over a `tokenizer.json`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from jax.typing import ArrayLike

from flashspec.checks import fail

# Checkpoints round their vocabulary up for the hardware; a larger gap is another model's tokenizer.
MAX_PADDED_IDS = 1023


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A thin wrapper of a `tokenizers.Tokenizer`."""

    backend: tokenizers.Tokenizer

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """The tokenizer in a `tokenizer.json`.

        Raises:
          ValueError: the file is missing or is no tokenizer; names it.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path}: no such file; expected a tokenizer.json")
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ValueError(f"{path}: not a tokenizer.json: {error}") from error
        # A file may ask for both, as its model was trained: prompts would lose their ends, and padding count as tokens.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend)

    @property
    def size(self) -> int:
        """One more than the highest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def check(self, vocab_size: int, path: Path | None = None) -> None:
        """Check that this tokenizer can belong to a model of `vocab_size` ids.

        Added tokens may lie past the model's ids (Gemma 3's has one for images): text that holds one is refused where
        its ids are used.

        Args:
          vocab_size: V of the model.
          path: the tokenizer's file, for the message.

        Raises:
          ValueError: it has ids that the model lacks, or so few that it is another model's.
        """
        own = max(self.backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        if own > vocab_size or self.size < vocab_size - MAX_PADDED_IDS:
            where = f" in {path} (use the tokenizer.json that came with these weights)" if path else ""
            expected = f"ids that match the model's vocabulary of {vocab_size}"
            raise fail("tokenizer", expected, f"{max(own, self.size)} ids{where}")

    def encode(self, texts: Sequence[str], *, special_tokens: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, by default with the special tokens that the tokenizer itself adds.

        Args:
          texts: B strings.
          special_tokens: False for texts that hold their own already, as a chat template writes them.

        Returns:
          (tokens [B,P] int32 padded on the right with 0, lengths [B] int32), P the longest length.
        """
        rows = [encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=special_tokens)]
        tokens = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        return tokens, np.array([len(ids) for ids in rows], np.int32)

    def decode(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> list[str]:
        """The texts of tokens [B,L], each row cut to `lengths` [B] if given; special tokens are left out."""
        rows = np.asarray(tokens)
        stops = [rows.shape[1]] * len(rows) if lengths is None else np.asarray(lengths).tolist()
        return self.backend.decode_batch([row[:stop].tolist() for row, stop in zip(rows, stops, strict=True)])
