"""The sampling settings, a pytree: new values never retrace a program, and rows may differ."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.typing import ArrayLike

from flashspec import checks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How logits become the distribution that is sampled from; `probabilities` gives the order. Lists become arrays.

    Without top-k and top-p a program may leave out the branch that sorts for them, which costs a GPU one value read
    back per distribution: say so with None. Their numbers, 0 and 1 included, share one program.

    Args:
      temperature: scalar or [B], at least 0; 0 is greedy, the one-hot of the first maximum.
      top_k: scalar or [B] integers; keep exactly the k largest, ties to the lower id. 0 keeps all, None
        leaves the step out.
      top_p: scalar or [B] in (0, 1]; keep the fewest largest whose probability reaches top_p. 1 keeps all,
        None leaves the step out.
      min_p: scalar or [B] in [0, 1); drop what is less than min_p times as likely as the most likely. 0 keeps all.
      logit_bias: [V] or [B, V], added to the raw logits; -inf forbids a token.
      allowed_tokens: [V] or [B, V] bool, True where the token may be sampled.
    """

    temperature: ArrayLike = 1.0
    top_k: ArrayLike | None = 0
    top_p: ArrayLike | None = 1.0
    min_p: ArrayLike = 0.0
    logit_bias: ArrayLike | None = None
    allowed_tokens: ArrayLike | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list | tuple):
                # As a list it would be a tree of scalars.
                object.__setattr__(self, field.name, np.asarray(value))

    def check(self, batch: int, vocab_size: int) -> None:
        """Check shapes and dtypes, and the values where they are known (not traced).

        Args:
          batch: B, that of the logits [B, V] or [B, T, V].
          vocab_size: V.

        Raises:
          ValueError: a setting of another shape or dtype, or out of its range.
        """
        _setting("temperature", self.temperature, batch, "finite and at least 0", lambda t: np.isfinite(t) & (t >= 0))
        if self.top_k is not None:
            _setting("top_k", self.top_k, batch, "at least 0", lambda k: k >= 0)
            checks.integer("top_k", self.top_k)
        if self.top_p is not None:
            _setting("top_p", self.top_p, batch, "in (0, 1]", lambda p: (p > 0) & (p <= 1))
        _setting("min_p", self.min_p, batch, "in [0, 1)", lambda p: (p >= 0) & (p < 1))
        if self.logit_bias is not None:
            _by_token("logit_bias", self.logit_bias, batch, vocab_size)
            checks.floating("logit_bias", self.logit_bias)
            _values("logit_bias", self.logit_bias, "below +inf and not NaN", lambda b: b < np.inf)
        if self.allowed_tokens is not None:
            _by_token("allowed_tokens", self.allowed_tokens, batch, vocab_size)
            checks.boolean("allowed_tokens", self.allowed_tokens)


def _setting(
    name: str, value: ArrayLike, batch: int, expected: str, accept: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Check a scalar or [B]."""
    if np.ndim(value) > 0:
        checks.shape(name, value, "B", {"B": batch})
    _values(name, value, expected, accept)


def _by_token(name: str, value: ArrayLike, batch: int, vocab_size: int) -> None:
    """Check a [V] or [B, V]."""
    checks.shape(name, value, "V" if np.ndim(value) == 1 else "B V", {"B": batch, "V": vocab_size})


def _values(name: str, value: ArrayLike, expected: str, accept: Callable[[np.ndarray], np.ndarray]) -> None:
    if checks.is_concrete(value):
        known = np.asarray(value)
        accepted = accept(known)
        if not np.all(accepted):
            raise checks.fail(name, expected, known[~accepted].ravel()[0])
