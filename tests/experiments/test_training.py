"""The training loop and the measures of the pair, on problems with known answers."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import pair_metrics
from experiments.corpus import Document
from experiments.train_pair import pick_prompts
from experiments.training import Recipe, learning_rate, sample_windows, train

RECIPE = Recipe(batch=4, context=3, rate=0.1, weight_decay=0.0, max_steps=300, minutes=1.0, steps_per_call=50)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """optax counts its steps in integers and corrects moments by them as floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def unigram_loss(params: Any, _: Any, tokens: jax.Array, key: jax.Array, progress: jax.Array) -> jax.Array:
    return pair_metrics.token_losses(jnp.broadcast_to(params, (*tokens.shape, 3)), tokens).mean()


def test_training_finds_the_frequencies(standard_promotion: None) -> None:
    stream = jnp.asarray(np.tile([0, 0, 0, 1, 1, 2], 20).astype(np.uint16))
    lines: list[str] = []
    params, curve = train(
        unigram_loss, jnp.zeros(3), None, stream, RECIPE, jax.random.key(0),
        validate=lambda params: float(params[0]), report=lines.append,
    )  # fmt: skip
    np.testing.assert_allclose(jax.nn.softmax(params), [1 / 2, 1 / 3, 1 / 6], atol=0.05)
    assert curve[-1].step == 300
    assert curve[-1].validation == float(params[0])
    assert len(lines) == 1 + len(curve)


def test_training_ends_on_time(standard_promotion: None) -> None:
    stream = jnp.zeros(50, jnp.uint16)
    hurried = Recipe(batch=4, context=3, rate=0.1, weight_decay=0.0, max_steps=10**9, minutes=0.02, steps_per_call=50)
    _, curve = train(
        unigram_loss, jnp.zeros(3), None, stream, hurried, jax.random.key(0),
        validate=lambda params: 0.0, report=lambda line: None,
    )  # fmt: skip
    assert 50 <= curve[-1].step < 10**9


def test_the_rate_warms_up_and_comes_down() -> None:
    total = jnp.float32(1000)
    rates = [float(learning_rate(RECIPE, jnp.int32(step), total)) for step in (0, 99, 500, 1000, 2000)]
    assert rates[0] < 0.01 * RECIPE.rate * 1.01
    assert rates[1] > 0.97 * RECIPE.rate
    assert rates[1] > rates[2] > rates[3] == pytest.approx(0.02 * RECIPE.rate)
    assert rates[4] == rates[3]


def test_windows_are_pieces_of_the_stream() -> None:
    windows = np.asarray(sample_windows(jax.random.key(0), jnp.arange(20, dtype=jnp.uint16), 200, 5))
    np.testing.assert_array_equal(np.diff(windows, axis=1), 1)
    assert (windows.min(), windows.max()) == (0, 19)


def test_windows_for_evaluation_are_disjoint() -> None:
    windows = pair_metrics.windows_of(np.arange(103), 10, 4)
    assert windows.shape == (4, 10)
    assert len(set(windows.ravel().tolist())) == 40


def test_survival_along_the_target_s_text_is_that_of_drafts() -> None:
    """E_{x ~ p} prod min(1, q/p) over all texts equals the probability that drafts from q are accepted."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(3), 2), rng.dirichlet(np.ones(3), 2)
    texts = np.array(list(itertools.product(range(3), repeat=2)))
    weights = np.array([p[0, a] * p[1, b] for a, b in texts])
    ratio = np.array([[min(1, q[0, a] / p[0, a]), min(1, q[1, b] / p[1, b])] for a, b in texts])
    rows = np.repeat(ratio, np.round(weights * 200_000).astype(int), axis=0)
    overlap = np.minimum(p, q).sum(-1)
    np.testing.assert_allclose(pair_metrics.survival(rows, 2)[1], overlap[0] * overlap[1], atol=1e-3)
    assert abs(pair_metrics.survival(1 / np.maximum(rows, 1e-9), 2)[1] - overlap[0] * overlap[1]) > 0.1


def test_survival_starts_at_every_position() -> None:
    assert pair_metrics.survival(np.array([[1.0, 0.5, 0.5]]), 2) == [0.75, 0.375]


def test_token_losses() -> None:
    logits = jnp.log(jnp.array([[[0.2, 0.3, 0.5]]]))
    got = pair_metrics.token_losses(logits, jnp.array([[1]]))
    np.testing.assert_allclose(np.asarray(got), [[-np.log(0.3)]], rtol=1e-6)


def test_prompts_prefer_the_library_to_its_tests() -> None:
    text = "# " + "x" * 120 + "\ndef f():\n    pass\n"
    documents = (Document("test/a.py", text), Document("b.py", text + "1"), Document("c.py", "no signature"))
    prompts = pick_prompts(documents)
    assert [prompt["file"] for prompt in prompts] == ["b.py", "test/a.py"]
    assert prompts[0]["text"].endswith("def f():\n")
