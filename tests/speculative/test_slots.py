"""Requests that come and go: their tokens depend neither on the slot, nor on neighbours, nor on what ran before."""

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.cache import append, dense_cache, paged_cache, replace_rows, rows
from flashspec.sampling import SamplingParams
from flashspec.speculative import LENGTH, RUNNING, ModelDrafter, admit, init_state, round_step, run, slots, vacant
from flashspec.speculative.state import State
from tests.mutants import mutant
from tests.speculative import toys

WIDTH, BUDGET, DRAFTS = 4, 8, 2
step, finish = jax.jit(round_step), jax.jit(run)


class Request(NamedTuple):
    prompt: tuple[int, ...]
    temperature: float
    budget: int


REQUESTS = [
    Request((0, 1, 2, 0), 1.0, 8),
    Request((1,), 0.0, 3),
    Request((2, 2), 0.7, 6),
    Request((0, 2, 1), 2.0, 5),
    Request((1, 1), 1.0, 4),
]


def prefilled(cache: str, drafts: int, requests: list[tuple[int, Request]]) -> State:
    """Requests as rows of their own, keyed by their numbers."""
    model = toys.model(cache)
    prompts = np.zeros((len(requests), WIDTH), np.int32)
    for row, (_, request) in enumerate(requests):
        prompts[row, : len(request.prompt)] = request.prompt
    lengths = np.array([len(request.prompt) for _, request in requests], np.int32)
    filled = np.zeros(len(requests))
    state = init_state(
        jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.array([number for number, _ in requests])),
        model,
        toys.table(1),
        prompts,
        lengths,
        drafter=ModelDrafter(model, toys.table(2)) if drafts else None,
        draft_length=max(drafts, 1),
        sampling=SamplingParams(np.array([r.temperature for _, r in requests]), filled.astype(int), filled + 1, filled),
        max_new_tokens=BUDGET,
    )
    limits = lengths + np.array([request.budget for _, request in requests], np.int32)
    return dataclasses.replace(state, settings=dataclasses.replace(state.settings, max_lengths=jnp.asarray(limits)))


def alone(cache: str, drafts: int) -> list[list[int]]:
    """Every request in a batch of one."""
    ends = (finish(prefilled(cache, drafts, [numbered])) for numbered in enumerate(REQUESTS))
    return [row_of(end, 0) for end in ends]


def row_of(state: State, slot: int) -> list[int]:
    assert int(state.finish_reason[slot]) == LENGTH
    return np.asarray(state.tokens)[slot, : int(state.lengths[slot])].tolist()


def queued(cache: str, drafts: int, order: tuple[int, ...], module: ModuleType = slots) -> list[list[int]]:
    """Two slots; whenever one is free, the next request of the order goes into it. Slot 5 does not exist."""
    state = vacant(prefilled(cache, drafts, [(90, REQUESTS[0]), (91, REQUESTS[0])]))
    in_slot: list[int | None] = [None, None]
    waiting, done = list(order), {}
    put = jax.jit(module.admit)
    while waiting or any(number is not None for number in in_slot):
        for slot, number in enumerate(in_slot):
            if number is not None and int(state.finish_reason[slot]) != RUNNING:
                done[number], in_slot[slot] = row_of(state, slot), None
            if in_slot[slot] is None and waiting:
                following = in_slot[slot] = waiting.pop(0)
                pair = [(following, REQUESTS[following]), (92, REQUESTS[0])]
                state = put(state, np.array([slot, 5]), prefilled(cache, drafts, pair))
        state, _ = step(state)
    return [done[number] for number in range(len(REQUESTS))]


@pytest.mark.parametrize(
    ("cache", "drafts"),
    [
        ("paged", DRAFTS),
        *(pytest.param(cache, DRAFTS, marks=pytest.mark.slow) for cache in ("tokens", "dense", "window")),
        pytest.param("dense", 0, marks=pytest.mark.slow),
    ],
)
def test_tokens_depend_on_the_request_alone(cache: str, drafts: int) -> None:
    want = alone(cache, drafts)
    for order in ((0, 1, 2, 3, 4), (3, 4, 0, 2, 1)):
        assert queued(cache, drafts, order) == want


WRONG = [
    ('"max_lengths", "keys")', '"max_lengths")'),  # draws of the slot
    ('"finish_reason", "counter")', '"finish_reason")'),  # draws of as many rounds as the slot has run
    ('_CACHES = ("target_cache", "draft_cache")', '_CACHES = ("draft_cache",)'),  # keys of the row before
    ('_LIMITS = ("prompt_lengths", "min_lengths", "max_lengths"', '_LIMITS = ("prompt_lengths", "min_lengths"'),
    ("written[field.name] = set_rows(held, slots, given)", "written[field.name] = held"),  # the slot's temperature
]


@pytest.mark.parametrize("edit", WRONG)
def test_a_row_that_keeps_something_of_its_slot_is_seen(edit: tuple[str, str]) -> None:
    assert queued("paged", DRAFTS, (3, 4, 0, 2, 1), mutant(slots, edit)) != alone("paged", DRAFTS)


def test_pages_of_another_row_are_seen() -> None:
    wrong = mutant(rows, ("y.at[source].get", "y.at[source ^ 1].get"))
    module = mutant(slots, replace_rows=wrong.replace_rows)
    assert queued("paged", DRAFTS, (3, 4, 0, 2, 1), module) != alone("paged", DRAFTS)


def test_a_pool_without_room_flags_the_row() -> None:
    def holding(pages: int, counts: list[int]) -> Any:
        cache = paged_cache(2, pages, layers=1, batch=len(counts), K=1, H=1, capacity=4)
        new = jnp.ones((len(counts), 4, 1, 1), jnp.float32)
        return append(cache, 0, new, new, jnp.array(counts, jnp.int32))

    for pages, lost in ((3, True), (4, False)):
        replaced = jax.jit(lambda: replace_rows(holding(pages, [4, 2]), np.array([1]), holding(2, [3])))()  # noqa: B023
        np.testing.assert_array_equal(replaced.overflow, [False, lost])
        np.testing.assert_array_equal(replaced.length, [4, 3])


def test_what_does_not_fit_is_refused() -> None:
    state = prefilled("dense", DRAFTS, [(0, REQUESTS[0]), (1, REQUESTS[1])])
    with pytest.raises(ValueError, match="`rows`: expected the draft_length of `state`"):
        admit(state, np.array([0, 1]), prefilled("dense", 0, [(0, REQUESTS[0]), (1, REQUESTS[1])]))
    shared = dataclasses.replace(state.settings, sampling=SamplingParams())
    with pytest.raises(ValueError, match=r"`state.settings.sampling.temperature`: expected one value for each of 2"):
        admit(dataclasses.replace(state, settings=shared), np.array([0, 1]), state)
    with pytest.raises(ValueError, match="`rows`: expected tokens of width"):
        admit(state, np.array([0, 1]), dataclasses.replace(state, tokens=state.tokens[:, 1:]))
    caches = [dense_cache(1, 2, capacity, 1, 2) for capacity in (8, 16)]
    with pytest.raises(ValueError, match=r"`rows`: expected float32 \[1, 8, 1, 2\]"):
        replace_rows(caches[0], np.array([0]), caches[1])
    user = [{"a": jnp.zeros((size, 3)), "length": jnp.zeros(size + extra)} for size, extra in ((2, 1), (1, 0))]
    with pytest.raises(ValueError, match="`cache`: expected arrays that all lead with the batch"):
        replace_rows(user[0], np.array([0]), user[1])
    with pytest.raises(ValueError, match="`slots`: expected an integer dtype"):
        replace_rows(caches[0], np.array([0.0]), caches[0])
