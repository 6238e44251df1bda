"""`python notebooks/examples/stop_strings.py`: stop strings and a repetition penalty, as one `processor`.

A processor changes the logits of a position given the tokens before it. It is applied to draft and target alike, on the
confirmed prefix plus the drafts before the position, so speculation stays exact for the law that it makes.

A stop *string* is no token: "\\n\\n" may come as one token, as two, or as the end of a longer one. So the text is
followed byte by byte with a small automaton for each string, and once one is complete only the end token is left. (The
bytes are those of the token's own text; one that is part of a character has none, so stop strings should be ASCII.)
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import experiments
from flashspec import Generation, NgramDrafter, SamplingParams, generate, models

MODEL = Path(experiments.__file__).parent / "pair" / "draft"
Processor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
END = 0  # the bundled tokenizer's `<|file|>`


@dataclasses.dataclass(frozen=True)
class Automaton:
    """Follows one string through the bytes of tokens (Knuth, Morris and Pratt).

    Attributes:
      length: of the string, in bytes; no more tokens than that can hold its last occurrence.
      next_state: [length, V], how many of the string's first bytes the text ends with after a token.
      completes: [length, V] bool, the string was completed inside of the token.
    """

    length: int
    next_state: np.ndarray
    completes: np.ndarray


def automaton(stop: str, pieces: Sequence[bytes]) -> Automaton:
    """The automaton of a string over the bytes of every token."""
    text = stop.encode()

    def advance(state: int, piece: bytes) -> tuple[int, bool]:
        seen, done = text[:state], False
        for byte in piece:
            seen += bytes([byte])
            done |= seen.endswith(text)
            # What may still grow into the string: the longest end of the text that begins it.
            seen = next(
                text[:size] for size in range(min(len(text) - 1, len(seen)), -1, -1) if seen.endswith(text[:size])
            )
        return len(seen), done

    table = [[advance(state, piece) for piece in pieces] for state in range(len(text))]
    return Automaton(
        len(text),
        np.array([[state for state, _ in row] for row in table], np.int32),
        np.array([[done for _, done in row] for row in table]),
    )


def ends_in_last_token(auto: Automaton, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B] bool: the last token of tokens[b, : lengths[b]] completes the string."""
    state, done = jnp.zeros(lengths.shape, jnp.int32), jnp.zeros(lengths.shape, bool)
    for back in range(auto.length, 0, -1):
        column = lengths - back
        token = jnp.take_along_axis(tokens, jnp.maximum(column, 0)[:, None], axis=1)[:, 0]
        done = (column >= 0) & jnp.asarray(auto.completes)[state, token]
        state = jnp.where(column >= 0, jnp.asarray(auto.next_state)[state, token], state)
    return done


def penalised(logits: jax.Array, tokens: jax.Array, lengths: jax.Array, penalty: float) -> jax.Array:
    """Logits [B, V] of tokens that the row already has, divided by the penalty where positive, else multiplied by it.

    What lies past `lengths` is padding with token 0, and counts for nothing.
    """
    inside = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    rows = jnp.arange(len(tokens))[:, None]
    present = jnp.zeros(logits.shape, bool).at[rows, jnp.where(inside, tokens, logits.shape[1])].set(True, mode="drop")
    return jnp.where(present, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def make_processor(stops: Sequence[str], pieces: Sequence[bytes], penalty: float) -> Processor:
    """After a stop string only END, before it a repetition penalty. Make it once: programs are kept per processor."""
    automata = [automaton(stop, pieces) for stop in stops]
    only_end = jnp.where(jnp.arange(len(pieces)) == END, 0.0, -jnp.inf)[None, :]

    def processor(logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        stopped = jnp.stack([ends_in_last_token(auto, tokens, lengths) for auto in automata]).any(0)
        return jnp.where(stopped[:, None], only_end, penalised(logits, tokens, lengths, penalty))

    return processor


def main(stops: Sequence[str] = ("\n\n", "return")) -> tuple[list[str], Generation]:
    """Speculative sampling that ends with a stop string; the texts without prompt and end token, and the result."""
    bundled, tokenizer = models.load(MODEL, jnp.float32), models.Tokenizer.load(MODEL / "tokenizer.json")
    pieces = [text.encode() for text in tokenizer.decode(np.arange(bundled.config.vocab_size)[:, None])]
    tokens, lengths = tokenizer.encode(["def add(a, b):\n    ", "import os\n", "class Node:\n    "])
    result = generate(
        jax.random.key(0),
        models.as_language_model(bundled.config, jnp.float32),
        bundled.params,
        tokens,
        lengths,
        drafter=NgramDrafter(),
        sampling=SamplingParams(temperature=0.7),
        processor=make_processor(stops, pieces, penalty=1.2),
        stop_tokens=(END,),
        max_new_tokens=48,
    )
    rows = zip(np.asarray(result.tokens), lengths, np.asarray(result.lengths), strict=True)
    texts = [tokenizer.decode(row[None, start:end])[0] for row, start, end in rows]
    for text in texts:
        print(repr(text))
    return texts, result


if __name__ == "__main__":
    main()
