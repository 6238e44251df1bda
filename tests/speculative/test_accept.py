"""The verification rules keep the target's law exactly, and each wrong rule that one might write does not."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashspec.speculative import accept, formulas
from tests.mutants import mutant
from tests.speculative.exact import Tables, chain_law, grid, match_law, quarters, target_law

TWELFTHS, TENTHS = grid(12), grid(2520)


def chain(module=accept):
    """The chain rule of `module`, compiled, from (drafts, q, p, accept, final) to (num_accepted, next_token)."""

    @jax.jit
    def verify(drafts, q, p, coins, final):
        verdict = module.verify_chain(None, drafts, q, p, uniforms=(coins, final))
        return verdict.num_accepted, verdict.next_token

    return verify


COMPILED = chain()


def match(module=accept):
    @jax.jit
    def verify(drafts, p, uniforms):
        verdict = module.verify_match(None, drafts, p, uniforms=uniforms)
        return verdict.num_accepted, verdict.next_token

    return verify


def assert_is_target(law, tables):
    np.testing.assert_allclose(law, target_law(tables.target), rtol=0, atol=1e-12)


def assert_chain_keeps_the_law(verify, vocab, draft_length):
    for seed in range(3):
        tables = quarters(seed, vocab, draft_length)
        assert_is_target(chain_law(verify, tables, TWELFTHS), tables)


DRAWN_ONLY = (
    "jnp.pad(q * (jnp.arange(q.shape[1])[None] == tokens[:, None]).astype(q.dtype), ((0, 1), (0, 0)))[rejected]"
)
WRONG = {
    "redraw from p": mutant(accept, residual_weights=lambda p, q: p),
    "redraw from |p - q|": mutant(accept, residual_weights=lambda p, q: jnp.abs(p - q)),
    "inverted ratio": mutant(
        accept, ("coins * _at(q, tokens) < _at(p[:-1], tokens)", "coins * _at(p[:-1], tokens) < _at(q, tokens)")
    ),
    "q of the drawn token only": mutant(accept, ("jnp.pad(q, ((0, 1), (0, 0)))[rejected]", DRAWN_ONLY)),
    "every draft kept": mutant(accept, ("accepted = jnp.cumprod((keep", "accepted = jnp.cumprod((keep | True")),
    "the coin decides the draw": mutant(
        accept, ("inverse_cdf(weights, final)", "inverse_cdf(weights, jnp.append(coins, final)[rejected])")
    ),
}
WRONG_FROM_TWO_DRAFTS = {
    "out of order": mutant(
        accept,
        ("jnp.cumprod((keep & usable[:-1]).astype(jnp.int32)).astype(bool)", "keep & usable[:-1]"),
    ),
    "residual of the next row": mutant(accept, ("residual_weights(p[rejected]", "residual_weights(p[rejected + 1]")),
    "bonus from row D - 1": mutant(
        accept, ("residual_weights(p[rejected]", "residual_weights(p[jnp.minimum(rejected, len(tokens) - 1)]")
    ),
}


@pytest.mark.parametrize("vocab", [2, 3])
@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
def test_chain_keeps_the_law(vocab, draft_length):
    assert_chain_keeps_the_law(COMPILED, vocab, draft_length)


def test_chain_without_drafts_is_plain_sampling():
    tables = quarters(1, 3, 0)._replace(draft=[])
    verify = chain()
    u = jnp.asarray((np.arange(12) + 0.5) / 12, jnp.float32)
    p = jnp.tile(jnp.asarray(tables.target[0], jnp.float32), (12, 1, 1))
    num_accepted, token = verify(jnp.zeros((12, 0), jnp.int32), p[:, :0], p, jnp.zeros((12, 0)), u)
    assert not num_accepted.any()
    np.testing.assert_allclose(np.bincount(token, minlength=3) / 12, tables.target[0])


@pytest.mark.parametrize("name", [*WRONG, *WRONG_FROM_TWO_DRAFTS])
def test_wrong_chain_rules_fail(name):
    verify = chain((WRONG | WRONG_FROM_TWO_DRAFTS)[name])
    with pytest.raises(AssertionError):
        assert_chain_keeps_the_law(verify, vocab=3, draft_length=2)


@pytest.mark.parametrize("vocab", [2, 3])
@pytest.mark.parametrize("draft_length", [1, 2, 3])
def test_match_keeps_the_law(vocab, draft_length):
    verify = match()
    tables = quarters(draft_length, vocab, draft_length)
    assert_is_target(match_law(verify, tables, 4), tables)


@pytest.mark.parametrize(
    "edit",
    [
        ("tokens == own[:-1].astype(tokens.dtype)", "tokens == tokens"),
        ("own[verdict.num_accepted]", "own[jnp.minimum(verdict.num_accepted + 1, len(own) - 1)]"),
        ("own[verdict.num_accepted]", "own[jnp.minimum(verdict.num_accepted, len(own) - 2)]"),
    ],
    ids=["every draft kept", "own token of the next row", "bonus from row D - 1"],
)
def test_wrong_match_rules_fail(edit):
    verify = match(mutant(accept, edit))
    tables = quarters(2, 3, 2)
    with pytest.raises(AssertionError):
        assert_is_target(match_law(verify, tables, 4), tables)


def one_prefix(p, q) -> Tables:
    """Tables with one draft, and a bonus row that no draft was made for."""
    return Tables([np.array(p), np.tile(p, (len(p), 1))], [np.array(q)])


def first_token(law):
    return law.sum(axis=tuple(range(1, law.ndim)))


class Example(NamedTuple):
    p: tuple
    q: tuple
    accept: tuple
    rate: float
    residual: tuple | None
    redrawn: tuple | None


CHAPTER = {
    "example 25.2": Example(
        p=(0.5, 0.3, 0.2), q=(0.2, 0.5, 0.3), accept=(1, 3 / 5, 2 / 3), rate=7 / 10, residual=(1, 0, 0),
        redrawn=(7 / 20, 39 / 100, 13 / 50),
    ),
    "exercise 33.7": Example(
        p=(0.1, 0.6, 0.3), q=(0.5, 0.2, 0.3), accept=(1 / 5, 1, 1), rate=3 / 5, residual=(0, 1, 0),
        redrawn=(7 / 50, 11 / 25, 21 / 50),
    ),
    "exercise 33.8, disjoint": Example(
        p=(0.5, 0.5, 0, 0), q=(0, 0, 0.3, 0.7), accept=(1, 1, 0, 0), rate=0, residual=(0.5, 0.5, 0, 0), redrawn=None
    ),
    "exercise 33.8, equal": Example(
        p=(0.5, 0.3, 0.2), q=(0.5, 0.3, 0.2), accept=(1, 1, 1), rate=1, residual=None, redrawn=None
    ),
    "exercise 33.9": Example(
        p=(4 / 5, 1 / 5), q=(2 / 3, 1 / 3), accept=(1, 3 / 5), rate=13 / 15, residual=(1, 0),
        redrawn=(58 / 75, 17 / 75),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAPTER)
def test_chapter_examples(name):
    row = CHAPTER[name]
    p, q = jnp.asarray(row.p, jnp.float32), jnp.asarray(row.q, jnp.float32)
    assert_close(formulas.acceptance_probability(p, q), row.accept)
    assert_close(formulas.acceptance_rate(p, q), row.rate)
    assert_close(formulas.acceptance_rate(p, q), 1 - np.abs(p - q).sum() / 2)
    assert_close(formulas.output_law(p, q), p)
    if row.residual is not None:
        assert_close(formulas.residual_distribution(p, q), row.residual)
    tables = one_prefix(row.p, row.q)
    assert_is_target(chain_law(COMPILED, tables, TENTHS), tables)


@pytest.mark.parametrize("name", ["example 25.2", "exercise 33.7", "exercise 33.9"])
def test_chapter_examples_of_wrong_rules(name):
    row = CHAPTER[name]
    for rule, law in (("redraw from p", row.redrawn), ("inverted ratio", row.q)):
        wrong = first_token(chain_law(chain(WRONG[rule]), one_prefix(row.p, row.q), TENTHS))
        np.testing.assert_allclose(wrong, law, rtol=0, atol=1e-12)
        with pytest.raises(AssertionError):
            assert_close(wrong, row.p)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_draft_scored_at_another_temperature_fails():
    drawn, scored = (2 / 3, 1 / 3), (4 / 5, 1 / 5)
    tables = one_prefix((4 / 5, 1 / 5), drawn)
    assert_is_target(chain_law(COMPILED, tables, TENTHS), tables)
    wrong = chain_law(COMPILED, tables, TENTHS, reported=[np.array(scored)])
    np.testing.assert_allclose(first_token(wrong), (2 / 3, 1 / 3), rtol=0, atol=1e-12)
    with pytest.raises(AssertionError):
        assert_is_target(wrong, tables)


def test_equal_laws_form_no_quotient():
    p = jnp.asarray([0.5, 0.5, 0.0], jnp.float32)
    with jax.debug_nans(True), jax.debug_infs(True):
        assert formulas.acceptance_rate(p, p) == 1
        assert np.array_equal(formulas.output_law(p, p), p)
        assert np.array_equal(formulas.acceptance_probability(p, p), (1, 1, 0))


LAWS = st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any).map(lambda w: np.array(w) / sum(w))


@given(st.lists(LAWS, min_size=3, max_size=3), st.lists(LAWS, min_size=2, max_size=2))
def test_chain_keeps_random_laws(target, draft):
    def by_depth(laws):
        return [np.broadcast_to(law, (3,) * (depth + 1)) for depth, law in enumerate(laws)]

    tables = Tables(by_depth(target), by_depth(draft))
    with jax.enable_x64(True):
        assert_is_target(chain_law(COMPILED, tables, dtype=jnp.float64), tables)


@given(LAWS, LAWS)
def test_formulas_are_identities(p, q):
    with jax.enable_x64(True):
        p, q = jnp.asarray(p), jnp.asarray(q)
        rate = formulas.acceptance_rate(p, q)
        np.testing.assert_allclose(rate, (q * formulas.acceptance_probability(p, q)).sum(), atol=1e-15)
        np.testing.assert_allclose(formulas.residual_distribution(p, q).sum(), 1, atol=1e-15)
        np.testing.assert_allclose(formulas.output_law(p, q), p, atol=1e-15)


def single(tokens, q, p, coins, final, module=accept):
    """The verdict on one row."""
    arrays = (jnp.asarray(a, jnp.float32)[None] for a in (q, p))
    uniforms = (jnp.asarray(coins, jnp.float32)[None], jnp.asarray([final], jnp.float32))
    return compiled(module)(None, jnp.asarray([tokens], jnp.int32), *arrays, uniforms=uniforms)


@functools.cache
def compiled(module):
    return jax.jit(module.verify_chain)


def assert_falls_back_to_target(module):
    p, q = np.array([0, 0.5, 0.5], np.float32), np.array([0, 0.5 + 2.0**-24, 0.5], np.float32)
    for final in (0.0, 0.25, 0.75, 1 - 2.0**-24):
        verdict = single([1], [q], [p, p], [1 - 2.0**-23], final, module)
        assert verdict.num_accepted == 0, "the product rounds to 1/2 and rejects"
        assert verdict.next_token[0] == (1 if final < 0.5 else 2)


def test_empty_residual_in_float32_draws_from_the_target():
    assert_falls_back_to_target(accept)
    with pytest.raises(AssertionError):
        assert_falls_back_to_target(mutant(accept, residual_weights=lambda p, q: jnp.maximum(p - q, 0)))


def test_coins_at_their_ends():
    half = [0.5, 0.5]
    assert single([0], [[1.0, 0.0]], [half, half], [0.5], 0.0).num_accepted == 0, "u q = p rejects"
    assert single([0], [[1.0, 0.0]], [half, half], [np.nextafter(np.float32(0.5), 0)], 0.0).num_accepted == 1
    assert single([0], [[1.0, 0.0]], [[0.0, 1.0], half], [0.0], 0.0).num_accepted == 0, "p = 0 rejects at u = 0"
    assert single([0], [half], [half, half], [1 - 2.0**-24], 0.0).num_accepted == 1, "p = q never rejects"


def test_masks_follow_the_first_rejection():
    p, q = np.full((4, 2), 0.5), np.array([[1.0, 0.0]] * 3)
    verdict = single([0, 0, 0], q, p, [0.1, 0.9, 0.1], 0.0)
    assert verdict.num_accepted == 1
    assert verdict.accepted.tolist() == [[True, False, False]]
    assert verdict.tested.tolist() == [[True, True, False]]


def test_no_proposal_is_not_tested_and_keeps_the_law():
    p, q = np.array([[0.25, 0.75]] * 2), np.array([[0.75, 0.25]])
    tokens = [int(single([-1], q, p, [0.0], (i + 0.5) / 4).next_token[0]) for i in range(4)]
    assert tokens == [0, 1, 1, 1]
    assert not single([-1], q, p, [0.0], 0.0).tested.any()


def test_drafts_outside_the_vocabulary_keep_the_law():
    # The draft has a third token, which the target lacks, with probability 1/2.
    p, q = np.array([[0.25, 0.75]] * 2), np.array([[0.5, 0.0]])
    inside = [single([0], q, p, [(i + 0.5) / 4], (j + 0.5) / 4) for i in range(4) for j in range(4)]
    outside = [single([2], q, p, [(i + 0.5) / 4], (j + 0.5) / 4) for i in range(4) for j in range(4)]
    assert not any(int(verdict.num_accepted[0]) for verdict in outside)
    first = [0 if verdict.num_accepted[0] else int(verdict.next_token[0]) for verdict in inside + outside]
    np.testing.assert_allclose(np.bincount(first) / len(first), p[0])


def test_broken_draft_row_rejects_draws_from_the_target_and_is_flagged():
    p = np.array([[0.25, 0.75]] * 3)
    for bad in ([np.nan, 0.5], [0.5, np.inf]):
        verdicts = [single([0, 0], [[0.25, 0.75], bad], p, [0.0, 0.0], (i + 0.5) / 4) for i in range(4)]
        assert [int(verdict.num_accepted[0]) for verdict in verdicts] == [1] * 4
        assert [int(verdict.next_token[0]) for verdict in verdicts] == [0, 1, 1, 1]
        assert all(verdict.draft_flagged.all() for verdict in verdicts)
    unused = single([0, 0], [[1.0, 0.0], bad], p, [0.9, 0.0], 0.0)
    assert not unused.draft_flagged.any(), "behind the first rejection nothing is flagged"


@pytest.mark.parametrize("bad", [[np.nan, 0.5], [np.inf, 0.5], [0.0, 0.0]])
def test_broken_target_row_is_flagged_and_never_becomes_a_token(bad):
    good, q = [0.25, 0.75], [[0.25, 0.75]] * 2
    verdict = single([1, 1], q, [good, bad, good], [0.0, 0.0], 0.5)
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (1, accept.NO_TOKEN)
    assert verdict.target_flagged.all()
    assert not single([0, 0], [[1.0, 0.0]] * 2, [good, bad, good], [0.9, 0.0], 0.5).target_flagged.any(), "unused"
    drafts, probs = jnp.asarray([[1, 1]]), jnp.asarray([[good, bad, good]], jnp.float32)
    for other in (
        accept.verify_match(None, drafts, probs, uniforms=jnp.full((1, 3), 0.5)),
        accept.verify_greedy(drafts, probs),
    ):
        assert (other.num_accepted.item(), other.next_token.item()) == (1, accept.NO_TOKEN)
        assert other.target_flagged.all()


def test_greedy_follows_the_first_maximum():
    p = jnp.asarray([[[0.4, 0.4, 0.2], [0.1, 0.2, 0.7], [0.0, 1.0, 0.0]]], jnp.float32)
    for drafts, accepted, token in (([0, 2], 2, 1), ([0, 1], 1, 2), ([1, 2], 0, 0), ([-1, 2], 0, 0)):
        verdict = accept.verify_greedy(jnp.asarray([drafts]), p)
        assert (verdict.num_accepted.item(), verdict.next_token.item()) == (accepted, token)


def test_greedy_is_no_sampling_rule():
    tables = quarters(0, 3, 1)
    with pytest.raises(AssertionError):
        assert_is_target(match_law(lambda x, p, u: greedy_pair(x, p), tables, 4), tables)


@jax.jit
def greedy_pair(drafts, p):
    verdict = accept.verify_greedy(drafts, p)
    return verdict.num_accepted, verdict.next_token
