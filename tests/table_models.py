"""Tiny table models with exactly known laws, each beside a twin that computes the law from the prefix alone.

Three kinds: `bigram` looks at the last token and keeps nothing; `history` looks at every token and its position, read
back *from its cache*, so that a stale key, a shifted position or a kept rejected token changes the law; the same model
also runs over the library's dense, window and paged caches.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.attention.views import gather
from flashspec.cache import append, dense_cache, paged_cache, view, window_cache
from flashspec.language_model import LanguageModel

ROWS = 17  # a prime, and 3 generates its multiplicative group: no two of 16 positions have the same weight
PAGE = 2


@dataclasses.dataclass(frozen=True)
class TableModel:
    """A language model over a table of logits, and its twin.

    Attributes:
      model: what the library is given, with the table as its parameters.
      table: [rows, V] float64 logits.
      row_of: twin, the row of the table for the next token after a prefix.
      held: cache -> int [B, capacity], the token that the cache holds at each logical position, -1 where none.
    """

    model: LanguageModel
    table: np.ndarray
    row_of: Callable[[Sequence[int]], int]
    held: Callable[[Any], np.ndarray]

    @property
    def params(self) -> jax.Array:
        return jnp.asarray(self.table, jnp.float32)

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        return self.table[self.row_of(prefix)]


class TokenCache(NamedTuple):
    """A user's own cache: the tokens themselves. `tokens` is [B, 0] where the model keeps none."""

    tokens: jax.Array
    length: jax.Array


def log(probs: np.ndarray) -> np.ndarray:
    """Logits whose softmax is `probs`, -inf for 0."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64))


def random_laws(seed: int, rows: int, vocab: int, denominator: int, stop: int | None = None) -> np.ndarray:
    """Laws [rows, V] of multiples of 1 / denominator; none puts everything on `stop`."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(denominator, np.full(vocab, 1 / vocab), size=rows)
    if stop is not None:
        certain = counts[:, stop] == denominator
        counts[certain] = np.roll(counts[certain], 1, axis=1)
    return counts / denominator


def bigram(probs: np.ndarray) -> TableModel:
    """Laws [V, V] by the last token; the cache is a length and nothing else."""
    vocab = len(probs)
    model = LanguageModel(_bigram_apply, _no_tokens, vocab)
    return TableModel(model, log(probs), lambda prefix: prefix[-1], lambda cache: np.zeros((len(cache.length), 0), int))


def _no_tokens(batch: int, capacity: int) -> TokenCache:
    return TokenCache(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32))


def _bigram_apply(table: jax.Array, tokens: jax.Array, cache: TokenCache) -> tuple[jax.Array, TokenCache]:
    return table[tokens], cache._replace(length=cache.length + tokens.shape[1])


def history(probs: np.ndarray, cache: str = "tokens", left: int | None = None, draft_length: int = 4) -> TableModel:
    """Laws [ROWS, V], selected by all tokens and their positions.

    Args:
      probs: the laws.
      cache: "tokens" (a user's own cache), "dense", "window" or "paged".
      left: the model's window; needed for "window", and None for no limit.
      draft_length: what the window cache is made for.
    """
    vocab = probs.shape[1]
    if cache == "tokens":
        model = _token_model(vocab, left)
        return TableModel(model, log(probs), functools.partial(_row_of, left=left, copies=1), _held_tokens)
    model = _attention_model(vocab, cache, left, draft_length)
    return TableModel(model, log(probs), functools.partial(_row_of, left=left, copies=2), _held_keys)


def _row_of(prefix: Sequence[int], left: int | None, copies: int) -> int:
    first = 0 if left is None else max(len(prefix) - 1 - left, 0)
    return copies * sum((prefix[i] + 1) * pow(3, i + 1, ROWS) for i in range(first, len(prefix))) % ROWS


def _position_weight(positions: jax.Array) -> jax.Array:
    powers = jnp.asarray([pow(3, i + 1, ROWS) for i in range(ROWS - 1)], jnp.int32)
    return powers[positions % (ROWS - 1)]


@functools.cache
def _token_model(vocab: int, left: int | None) -> LanguageModel:
    def init_cache(batch: int, capacity: int) -> TokenCache:
        # What was never written must not matter.
        return TokenCache(jnp.full((batch, capacity), 1_000_003, jnp.int32), jnp.zeros(batch, jnp.int32))

    def apply(table: jax.Array, tokens: jax.Array, cache: TokenCache) -> tuple[jax.Array, TokenCache]:
        batch, new = tokens.shape
        queries = cache.length[:, None] + jnp.arange(new, dtype=jnp.int32)[None, :]
        written = cache.tokens.at[jnp.arange(batch)[:, None], queries].set(tokens, mode="drop")
        keys = jnp.arange(written.shape[1], dtype=jnp.int32)[None, :]
        terms = (written + 1) * _position_weight(keys)
        row = _sum_visible(terms, keys, keys < cache.length[:, None] + new, queries, left)
        return table[row], TokenCache(written, cache.length + new)

    return LanguageModel(apply, init_cache, vocab)


def _sum_visible(terms: jax.Array, keys: jax.Array, live: jax.Array, queries: jax.Array, left: int | None) -> jax.Array:
    """Sum of the terms [B, S] that each query [B, T] sees, modulo ROWS."""
    visible = live[:, None, :] & (keys[:, None, :] <= queries[..., None])
    if left is not None:
        visible &= keys[:, None, :] >= queries[..., None] - left
    return jnp.where(visible, terms[:, None, :], 0).sum(-1, dtype=jnp.int32) % ROWS


@functools.cache
def _attention_model(vocab: int, kind: str, left: int | None, draft_length: int) -> LanguageModel:
    """Two layers over a real cache: the first reads tokens from keys at the view's positions, the second reads terms
    from values, written with the position that the token had then (as rotary keys are)."""

    def init_cache(batch: int, capacity: int) -> Any:
        sizes = {"layers": 2, "batch": batch, "K": 1, "H": vocab, "Hv": 1}
        if kind == "dense":
            cache = dense_cache(capacity=capacity, **sizes)
        elif kind == "window":
            cache = window_cache(left=left, draft_length=draft_length, **sizes)
        else:
            pages = -(-capacity // PAGE)
            cache = paged_cache(page_size=PAGE, num_pages=batch * pages, capacity=capacity, **sizes)
        unwritten = {
            name: tuple(jnp.full_like(layer, jnp.nan) for layer in getattr(cache, name)) for name in ("key", "value")
        }
        return dataclasses.replace(cache, **unwritten)

    def apply(table: jax.Array, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        queries = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        keys = jax.nn.one_hot(tokens, vocab, dtype=jnp.float32)[:, :, None, :]
        values = ((tokens + 1) * _position_weight(queries)).astype(jnp.float32)[:, :, None, None]
        row = jnp.zeros(tokens.shape, jnp.int32)
        for layer in range(2):
            cache = append(cache, layer, keys, values)
            row += _attend(view(cache, layer), layer, queries, left)
        return table[row % ROWS], cache

    return LanguageModel(apply, init_cache, vocab)


def _attend(seen: Any, layer: int, queries: jax.Array, left: int | None) -> jax.Array:
    key, value, positions, live = gather(seen)
    if positions is None:
        positions = jnp.arange(key.shape[1], dtype=jnp.int32)[None, :]
    if layer == 0:
        terms = (jnp.argmax(key[:, :, 0], -1).astype(jnp.int32) + 1) * _position_weight(positions)
    else:
        terms = jnp.where(live, value[:, :, 0, 0], 0).astype(jnp.int32)
    return _sum_visible(terms, positions, live, queries, left)


def _held_tokens(cache: TokenCache) -> np.ndarray:
    tokens = np.asarray(cache.tokens)
    return np.where(np.arange(tokens.shape[1]) < np.asarray(cache.length)[:, None], tokens, -1)


def _held_keys(cache: Any) -> np.ndarray:
    tokens, positions, live = map(np.asarray, _live_tokens(view(cache, 0)))
    held = np.full((len(tokens), max(int(positions.max()) + 1, tokens.shape[1])), -1)
    rows, slots = np.nonzero(live)
    held[rows, positions[rows, slots]] = tokens[rows, slots]
    return held


@jax.jit
def _live_tokens(seen: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    key, _, positions, live = gather(seen)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(key.shape[1], dtype=jnp.int32), live.shape)
    return jnp.argmax(key[:, :, 0], -1), positions, live


@dataclasses.dataclass(frozen=True)
class Rules:
    """What plain sampling obeys besides the model: the twin of sampling settings, stop rules and limits.

    Attributes:
      max_new: most new tokens.
      min_new: the first min_new new tokens are no stop tokens.
      stop: stop tokens; one ends the row.
      temperature: divides the logits; 0 takes the first maximum.
      bias: [V] added to the raw logits.
      processor: (logits, prefix) -> logits, on the raw logits.
    """

    max_new: int
    min_new: int = 0
    stop: tuple[int, ...] = ()
    temperature: float = 1.0
    bias: Sequence[float] | None = None
    processor: Callable[[np.ndarray, Sequence[int]], np.ndarray] | None = None


def next_law(table_model: TableModel, prefix: Sequence[int], emitted: int, rules: Rules) -> np.ndarray:
    """The distribution that plain sampling draws the next token from, float64 [V]."""
    # Which of two equal maxima is the first depends on rounding, so that the first maximum is taken as it is rounded.
    dtype = np.float64 if rules.temperature > 0 else np.float32
    logits = table_model.logits(prefix).astype(dtype)
    if rules.processor is not None:
        logits = rules.processor(logits, prefix)
    if rules.bias is not None:
        logits = logits + np.asarray(rules.bias, dtype)
    if emitted < rules.min_new:
        logits = np.where(np.isin(np.arange(len(logits)), rules.stop), -np.inf, logits)
    if rules.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    weights = np.exp((logits - logits.max()) / rules.temperature)
    return weights / weights.sum()


def exact_law(table_model: TableModel, prompt: Sequence[int], rules: Rules) -> dict[tuple[int, ...], float]:
    """The law of what plain sampling emits after `prompt`: every sequence of new tokens with its probability."""
    law: dict[tuple[int, ...], float] = {}
    unfinished = [((), 1.0)]
    while unfinished:
        new, weight = unfinished.pop()
        for token, probability in enumerate(next_law(table_model, (*prompt, *new), len(new), rules)):
            longer = (*new, token)
            if probability == 0:
                continue
            if token in rules.stop or len(longer) == rules.max_new:
                law[longer] = law.get(longer, 0.0) + weight * probability
            else:
                unfinished.append((longer, weight * probability))
    return law
