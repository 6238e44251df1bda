"""What generation needs of a model: pure functions over a parameter tree and an explicit cache."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import Array

from flashspec import cache as caches
from flashspec.checks import at_least, fail

type Params = Any
type Cache = Any
type Apply = Callable[[Params, Array, Cache], tuple[Array, Cache]]
type Rollback = Callable[[Cache, Array], Cache]
type Prefill = Callable[[Params, Array, Array, Cache], Cache]


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder as the generation loop sees it: four pure functions and a vocabulary size.

    The loop never looks into `params` or the cache; all it asks of a cache is that `rollback` can lower its length.
    A model is hashed and compared by its fields, and compiled programs are kept per model: build it once and reuse it
    (functions made anew, such as a fresh lambda, make a new model).

    Args:
      apply: (params, tokens [B, T], cache) -> (logits [B, T, V], cache), T >= 1. Row b's token i sits at logical
        position length[b] + i, attends to what the cache holds and to the tokens up to itself, and is written there.
      init_cache: (batch, capacity) -> an empty cache for `batch` rows of `capacity` positions.
      vocab_size: V.
      prefill: (params, tokens [B, P], num_valid [B], cache) -> cache that holds num_valid[b] positions of row b;
        None for `apply`, then `rollback`.
      rollback: (cache, length [B]) -> cache cut to `length`; the default lowers the `length` of any of the library's
        caches, and of any dataclass, NamedTuple or dict that has one.

    Raises:
      ValueError: vocab_size is below 1, or a field that should be a function is not callable.
    """

    apply: Apply
    init_cache: Callable[[int, int], Cache]
    vocab_size: int
    prefill: Prefill | None = None
    rollback: Rollback = caches.rollback

    def __post_init__(self) -> None:
        at_least("vocab_size", self.vocab_size, 1)
        for name in ("apply", "init_cache", "rollback"):
            if not callable(getattr(self, name)):
                raise fail(name, "a function", type(getattr(self, name)).__name__)
        if self.prefill is not None and not callable(self.prefill):
            raise fail("prefill", "a function or None", type(self.prefill).__name__)

    def fill(self, params: Params, tokens: Array, num_valid: Array, capacity: int) -> Cache:
        """A new cache that holds the first num_valid [B] of tokens [B, P]; P may be 0."""
        cache = self.init_cache(tokens.shape[0], capacity)
        if not tokens.shape[1]:
            return cache
        if self.prefill is not None:
            return self.prefill(params, tokens, num_valid, cache)
        return self.rollback(self.logits(params, tokens, cache)[1], num_valid)

    def logits(self, params: Params, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """`apply`, with the shape of what it returns checked while tracing: [B, T, V]."""
        logits, cache = self.apply(params, tokens, cache)
        want = (*tokens.shape, self.vocab_size)
        if tuple(logits.shape) != want:
            raise fail("model.apply", f"logits of shape {list(want)}", f"shape {list(logits.shape)}")
        return logits, cache
