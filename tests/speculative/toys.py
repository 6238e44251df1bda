"""Random tables over the models of `tests.table_models`, which read the whole history from their caches."""

import dataclasses

import jax
import numpy as np

from flashspec.cache import paged_cache
from flashspec.language_model import LanguageModel
from tests.table_models import PAGE, ROWS, TableModel, history

LEFT = 3


def table(seed: int, vocab: int = 3) -> jax.Array:
    """Random logits [ROWS, vocab]: the parameters of a toy."""
    return 1.5 * jax.random.normal(jax.random.key(seed), (ROWS, vocab))


def toy(cache: str = "tokens", vocab: int = 3) -> TableModel:
    """A toy and its twin, of a window of LEFT on a window cache; its own table is not used."""
    return history(np.full((ROWS, vocab), 1 / vocab), cache, LEFT if cache == "window" else None)


def model(cache: str = "tokens", vocab: int = 3) -> LanguageModel:
    """What the library is given of a toy."""
    return toy(cache, vocab).model


def short_of_pages(pages: int) -> LanguageModel:
    """The paged toy with a pool of `pages` for all rows."""

    def init_cache(batch: int, capacity: int) -> object:
        return paged_cache(PAGE, pages, layers=2, batch=batch, K=1, H=3, Hv=1, capacity=capacity)

    return dataclasses.replace(model("paged"), init_cache=init_cache)
