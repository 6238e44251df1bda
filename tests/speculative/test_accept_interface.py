"""Keys, checked mode, dtypes and refusals of the verification rules."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from flashspec.speculative import accept, formulas
from tests.mutants import mutant
from tests.speculative.exact import quarters

BATCH, DRAFTS, VOCAB = 5, 3, 4


def batch_of(batch=BATCH, seed=0):
    """Random drafts, q and p."""
    rng = np.random.default_rng(seed)
    q, p = rng.dirichlet(np.ones(VOCAB), (batch, DRAFTS)), rng.dirichlet(np.ones(VOCAB), (batch, DRAFTS + 1))
    tokens = rng.integers(0, VOCAB, (batch, DRAFTS))
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(q, jnp.float32), jnp.asarray(p, jnp.float32)


def rule(name):
    """(key, tokens, q, p) -> verdict, for the two rules that draw."""
    chain, match = jax.jit(accept.verify_chain), jax.jit(accept.verify_match)
    return chain if name == "chain" else lambda key, tokens, q, p: match(key, tokens, p)


@pytest.mark.parametrize("name", ["chain", "match"])
def test_a_row_draws_from_its_own_key_alone(name):
    verify, keys = rule(name), jax.random.split(jax.random.key(3), BATCH)
    whole = verify(keys, *batch_of())
    order = np.array([3, 0, 4, 1, 2])
    moved = verify(keys[order], *(array[order] for array in batch_of()))
    chex.assert_trees_all_equal(moved, jax.tree.map(lambda leaf: leaf[order], whole))
    alone = verify(keys[2:3], *(array[2:3] for array in batch_of()))
    chex.assert_trees_all_equal(alone, jax.tree.map(lambda leaf: leaf[2:3], whole))


@pytest.mark.parametrize("name", ["chain", "match"])
def test_rows_of_a_single_key_differ(name):
    tokens, q, p = (jnp.broadcast_to(array[:1], (64, *array.shape[1:])) for array in batch_of())
    verdict = rule(name)(jax.random.key(0), tokens, q, p)
    assert len(np.unique(verdict.next_token)) > 1
    chex.assert_trees_all_equal(verdict, rule(name)(jax.random.key(0), tokens, q, p))
    other = rule(name)(jax.random.key(1), tokens, q, p)
    assert (np.asarray(other.next_token) != np.asarray(verdict.next_token)).any()


ROWS = 200_000
P, Q = np.array([0.1, 0.3, 0.3, 0.3]), np.array([0.7, 0.1, 0.1, 0.1])


def first_tokens(module):
    """First emitted tokens of many keyed rows with one draft each, drafts drawn from Q outside jax."""
    drafts = np.random.default_rng(0).choice(VOCAB, (ROWS, 1), p=Q).astype(np.int32)
    q, p = (jnp.broadcast_to(jnp.asarray(law, jnp.float32), (ROWS, n, VOCAB)) for law, n in ((Q, 1), (P, 2)))
    verdict = jax.jit(module.verify_chain)(jax.random.key(7), jnp.asarray(drafts), q, p)
    return np.where(verdict.num_accepted > 0, drafts[:, 0], verdict.next_token)


def assert_frequencies(tokens):
    counts = np.bincount(tokens, minlength=VOCAB)
    chi_square = ((counts - ROWS * P) ** 2 / (ROWS * P)).sum()
    assert chi_square < 30.7, "the 1 - 1e-6 quantile of chi-square with 3 degrees of freedom"


def test_keyed_draws_have_the_law():
    assert_frequencies(first_tokens(accept))


def test_one_stream_for_coins_and_final_draw_fails():
    # A rejection says that the coin was large, and a draw that reuses it is large too.
    shared = mutant(
        accept,
        ("COINS, FINAL, OWN = 0, 1, 2", "COINS, FINAL, OWN = 0, 0, 2"),
        ("_uniforms(key, batch, FINAL, ())", "_uniforms(key, batch, FINAL, (1,))[:, 0]"),
    )
    with pytest.raises(AssertionError):
        assert_frequencies(first_tokens(shared))


def test_results_have_the_contract_types_in_either_precision():
    tokens, q, p = batch_of()
    for dtype in (jnp.bfloat16, jnp.float32):
        verdict = jax.eval_shape(accept.verify_chain, jax.random.key(0), tokens, q.astype(dtype), p)
        assert verdict.num_accepted.dtype == verdict.next_token.dtype == jnp.int32
        assert verdict.accepted.shape == verdict.tested.shape == (BATCH, DRAFTS)
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(tokens), jnp.int64), *(array.astype(jnp.float64) for array in (q, p)))
        for verdict in (
            jax.eval_shape(accept.verify_chain, jax.random.key(0), *wide),
            jax.eval_shape(accept.verify_match, jax.random.key(0), wide[0], wide[2]),
            jax.eval_shape(accept.verify_greedy, wide[0], wide[2]),
        ):
            assert verdict.num_accepted.dtype == verdict.next_token.dtype == jnp.int32


def test_a_float64_uniform_just_below_one_is_not_rounded_to_one():
    with jax.enable_x64(True):
        p = jnp.full((1, 2, 2), 0.5, jnp.float32)
        below_one = jnp.full((1, 1), 1 - 2.0**-53)
        verdict = accept.verify_chain(
            None, jnp.zeros((1, 1), jnp.int32), p[:, :1], p, uniforms=(below_one, below_one[:, 0])
        )
        assert verdict.num_accepted == 1, "p = q never rejects"
    assert np.float32(1 - 2.0**-53) == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"draft_tokens": jnp.zeros((BATCH, DRAFTS))}, "draft_tokens"),
        ({"draft_tokens": jnp.zeros(BATCH, jnp.int32)}, "draft_tokens"),
        ({"draft_probs": jnp.zeros((BATCH, DRAFTS + 1, VOCAB))}, "draft_probs"),
        ({"draft_probs": jnp.zeros((BATCH, DRAFTS, VOCAB), jnp.int32)}, "draft_probs"),
        ({"target_probs": jnp.zeros((BATCH, DRAFTS, VOCAB))}, "target_probs"),
        ({"target_probs": jnp.zeros((BATCH, DRAFTS + 1, VOCAB + 1))}, "draft_probs"),
        ({"uniforms": (jnp.zeros((BATCH, DRAFTS + 1)), jnp.zeros(BATCH))}, r"uniforms\[0\]"),
        ({"uniforms": (jnp.zeros((BATCH, DRAFTS)), jnp.zeros((BATCH, 1)))}, r"uniforms\[1\]"),
        ({"key": None}, "key"),
        ({"key": jax.random.split(jax.random.key(0), BATCH + 1)}, "key"),
    ],
)
def test_chain_refuses(change, name):
    arguments = dict(zip(("draft_tokens", "draft_probs", "target_probs"), batch_of(), strict=True))
    with pytest.raises(ValueError, match=f"`{name}`"):
        accept.verify_chain(**({"key": jax.random.key(0)} | arguments | change))


def test_match_and_greedy_refuse():
    tokens, _, p = batch_of()
    with pytest.raises(ValueError, match="`uniforms`"):
        accept.verify_match(None, tokens, p, uniforms=jnp.zeros((BATCH, DRAFTS)))
    with pytest.raises(ValueError, match="`key`"):
        accept.verify_match(None, tokens, p)
    with pytest.raises(ValueError, match="`target_probs`"):
        accept.verify_greedy(tokens, p[:, 1:])


BAD_PROBS = {
    "negative": np.array([1.5, -0.5, 0.0, 0.0]),
    "sum too small": np.array([0.5, 0.4, 0.0, 0.0]),
    "NaN": np.array([np.nan, 0.5, 0.5, 0.0]),
}


@pytest.mark.parametrize("bad", BAD_PROBS)
def test_checked_mode_refuses_concrete_probabilities(bad):
    tokens, q, p = batch_of()
    key = jax.random.key(0)
    broken_q, broken_p = q.at[1, 2].set(BAD_PROBS[bad]), p.at[1, 2].set(BAD_PROBS[bad])
    with pytest.raises(ValueError, match="`draft_probs`: expected rows that are nonnegative and sum to 1"):
        accept.verify_chain(key, tokens, broken_q, p, checked=True)
    with pytest.raises(ValueError, match="`target_probs`"):
        accept.verify_chain(key, tokens, q, broken_p, checked=True)
    with pytest.raises(ValueError, match="`target_probs`"):
        accept.verify_match(key, tokens, broken_p, checked=True)
    accept.verify_chain(key, tokens, q, p, checked=True)


@pytest.mark.parametrize("bad", BAD_PROBS)
def test_checked_mode_reports_traced_probabilities(bad):
    tokens, q, p = batch_of()
    assert checked_chain(tokens, q, p)[0].get() is None
    error, _ = checked_chain(tokens, q.at[1, 2].set(BAD_PROBS[bad]), p)
    with pytest.raises(checkify.JaxRuntimeError, match="`draft_probs`"):
        error.throw()


@jax.jit
@checkify.checkify
def checked_chain(tokens, q, p):
    return accept.verify_chain(jax.random.key(0), tokens, q, p, checked=True)


def test_check_distributions_allows_rounding_and_no_rows():
    formulas.check_distributions("probs", jnp.full((2, 3000), 1 / 3000, jnp.float32))
    formulas.check_distributions("probs", jnp.zeros((2, 0, 3)))
    formulas.check_distributions("probs", jnp.asarray(quarters(0, 3, 1).target[1]))


def test_numpy_arrays_are_taken_as_they_are():
    tokens, q, p = batch_of()
    rng = np.random.default_rng(3)
    uniforms = rng.random((BATCH, DRAFTS)), rng.random(BATCH)
    whole, host = tuple(map(jnp.asarray, uniforms)), [np.asarray(array) for array in (tokens, q, p)]
    chex.assert_trees_all_equal(
        accept.verify_chain(None, *host, uniforms=uniforms), accept.verify_chain(None, tokens, q, p, uniforms=whole)
    )
    own = rng.random((BATCH, DRAFTS + 1))
    chex.assert_trees_all_equal(
        accept.verify_match(None, host[0].astype(np.int64), host[2], uniforms=own),
        accept.verify_match(None, tokens, p, uniforms=jnp.asarray(own)),
    )
    chex.assert_trees_all_equal(accept.verify_greedy(host[0], host[2]), accept.verify_greedy(tokens, p))
    for formula in (accept.acceptance_rate, accept.acceptance_probability, accept.output_law):
        chex.assert_trees_all_equal(formula(host[2][:, :-1], host[1]), formula(p[:, :-1], q))
