"""The table models agree with their twins, in any split into forwards, on every cache; `exact_law` is a law."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.table_models import ROWS, Rules, bigram, exact_law, history, log, random_laws

LAWS = random_laws(0, ROWS, 3, 4)
MODELS = {
    "bigram": bigram(LAWS[:3]),
    "tokens": history(LAWS),
    "tokens, window": history(LAWS, left=2),
    "dense": history(LAWS, "dense"),
    "window": history(LAWS, "window", left=2, draft_length=3),
    "paged": history(LAWS, "paged"),
}
SEQUENCES = np.array(list(itertools.product(range(3), repeat=4)))


def logits_in_steps(table_model, tokens, sizes, capacity=6):
    cache, steps, start = table_model.model.init_cache(len(tokens), capacity), [], 0
    for size in sizes:
        chunk = jnp.asarray(tokens[:, start : start + size], jnp.int32)
        logits, cache = jax.jit(table_model.model.apply)(table_model.params, chunk, cache)
        steps.append(np.asarray(logits))
        start += size
    return np.concatenate(steps, 1), cache


def assert_twin(table_model, tokens, logits):
    for row, sequence in enumerate(tokens):
        twin = [table_model.logits(sequence[: i + 1]) for i in range(len(sequence))]
        np.testing.assert_allclose(logits[row], twin, rtol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 1, 1)], ids=str)
def test_models_are_their_twins(name, sizes):
    logits, cache = logits_in_steps(MODELS[name], SEQUENCES, sizes)
    assert_twin(MODELS[name], SEQUENCES, logits)
    held = MODELS[name].held(cache)
    assert ((held[:, : held.shape[1]] == -1) | (held == np.pad(SEQUENCES, ((0, 0), (0, 9)))[:, : held.shape[1]])).all()
    assert cache.length.tolist() == [4] * len(SEQUENCES)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "bigram"])
def test_a_rollback_forgets_and_a_kept_token_shows(name):
    model = MODELS[name].model
    _, cache = logits_in_steps(MODELS[name], SEQUENCES, (2, 1))
    again = jnp.asarray(SEQUENCES[:, 3:], jnp.int32)
    shorter = model.rollback(cache, jnp.full(len(SEQUENCES), 2, jnp.int32))
    rolled, _ = jax.jit(model.apply)(MODELS[name].params, again, shorter)
    assert_twin_at_end(MODELS[name], SEQUENCES[:, [0, 1, 3]], rolled)
    kept, _ = jax.jit(model.apply)(MODELS[name].params, again, cache)
    with pytest.raises(AssertionError):
        assert_twin_at_end(MODELS[name], SEQUENCES[:, [0, 1, 3]], kept)


def assert_twin_at_end(table_model, tokens, logits):
    np.testing.assert_allclose(np.asarray(logits)[:, -1], [table_model.logits(row) for row in tokens], rtol=1e-6)


def test_exact_law_of_the_chapter_of_stale_keys():
    model = bigram(np.array([[3 / 4, 1 / 4], [1 / 4, 3 / 4]]))
    law = exact_law(model, [0], Rules(max_new=2))
    np.testing.assert_allclose(
        [law[s] for s in itertools.product(range(2), repeat=2)], [9 / 16, 3 / 16, 1 / 16, 3 / 16]
    )


def test_exact_law_obeys_stop_tokens_and_minimum():
    model = bigram(np.full((2, 2), 1 / 2))
    assert exact_law(model, [0], Rules(max_new=2, stop=(1,))) == {(1,): 1 / 2, (0, 0): 1 / 4, (0, 1): 1 / 4}
    assert exact_law(model, [0], Rules(max_new=2, stop=(1,), min_new=1)) == {(0, 0): 1 / 2, (0, 1): 1 / 2}


def test_exact_law_obeys_temperature_bias_and_processor():
    model = bigram(np.full((2, 2), 1 / 2))
    biased = exact_law(model, [0], Rules(max_new=1, bias=(0.0, np.log(3))))
    np.testing.assert_allclose([biased[0,], biased[1,]], [1 / 4, 3 / 4])
    warm = exact_law(model, [0], Rules(max_new=1, bias=(0.0, np.log(9)), temperature=2.0))
    np.testing.assert_allclose([warm[0,], warm[1,]], [1 / 4, 3 / 4])
    assert exact_law(model, [0], Rules(max_new=2, temperature=0.0)) == {(0, 0): 1.0}
    flipping = Rules(max_new=2, processor=lambda logits, prefix: log(np.eye(2)[1 - prefix[-1]]))
    assert exact_law(model, [0], flipping) == {(1, 0): 1.0}


def test_random_laws_leave_something_besides_the_stop_token():
    assert (random_laws(0, 200, 2, 2, stop=1)[:, 1] < 1).all()
    assert (random_laws(0, 200, 2, 2)[:, 1] == 1).any()
