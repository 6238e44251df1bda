"""The exact verification rules: which drafts of a round are kept, and which token follows them.

`verify_chain` keeps most and needs the draft's full distributions, `verify_match` needs none, `verify_greedy` is for
temperature 0. Each is written for one row and mapped over the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from flashspec import checks
from flashspec.sampling import fold, inverse_cdf, row_keys
from flashspec.speculative.formulas import (
    acceptance_probability,
    acceptance_rate,
    check_distributions,
    output_law,
    residual_distribution,
    residual_weights,
    working_dtype,
)

__all__ = [
    "NO_TOKEN",
    "Verdict",
    "acceptance_probability",
    "acceptance_rate",
    "check_distributions",
    "output_law",
    "residual_distribution",
    "verify_chain",
    "verify_greedy",
    "verify_match",
]

# What each of a round's keys is folded with: no two kinds of draw share their bits.
COINS, FINAL, OWN = 0, 1, 2

NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a rule decided on each of B rows.

    Attributes:
      num_accepted: [B] int32, drafts kept: all those before the first rejection.
      next_token: [B] int32, the token after them; -1 where `target_flagged`.
      tested: [B, D] bool, drafts that were compared with the target: up to the first rejection, and proposed at all.
      accepted: [B, D] bool, the first `num_accepted` drafts.
      draft_flagged: [B] bool, the row's first rejection was forced by a draft distribution that is not finite.
      target_flagged: [B] bool, the target distribution that `next_token` would come from is not finite or all zero.
        Nothing after the accepted drafts may be emitted.
    """

    num_accepted: Array
    next_token: Array
    tested: Array
    accepted: Array
    draft_flagged: Array
    target_flagged: Array


def verify_chain(
    key: Array | None,
    draft_tokens: ArrayLike,
    draft_probs: ArrayLike,
    target_probs: ArrayLike,
    *,
    uniforms: tuple[ArrayLike, ArrayLike] | None = None,
    checked: bool = False,
) -> Verdict:
    """Speculative sampling: drafts x_i ~ q_i in, tokens whose law is the target's out.

    In order, x_i is kept iff u_i q_i(x_i) < p_i(x_i), u_i in [0, 1) (eq. 33.10). At the first rejection, at i, the next
    token is drawn from [p_i - q_i]_+ over its own sum (eq. 33.12); when all are kept it is the bonus, from the last row
    of p. By eq. 33.13 at each position and induction on the prefix, the tokens follow p.

    A draft id below 0 says that nothing was proposed: the position rejects, and the next token comes from p_i. An id of
    V or more was drawn from mass that q_i has outside the target's vocabulary, where p is 0: it is rejected, with the
    usual residual. A q_i that is not finite rejects, draws from p_i, and is flagged.

    Args:
      key: a typed key, or keys [B], one per row; a row's draws depend on its own key only (a single key is folded with
        the row's index). Not read with `uniforms`, and may be None then.
      draft_tokens: x [B, D] integers; D may be 0, which is plain sampling.
      draft_probs: q [B, D, V], the full distributions that the drafts were actually drawn from.
      target_probs: p [B, D+1, V], row i given the drafts before i, row D given all of them.
      uniforms: (accept [B, D], final [B]) in [0, 1), in place of the key: the coins, and the draw of the next token
        (the first x with cumsum(r)[x] > u sum(r) and r[x] > 0).
      checked: check that p and q are distributions, see `check_distributions`.

    Returns:
      The verdict.

    Raises:
      ValueError: shapes or dtypes that do not fit, neither key nor uniforms, or a failed check.
      NotImplementedError: a key of another generator than threefry2x32.

    Source: chapter 33.5, 33.6; Leviathan, Kalman and Matias 2022.
    """
    draft_tokens, target_probs, sizes = _drafts(draft_tokens, target_probs)
    draft_probs = checks.array("draft_probs", draft_probs)
    checks.shape("draft_probs", draft_probs, "B D V", sizes)
    checks.floating("draft_probs", draft_probs)
    if checked:
        check_distributions("draft_probs", draft_probs)
        check_distributions("target_probs", target_probs)
    batch, draft_length = draft_tokens.shape
    if uniforms is None:
        coins, final = _uniforms(key, batch, COINS, (draft_length,)), _uniforms(key, batch, FINAL, ())
    else:
        coins, final = (checks.array("uniforms", each) for each in uniforms)
        checks.shape("uniforms[0]", coins, "B D", sizes)
        checks.shape("uniforms[1]", final, "B", sizes)
    dtype = working_dtype(draft_probs, target_probs, coins, final)
    arrays = (array.astype(dtype) for array in (draft_probs, target_probs, coins, final))
    return _chain_rows(draft_tokens, *arrays)


def verify_match(
    key: Array | None,
    draft_tokens: ArrayLike,
    target_probs: ArrayLike,
    *,
    uniforms: ArrayLike | None = None,
    checked: bool = False,
) -> Verdict:
    """The target samples its own token at every row; drafts are kept while they equal it.

    What comes out are the target's own samples, so their law is p for any drafts, even from an unknown or adaptive
    source, provided that the draws here are independent of them. Acceptance is sum_x p(x) q(x), at most that of the
    chain rule, and equal to it for a drafter that puts all its mass on one token.

    Args:
      key: as in `verify_chain`.
      draft_tokens: x [B, D] integers; an id outside [0, V) equals no sample and is rejected.
      target_probs: p [B, D+1, V], row i given the drafts before i.
      uniforms: [B, D+1] in [0, 1), in place of the key: one draw per row of p.
      checked: as in `verify_chain`.

    Returns:
      The verdict.

    Raises:
      ValueError: as in `verify_chain`.
      NotImplementedError: likewise.

    Source: chapter 33.6 (verification in order), without eq. 33.10.
    """
    draft_tokens, target_probs, sizes = _drafts(draft_tokens, target_probs)
    if checked:
        check_distributions("target_probs", target_probs)
    batch, draft_length = draft_tokens.shape
    if uniforms is None:
        uniforms = _uniforms(key, batch, OWN, (draft_length + 1,))
    draws = checks.array("uniforms", uniforms)
    checks.shape("uniforms", draws, "B D+1", sizes)
    dtype = working_dtype(target_probs, draws)
    own = inverse_cdf(target_probs.astype(dtype), draws.astype(dtype))
    return _matching_rows(draft_tokens, own, target_probs)


def verify_greedy(draft_tokens: ArrayLike, target_probs: ArrayLike) -> Verdict:
    """Drafts are kept while they equal the target's most probable token: for temperature 0 only.

    This reproduces the greedy path of the target. It is no proof about sampling: at a temperature above 0 its output
    is not distributed as p.

    Args:
      draft_tokens: x [B, D] integers.
      target_probs: p [B, D+1, V], row i given the drafts before i. Ties go to the lower id.

    Returns:
      The verdict.

    Raises:
      ValueError: shapes or dtypes that do not fit.

    Source: chapter 33.7, footnote 1.
    """
    draft_tokens, target_probs, _ = _drafts(draft_tokens, target_probs)
    own = jnp.argmax(target_probs, axis=-1).astype(jnp.int32)
    return _matching_rows(draft_tokens, own, target_probs)


def _chain_row(
    tokens: Int[Array, " D"],
    q: Float[Array, "D V"],
    p: Float[Array, "D+1 V"],
    coins: Float[Array, " D"],
    final: Float[Array, ""],
) -> Verdict:
    proposed = tokens >= 0
    finite = jnp.isfinite(q).all(axis=-1)
    q = jnp.where((proposed & finite)[:, None], q, 0)
    keep = (coins * _at(q, tokens) < _at(p[:-1], tokens)) & proposed & finite & (tokens < p.shape[-1])
    verdict = _verdict(keep, proposed, _usable(p))
    rejected = verdict.num_accepted
    # Past the last draft nothing was proposed, q is 0, and the residual is p itself: the bonus.
    weights = residual_weights(p[rejected], jnp.pad(q, ((0, 1), (0, 0)))[rejected])
    broken = jnp.pad(proposed & ~finite, (0, 1))[rejected]
    return dataclasses.replace(
        verdict,
        next_token=jnp.where(verdict.target_flagged, NO_TOKEN, inverse_cdf(weights, final)),
        draft_flagged=broken,
    )


def _matching_row(tokens: Int[Array, " D"], own: Int[Array, " D+1"], p: Float[Array, "D+1 V"]) -> Verdict:
    verdict = _verdict(tokens == own[:-1].astype(tokens.dtype), tokens >= 0, _usable(p))
    next_token = jnp.where(verdict.target_flagged, NO_TOKEN, own[verdict.num_accepted])
    return dataclasses.replace(verdict, next_token=next_token)


# Compiled as units, so that a call outside jit is one dispatch.
_chain_rows = jax.jit(jax.vmap(_chain_row))
_matching_rows = jax.jit(jax.vmap(_matching_row))


def _verdict(keep: Bool[Array, " D"], proposed: Bool[Array, " D"], usable: Bool[Array, " D+1"]) -> Verdict:
    """What follows from which drafts would be kept; `next_token` is still to come."""
    accepted = jnp.cumprod((keep & usable[:-1]).astype(jnp.int32)).astype(bool)
    num_accepted = accepted.sum(dtype=jnp.int32)
    reached = jnp.arange(keep.shape[0], dtype=jnp.int32) <= num_accepted
    return Verdict(
        num_accepted=num_accepted,
        next_token=jnp.int32(NO_TOKEN),
        tested=reached & proposed & usable[:-1],
        accepted=accepted,
        draft_flagged=jnp.bool_(False),
        target_flagged=~usable[num_accepted],
    )


def _usable(p: Float[Array, "R V"]) -> Bool[Array, " R"]:
    return jnp.isfinite(p).all(axis=-1) & (p != 0).any(axis=-1)


def _at(probs: Float[Array, "D V"], tokens: Int[Array, " D"]) -> Float[Array, " D"]:
    """probs[i, tokens[i]]; what comes of an id outside the vocabulary is not used."""
    ids = jnp.clip(tokens, 0, probs.shape[-1] - 1)
    return jnp.take_along_axis(probs, ids[:, None], axis=-1)[:, 0]


def _drafts(draft_tokens: ArrayLike, target_probs: ArrayLike) -> tuple[Array, Array, dict[str, int]]:
    """Both as arrays whose shapes and dtypes fit, and their sizes."""
    tokens, probs = checks.array("draft_tokens", draft_tokens), checks.array("target_probs", target_probs)
    sizes = checks.shape("draft_tokens", tokens, "B D")
    sizes["D+1"] = sizes["D"] + 1
    checks.integer("draft_tokens", tokens)
    checks.floating("target_probs", probs)
    return tokens, probs, checks.shape("target_probs", probs, "B D+1 V", sizes)


def _uniforms(key: Array | None, batch: int, use: int, shape: tuple[int, ...]) -> Array:
    """Uniforms [B, *shape] in [0, 1) for one use, each row's from its own key."""
    if key is None:
        raise checks.fail("key", "a typed key, or uniforms in its place", None)
    return jax.vmap(lambda row: jax.random.uniform(row, shape, jnp.float32))(fold(row_keys(key, batch), use))
