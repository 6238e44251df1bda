"""Draws by inverse CDF against exact fractions, and that a row's draws are its own."""

from fractions import Fraction
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.sampling import draw, draws, fold, inverse_cdf, row_keys, uniform
from tests.mutants import mutant

WEIGHTS = [[0, 3, 0, 1, 4, 0], [8, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 5], [1, 1, 1, 1, 1, 1], [0, 2, 2, 0, 0, 3]]


def selected(weights: list[int], u: float) -> int:
    """The first x with cumsum(r)[x] > u sum(r) and r[x] > 0, the product rounded once to float32 and the rest exact."""
    product = Fraction(float(np.float32(u) * np.float32(sum(weights))))
    return next(x for x in range(len(weights)) if weights[x] > 0 and sum(weights[: x + 1]) > product)


def breakpoints(weights: list[int]) -> list[float]:
    """Every float32 u at or beside which the selected token changes."""
    edges = [np.float32(sum(weights[:x]) / sum(weights)) for x in range(len(weights) + 1)]
    near = [f(edge) for edge in edges for f in (np.float32, lambda e: np.nextafter(e, np.float32(0), dtype=np.float32))]
    return sorted({float(u) for u in near if 0 <= u < 1})


def assert_selects(module: ModuleType) -> None:
    for weights in WEIGHTS:
        u = breakpoints(weights)
        repeated = jnp.tile(jnp.asarray(weights, jnp.float32), (len(u), 1))
        got = np.asarray(module.inverse_cdf(repeated, jnp.asarray(u, jnp.float32)))
        assert got.tolist() == [selected(weights, x) for x in u]


def test_every_breakpoint_selects_the_right_token() -> None:
    assert_selects(draws)


@pytest.mark.parametrize(
    "edit",
    [
        ("(mass > u", "(mass >= u"),
        ("positive & (mass", "jnp.roll(positive, 1, axis=-1) & (mass"),
        ("mass = jnp.cumsum(weights, axis=-1)", "mass = jnp.cumsum(weights, axis=-1) - weights"),
    ],
)
def test_a_wrong_selection_is_noticed(edit: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        assert_selects(mutant(draws, edit))


def assert_never_without_weight(module: ModuleType) -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((64, 40)).astype(np.float32) * (rng.random((64, 40)) < 0.3)
    weights[:, 7] += np.float32(1e-30)
    # 1 is what a double just below it becomes in float32.
    for u in (0.0, 0.5, 1 - 2**-24, 1.0):
        token = np.asarray(module.inverse_cdf(jnp.asarray(weights), jnp.full((64,), u, jnp.float32)))
        assert (token < 40).all()
        assert (weights[np.arange(64), token] > 0).all()


def test_a_token_without_weight_never_comes() -> None:
    assert_never_without_weight(draws)
    assert int(inverse_cdf(jnp.zeros((4,)), jnp.asarray(0.5))) == 0
    with pytest.raises(AssertionError):
        assert_never_without_weight(mutant(draws, ("jnp.minimum(first, last)", "first")))


def test_weights_of_any_rank_and_float64(x64: None) -> None:
    weights = jnp.asarray(WEIGHTS, jnp.float64)
    u = jnp.full((5,), 0.4, jnp.float32)
    token = inverse_cdf(weights, u)
    assert token.dtype == jnp.int32
    assert np.array_equal(token, [inverse_cdf(w, x) for w, x in zip(weights, u, strict=True)])


# --- keys ---


def assert_rows_are_independent(module: ModuleType) -> None:
    """A row draws the same in any batch, slot and padding, once its key is fixed."""
    probs = jnp.asarray([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2], [0.1, 0.8, 0.1]])
    key = jax.random.key(3)
    wide, narrow = module.row_keys(key, 5), module.row_keys(key, 3)
    assert np.array_equal(module.uniform(wide)[:3], module.uniform(narrow))
    for step in range(4):
        keys = module.fold(narrow, step)
        drawn, u = module.draw(keys, probs), module.uniform(keys)
        for b in range(3):
            assert np.array_equal(module.uniform(keys[b : b + 1]), u[b : b + 1])
            assert np.array_equal(module.draw(keys[b : b + 1], probs[b : b + 1]), drawn[b : b + 1])
        turned = jnp.asarray([2, 0, 1])
        assert np.array_equal(module.draw(keys[turned], probs[turned]), drawn[turned])


def test_a_row_draws_alone_what_it_draws_in_a_batch() -> None:
    assert_rows_are_independent(draws)


@pytest.mark.parametrize(
    "edit",
    [
        (
            "jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(",
            "(lambda k: jax.random.uniform(k[0], k.shape))(",
        ),
        ("(key, jnp.arange(batch,", "(jax.random.fold_in(key, batch), jnp.arange(batch,"),
        ("(key, jnp.arange(batch, dtype=jnp.int32))", "(key, jnp.arange(batch, dtype=jnp.int32)[::-1])"),
    ],
)
def test_draws_that_depend_on_the_batch_are_noticed(edit: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        assert_rows_are_independent(mutant(draws, edit))


def assert_follows_the_law(keys: jax.Array) -> None:
    probs = np.asarray([0.1, 0.2, 0.0, 0.7], np.float32)
    drawn = np.asarray(draw(keys, jnp.tile(jnp.asarray(probs), (keys.size, 1))))
    counts = np.bincount(drawn, minlength=4)
    spread = np.sqrt(keys.size * probs * (1 - probs))
    assert (np.abs(counts - keys.size * probs) <= 5 * spread).all()


def test_draws_follow_the_distribution() -> None:
    key = jax.random.key(0)
    assert_follows_the_law(row_keys(key, 20_000))
    assert_follows_the_law(fold(jnp.broadcast_to(key, (20_000,)), jnp.arange(20_000)))
    with pytest.raises(AssertionError):
        assert_follows_the_law(jnp.broadcast_to(key, (20_000,)))


def test_keys_by_row_are_kept_and_folds_differ() -> None:
    keys = jax.random.split(jax.random.key(1), 3)
    assert np.array_equal(jax.random.key_data(row_keys(keys, 3)), jax.random.key_data(keys))
    folds = [np.asarray(uniform(fold(keys, data))) for data in (0, 1, jnp.asarray([0, 1, 2]))]
    assert np.array_equal(folds[0][0], folds[2][0])
    assert np.array_equal(folds[1][1], folds[2][1])
    assert len(set(np.concatenate(folds[:2]).tolist())) == 6


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (jax.random.PRNGKey(0), ValueError),
        (jnp.zeros((3,)), ValueError),
        (jax.random.split(jax.random.key(0), 2), ValueError),
        (jax.random.split(jax.random.key(0), (3, 1)), ValueError),
        (jax.random.key(0, impl="rbg"), NotImplementedError),
    ],
)
def test_other_keys_are_refused(key: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^`key`: "):
        row_keys(key, 3)
