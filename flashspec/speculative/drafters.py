"""Drafters: what proposes the tokens of a round, by one protocol (init, propose, commit).

A drafter may propose anything by any law, as long as the probabilities that it returns are those it drew from: the
verification rules keep the target's distribution whatever they are. Drafters are pytrees, their parameters are leaves.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.checks import at_least, fail
from flashspec.language_model import Cache, LanguageModel, Params
from flashspec.sampling import FINE, inverse_cdf


class Proposal(NamedTuple):
    """What a drafter proposes in one round.

    Args:
      tokens: [B, D] int32 in [0, V).
      probs: [B, D, V] float32, the law that each token was drawn from, given the tokens before it.
      usable: [B, D] bool, False where the drafter had no law to draw from; such a position is rejected.
      counted: [B] bool, False for rows in which the drafter had nothing to propose and only fills the shape.
      cache: the drafter's cache after the round's forwards.
    """

    tokens: Array
    probs: Array
    usable: Array
    counted: Array
    cache: Cache


@runtime_checkable
class Law(Protocol):
    """Logits -> the distribution sampled from, with the round's sampling settings, masks and vocabulary."""

    @property
    def vocab_size(self) -> int:
        """V, the target's vocabulary."""

    def __call__(self, logits: Array, tokens: Array, lengths: Array) -> tuple[Array, Array]:
        """Logits [B, T, V'] whose row i conditions on tokens[b, : lengths[b] + i] -> probs [B, T, V], flags [B, T]."""


@runtime_checkable
class Drafter(Protocol):
    """What the round asks of a drafter; register yours as a pytree."""

    def init(self, tokens: Array, num_valid: Array, capacity: int) -> Cache:
        """A cache that has seen the first num_valid [B] of tokens [B, P] and has room for `capacity` positions."""

    def propose(self, cache: Cache, tokens: Array, lengths: Array, uniforms: Array, law: Law) -> Proposal:
        """D tokens to follow tokens[b, : lengths[b]], of which the cache holds all but the last.

        Args:
          cache: as `init` or `commit` left it: lengths - 1 positions.
          tokens: [B, L] int32 with room for D more; what lies past `lengths` is not part of the row.
          lengths: [B] int32.
          uniforms: [B, D] in [0, 1), the only randomness to use.
          law: turns the drafter's own logits into the distribution to draw from.
        """

    def commit(self, cache: Cache, length: Array) -> Cache:
        """The cache cut to `length` [B] positions, all of which the target confirmed."""


def put(tokens: Array, start: Array, values: Array) -> Array:
    """tokens [B, L] with values [B, n] written at start[b], ...; past the end they are dropped."""
    batch, count = values.shape
    columns = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    return tokens.at[jnp.arange(batch)[:, None], columns].set(values, mode="drop")


def last_token(tokens: Array, lengths: Array) -> Array:
    """tokens[b, lengths[b] - 1], [B]: emitted, and not yet in any cache."""
    return jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Proposes what a smaller model samples (33.5), with its own cache; D + 1 forwards a round.

    The last forward only writes the last draft's keys and values, so that a fully accepted round needs no special case.
    The model's vocabulary may differ from the target's: ids that it lacks are fed to it as 0 and never proposed, ids
    past the target's are masked before the softmax.

    Args:
      model: the draft model.
      params: its parameters.
    """

    model: LanguageModel = dataclasses.field(metadata={"static": True})
    params: Params

    def init(self, tokens: Array, num_valid: Array, capacity: int) -> Cache:
        """Prefill of the draft model; see `Drafter.init`."""
        return self.model.fill(self.params, self._known(tokens), num_valid, capacity)

    def propose(self, cache: Cache, tokens: Array, lengths: Array, uniforms: Array, law: Law) -> Proposal:
        """Sample D tokens one by one; see `Drafter.propose`."""
        token, drafts, probs, usable = last_token(tokens, lengths), [], [], []
        for i in range(uniforms.shape[1]):
            logits, cache = self._forward(token, cache)
            row, flags = law(logits, tokens, lengths + i)
            usable.append(flags[:, 0] == FINE)
            probs.append(row[:, 0])
            token = inverse_cdf(row[:, 0], uniforms[:, i])
            tokens = put(tokens, lengths + i, token[:, None])
            drafts.append(token)
        _, cache = self._forward(token, cache)
        counted = jnp.ones(lengths.shape, bool)
        return Proposal(jnp.stack(drafts, 1), jnp.stack(probs, 1), jnp.stack(usable, 1), counted, cache)

    def commit(self, cache: Cache, length: Array) -> Cache:
        """Roll the draft model's cache back; see `Drafter.commit`."""
        return self.model.rollback(cache, length)

    def _forward(self, token: Array, cache: Cache) -> tuple[Array, Cache]:
        return self.model.logits(self.params, self._known(token)[:, None], cache)

    def _known(self, tokens: Array) -> Array:
        return jnp.where(tokens < self.model.vocab_size, tokens, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShallowDrafter(ModelDrafter):
    """Proposes what the target's own first layers predict, through the target's own norm and head.

    Args:
      model: the target with fewer layers, over the same vocabulary.
      params: the target's parameters or the part of them that `model` reads; shared, not copied.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Proposes what followed the row's longest suffix when that suffix last occurred in the row ("prompt lookup").

    The longest suffix of at most `max_n` tokens that occurs earlier in the row is looked up, the most recent occurrence
    wins, and what followed it is copied; a copy that reaches the row's end goes on with what it has copied. The law of
    a copied token is its one-hot. Without an occurrence the last token is proposed, and counts as no proposal.

    Args:
      max_n: longest suffix to look up, in tokens.
    """

    max_n: int = dataclasses.field(default=3, metadata={"static": True})

    def __post_init__(self) -> None:
        at_least("max_n", self.max_n, 1)

    def init(self, tokens: Array, num_valid: Array, capacity: int) -> Cache:
        """Nothing to hold: the row's tokens are the cache."""
        del tokens, num_valid, capacity
        return ()

    def propose(self, cache: Cache, tokens: Array, lengths: Array, uniforms: Array, law: Law) -> Proposal:
        """Copy D tokens; see `Drafter.propose`."""
        batch, draft_length = uniforms.shape
        end, found = latest_longest_match(tokens, lengths, self.max_n)
        start = jnp.where(found, end + 1, lengths - 1)
        period = lengths - start
        offset = jnp.arange(draft_length, dtype=jnp.int32)[None, :] % period[:, None]
        drafts = jnp.take_along_axis(tokens, start[:, None] + offset, axis=1)
        probs = jax.nn.one_hot(drafts, law.vocab_size, dtype=jnp.float32)
        return Proposal(drafts, probs, jnp.ones((batch, draft_length), bool), found, cache)

    def commit(self, cache: Cache, length: Array) -> Cache:
        """Nothing to cut."""
        del length
        return cache


def latest_longest_match(tokens: Array, lengths: Array, max_n: int) -> tuple[Array, Array]:
    """Where the row's longest suffix of at most max_n tokens ended when it last occurred before.

    Args:
      tokens: [B, L] int32.
      lengths: [B] int32, at least 1.
      max_n: longest suffix considered.

    Returns:
      end [B] int32, the position of the occurrence's last token; found [B] bool.
    """
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    matching = positions < lengths[:, None] - 1
    longest = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(max_n):
        # The shifted row holds, at position e, the token at e - back.
        shifted = jnp.roll(tokens, back, axis=1)
        wanted = jnp.take_along_axis(tokens, jnp.maximum(lengths[:, None] - 1 - back, 0), axis=1)
        matching &= (shifted == wanted) & (positions >= back)
        longest += matching.astype(jnp.int32)
    latest_of_longest = jnp.where(longest == longest.max(1, keepdims=True), positions, -1)
    return latest_of_longest.max(1), longest.max(1) > 0


def check_drafter(drafter: Any, target: LanguageModel) -> None:
    """Check that a drafter keeps the protocol and can draft for `target`.

    Raises:
      ValueError: a method is missing, or a shallow drafter's vocabulary is not the target's.
    """
    if not isinstance(drafter, Drafter):
        raise fail("drafter", "an object with the methods init, propose and commit", type(drafter).__name__)
    if isinstance(drafter, ShallowDrafter) and drafter.model.vocab_size != target.vocab_size:
        raise fail("drafter", f"the target's vocabulary of {target.vocab_size}", drafter.model.vocab_size)
