"""What generation needs of a model, and what it says when a part of it is no function."""

from typing import Any

import jax.numpy as jnp
import pytest

from flashspec.language_model import LanguageModel


def apply(params: Any, tokens: Any, cache: Any) -> Any:
    """Logits of the token read, one-hot; the cache only counts."""
    return jnp.eye(3)[tokens], {"length": cache["length"] + tokens.shape[1]}


def init_cache(batch: int, capacity: int) -> Any:
    return {"length": jnp.zeros(batch, jnp.int32)}


@pytest.mark.parametrize("name", ["apply", "init_cache", "prefill", "rollback"])
def test_a_part_that_is_no_function_is_refused_by_name(name: str) -> None:
    parts: dict[str, Any] = {"apply": apply, "init_cache": init_cache, "vocab_size": 3}
    LanguageModel(**parts)
    with pytest.raises(ValueError, match=f"`{name}`: expected a function"):
        LanguageModel(**{**parts, name: 3})


def test_filling_without_a_prefill_leaves_the_lengths_that_are_valid() -> None:
    model = LanguageModel(apply, init_cache, 3)
    cache = model.fill(None, jnp.array([[0, 1, 2], [2, 1, 0]]), jnp.array([3, 1], jnp.int32), 8)
    assert cache["length"].tolist() == [3, 1]
    unrolled = apply(None, jnp.zeros((2, 3), jnp.int32), init_cache(2, 8))[1]
    assert unrolled["length"].tolist() != [3, 1]


def test_logits_of_another_shape_are_refused() -> None:
    model = LanguageModel(lambda *_: (jnp.zeros((1, 2, 4)), {}), init_cache, 3)
    with pytest.raises(ValueError, match=r"model\.apply.*\[1, 2, 3\].*\[1, 2, 4\]"):
        model.logits(None, jnp.zeros((1, 2), jnp.int32), {})
