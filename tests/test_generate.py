"""Generation as users call it: equal to slow decoding, alone or in a batch, resumed, streamed, and never recompiled."""

import dataclasses
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.generate import Generation, generate, generate_stream
from flashspec.language_model import LanguageModel
from flashspec.sampling import SamplingParams
from flashspec.speculative.drafters import ModelDrafter, NgramDrafter, ShallowDrafter
from flashspec.speculative.loop import run
from flashspec.speculative.start import caches_serve, init_state
from flashspec.speculative.state import LENGTH, STOP
from tests.speculative import toys

GREEDY = SamplingParams(temperature=0.0)
PROMPT, LENGTHS = jnp.array([[0, 1, 2, 0], [1, 1, 0, 0]], jnp.int32), jnp.array([4, 2], jnp.int32)
NEW = 10
OWN = toys.model()
TABLE = toys.table(1)
MODEL_DRAFT = ModelDrafter(OWN, toys.table(2))
KEY = jax.random.key(5)


def sample(key: jax.Array = KEY, model: LanguageModel = OWN, **options: Any) -> Generation:
    options = {"table": TABLE, "drafter": MODEL_DRAFT, "draft_length": 3, "max_new_tokens": NEW, **options}
    return generate(key, model, options.pop("table"), PROMPT, LENGTHS, **options)


def slow_logits(row: list[int], cache: str = "tokens") -> np.ndarray:
    """The toy's logits after `row`, without a cache."""
    return np.asarray(toys.table(1), np.float64)[toys.toy(cache).row_of(row)]


def greedy_slowly(cache: str = "tokens", stop: int = -1) -> list[list[int]]:
    rows = [PROMPT[b, : int(LENGTHS[b])].tolist() for b in range(2)]
    for row in rows:
        for _ in range(NEW):
            row.append(int(slow_logits(row, cache).argmax()))
            if row[-1] == stop:
                break
    return rows


def assert_rows(generation: Generation, rows: list[list[int]]) -> None:
    np.testing.assert_array_equal(generation.lengths, [len(row) for row in rows])
    want = np.zeros((2, PROMPT.shape[1] + NEW), np.int32)
    for b, row in enumerate(rows):
        want[b, : len(row)] = row
    np.testing.assert_array_equal(generation.tokens, want)


@pytest.mark.parametrize(
    ("drafter", "rule", "layout"),
    [
        (None, "greedy", "tokens"),
        (MODEL_DRAFT, "chain", "dense"),
        (NgramDrafter(2), "match", "tokens"),
        (ShallowDrafter(OWN, toys.table(2)), "greedy", "paged"),
        (ModelDrafter(toys.model("window"), toys.table(2)), "chain", "tokens"),
        (MODEL_DRAFT, "match", "window"),
    ],
)
def test_greedy_decoding_equals_the_slow_twin(drafter: Any, rule: str, layout: str) -> None:
    generation = sample(model=toys.model(layout), drafter=drafter, rule=rule, sampling=GREEDY)
    assert_rows(generation, greedy_slowly(layout))
    np.testing.assert_array_equal(generation.finish_reason, [LENGTH, LENGTH])
    np.testing.assert_array_equal(generation.logprobs, np.zeros((2, NEW)))
    np.testing.assert_array_equal(generation.info.emitted, [NEW, NEW])
    rounds = np.asarray(generation.info.rounds)
    assert (rounds <= NEW).all()
    assert (rounds * (1 if drafter is None else 4) >= NEW).all()


def test_a_kept_rejected_key_changes_greedy_decoding() -> None:
    def prefill(params: Any, tokens: jax.Array, num_valid: jax.Array, cache: Any) -> Any:
        return OWN.rollback(OWN.apply(params, tokens, cache)[1], num_valid)

    kept = dataclasses.replace(OWN, prefill=prefill, rollback=lambda cache, length: cache)
    with pytest.raises(AssertionError):
        assert_rows(sample(model=kept, sampling=GREEDY), greedy_slowly())


def test_logprobs_are_of_the_target_s_actual_distribution() -> None:
    sampling = SamplingParams(temperature=jnp.array([0.7, 1.3]), top_k=2)
    generation = sample(sampling=sampling, draft_sampling=SamplingParams(temperature=2.0), stop_tokens=(2,))
    scored_at_1 = []
    for b in range(2):
        row, start = np.asarray(generation.tokens)[b].tolist(), int(LENGTHS[b])
        for i in range(int(generation.lengths[b]) - start):
            logits = slow_logits(row[: start + i]) / float(sampling.temperature[b])
            kept = np.where(np.argsort(np.argsort(-logits)) < 2, logits, -np.inf)
            want = kept - np.log(np.exp(kept).sum())
            np.testing.assert_allclose(generation.logprobs[b, i], want[row[start + i]], atol=2e-6)
            raw = slow_logits(row[: start + i])
            scored_at_1.append((raw - np.log(np.exp(raw).sum()))[row[start + i]] - want[row[start + i]])
        np.testing.assert_array_equal(generation.logprobs[b, int(generation.lengths[b]) - start :], 0)
    assert np.abs(scored_at_1).max() > 0.05


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    keys = jax.random.split(jax.random.key(7), 2)
    sampling = SamplingParams(temperature=jnp.array([0.8, 1.2]), top_p=jnp.array([1.0, 0.9]))
    both = sample(keys, sampling=sampling)
    swapped = generate(
        keys[::-1],
        OWN,
        toys.table(1),
        PROMPT[::-1],
        LENGTHS[::-1],
        drafter=MODEL_DRAFT,
        draft_length=3,
        max_new_tokens=NEW,
        sampling=jax.tree.map(lambda x: x[::-1] if jnp.ndim(x) else x, sampling),
    )
    alone = generate(
        keys[1:],
        OWN,
        toys.table(1),
        jnp.pad(PROMPT[1:], ((0, 0), (0, 2)), constant_values=2),
        LENGTHS[1:],
        drafter=MODEL_DRAFT,
        draft_length=3,
        max_new_tokens=NEW,
        sampling=SamplingParams(temperature=jnp.array([1.2]), top_p=jnp.array([0.9])),
    )
    for name in ("lengths", "logprobs", "finish_reason"):
        np.testing.assert_array_equal(getattr(both, name)[1:], getattr(alone, name))
        np.testing.assert_array_equal(getattr(both, name), getattr(swapped, name)[::-1])
    np.testing.assert_array_equal(both.tokens[1], alone.tokens[0, : PROMPT.shape[1] + NEW])
    np.testing.assert_array_equal(both.tokens, swapped.tokens[::-1])
    other = sample(keys[::-1], sampling=sampling)
    assert (np.asarray(other.tokens) != np.asarray(both.tokens)).any()


def test_stop_and_minimum_length() -> None:
    stops = sample(sampling=GREEDY, stop_tokens=(2,))
    assert_rows(stops, greedy_slowly(stop=2))
    ended_early = np.asarray(stops.lengths) < np.asarray(LENGTHS) + NEW
    np.testing.assert_array_equal(np.asarray(stops.finish_reason) == STOP, ended_early)
    late = sample(stop_tokens=[1, 2], min_new_tokens=4)
    for b in range(2):
        new = np.asarray(late.tokens)[b, int(LENGTHS[b]) : int(late.lengths[b])]
        assert (new[:4] == 0).all()
        assert (new[4:-1] == 0).all()


def counting(counts: dict[str, int]) -> LanguageModel:
    def apply(params: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        counts["traces"] += 1
        return OWN.apply(params, tokens, cache)

    return dataclasses.replace(OWN, apply=apply)


def test_new_lengths_keys_and_sampling_values_compile_nothing_and_transfer_nothing() -> None:
    counts = {"traces": 0}
    model = counting(counts)
    drafter = ModelDrafter(model, toys.table(2))
    prompt = jnp.ones((2, 4), jnp.int32)
    tables = [toys.table(1), toys.table(2)]
    operands = jax.device_put([(LENGTHS, jax.random.key(1)), (jnp.array([1, 3], jnp.int32), jax.random.key(2))])

    def call(index: int, temperature: float, stop: tuple[int, ...], minimum: int) -> Generation:
        lengths, key = operands[index]
        return generate(
            key,
            model,
            tables[index],
            prompt,
            lengths,
            drafter=drafter,
            sampling=SamplingParams(temperature=temperature, top_p=1 - 0.1 * index),
            stop_tokens=stop,
            min_new_tokens=minimum,
            max_new_tokens=6,
        )

    call(0, 0.5, (2,), 0)
    traced = counts["traces"]
    assert traced > 0
    with jax.transfer_guard("disallow"):
        call(1, 0.9, (0, 1), 3)
    call(1, jnp.asarray(0.9), (), 0)  # a weak type is no other program, nor is an integer
    call(1, 1, (), 0)
    assert counts["traces"] == traced
    generate(KEY, model, tables[0], prompt, LENGTHS, drafter=drafter, draft_length=2, max_new_tokens=6)
    assert counts["traces"] > traced  # the counter does see a new program


def test_interrupted_sampling_goes_on_as_if_it_had_not_been() -> None:
    options = {"drafter": MODEL_DRAFT, "draft_length": 3, "max_new_tokens": NEW}
    state = init_state(KEY, OWN, TABLE, PROMPT, LENGTHS, **options)
    # A compiled function returns copies of the parameters; with the arrays themselves the caches are taken over.
    state = dataclasses.replace(jax.jit(run)(state, max_rounds=1), settings=state.settings)
    resumed, whole = sample(state=state), sample()
    for name in ("tokens", "lengths", "logprobs", "finish_reason"):
        np.testing.assert_array_equal(getattr(resumed, name), getattr(whole, name))
    assert (np.asarray(resumed.info.emitted) < NEW).all()
    assert state.target_cache.tokens.is_deleted()
    assert not any(leaf.is_deleted() for leaf in (PROMPT, LENGTHS, KEY, state.tokens, state.settings.target_params))


def test_more_budget_continues_a_finished_call() -> None:
    whole = sample(sampling=GREEDY)
    for more in ({}, {"drafter": NgramDrafter(2)}):
        short = sample(sampling=GREEDY, max_new_tokens=4)
        assert (np.asarray(short.lengths) == np.asarray(LENGTHS) + 4).all()
        longer = sample(sampling=GREEDY, state=short.state, **more)
        np.testing.assert_array_equal(longer.tokens, whole.tokens)
        np.testing.assert_array_equal(longer.info.emitted, [NEW - 4] * 2)
    short = sample(sampling=GREEDY, max_new_tokens=4)
    rest = generate(
        KEY, OWN, toys.table(1), short.tokens, short.lengths, max_new_tokens=NEW - 4, sampling=GREEDY, state=short.state
    )
    np.testing.assert_array_equal(rest.tokens, whole.tokens)
    np.testing.assert_array_equal(rest.lengths, whole.lengths)


def test_a_state_may_be_continued_twice() -> None:
    state = sample(max_new_tokens=4).state
    first, again = (sample(state=state) for _ in range(2))
    np.testing.assert_array_equal(again.tokens, first.tokens)
    np.testing.assert_array_equal(again.logprobs, first.logprobs)


def new_parameters(serve: Any = caches_serve) -> Generation:
    """Greedy rows that go on with other parameters than those which filled their caches."""
    keys_as_written = remembering()
    state = init_state(KEY, keys_as_written, toys.table(1), PROMPT, LENGTHS, sampling=GREEDY, max_new_tokens=NEW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["flashspec.generate"], "caches_serve", serve)
        return sample(model=keys_as_written, table=toys.table(2), drafter=None, sampling=GREEDY, state=state)


def remembering() -> LanguageModel:
    """A toy whose cache holds what its parameters made of the tokens, as keys and values are made."""

    def init_cache(batch: int, capacity: int) -> dict[str, jax.Array]:
        return {"keys": jnp.zeros((batch, capacity, 3)), "length": jnp.zeros(batch, jnp.int32)}

    def apply(table: jax.Array, tokens: jax.Array, cache: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        positions = cache["length"][:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        rows = jnp.arange(tokens.shape[0])[:, None]
        keys = cache["keys"].at[rows, positions].set(table[tokens], mode="drop")
        return jnp.cumsum(keys, axis=1)[rows, positions], {"keys": keys, "length": cache["length"] + tokens.shape[1]}

    return LanguageModel(apply, init_cache, 3)


def test_caches_that_other_parameters_filled_are_filled_anew() -> None:
    def assert_of_new_parameters(generation: Generation) -> None:
        table = np.asarray(toys.table(2))
        for b in range(2):
            row = np.asarray(generation.tokens)[b, : int(LENGTHS[b]) + NEW]
            for end in range(int(LENGTHS[b]), len(row)):
                assert row[end] == table[row[:end]].sum(0).argmax()

    assert_of_new_parameters(new_parameters())
    with pytest.raises(AssertionError):
        assert_of_new_parameters(new_parameters(lambda call, state: True))


def test_a_stopped_row_stays_stopped() -> None:
    short = sample(sampling=GREEDY, max_new_tokens=4, stop_tokens=(2,))
    reasons, lengths = np.asarray(short.finish_reason), np.asarray(short.lengths)
    assert STOP in reasons
    longer = sample(sampling=GREEDY, stop_tokens=(2,), state=short.state)
    np.testing.assert_array_equal(np.asarray(longer.lengths)[reasons == STOP], lengths[reasons == STOP])


def test_a_stream_is_the_generation_in_pieces() -> None:
    options = {
        "drafter": MODEL_DRAFT,
        "draft_length": 3,
        "max_new_tokens": NEW,
        "stop_tokens": (2,),
        "min_new_tokens": 5,
    }
    whole = sample(stop_tokens=(2,), min_new_tokens=5)
    table = toys.table(1)
    with jax.transfer_guard("disallow"):
        chunks = list(generate_stream(KEY, OWN, table, PROMPT, LENGTHS, rounds=2, **options))
    assert len(chunks) > 1
    for b in range(2):
        for pieces, array, start in (("tokens", whole.tokens, int(LENGTHS[b])), ("logprobs", whole.logprobs, 0)):
            parts = [np.asarray(getattr(chunk, pieces))[b, : int(chunk.counts[b])] for chunk in chunks]
            count = int(whole.lengths[b]) - int(LENGTHS[b])
            np.testing.assert_array_equal(np.concatenate(parts), array[b, start : start + count])
    np.testing.assert_array_equal(chunks[-1].finish_reason, whole.finish_reason)


def cache_copies(text: str, shape: str) -> list[str]:
    """The computations of a compiled program, in order, that copy an array of this shape; the last is the entry."""
    computation, found = "", []
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = line.split(" (")[0]
        if re.search(rf"= {re.escape(shape)}\S* copy\(", line):
            found.append(computation)
    return found


def test_the_loop_copies_no_cache() -> None:
    capacity = PROMPT.shape[1] + NEW + 3
    model = toys.model("dense")
    drafter = ModelDrafter(model, toys.table(2))
    options = {"drafter": drafter, "draft_length": 3, "max_new_tokens": NEW}

    def tokens(*operands: jax.Array) -> jax.Array:
        return generate(operands[0], model, *operands[1:], **options).state.target_cache.key

    compiled = jax.jit(tokens).lower(KEY, toys.table(1), PROMPT, LENGTHS).compile()
    copied = cache_copies(compiled.as_text(), f"f32[2,{capacity},1,3]")
    assert all(computation.startswith("ENTRY") for computation in copied), copied

    def keeping(cache: Any) -> Any:  # the old keys outlive the write, so that every round must copy them
        return jax.lax.fori_loop(0, 3, lambda i, k: (k[0].at[:, i].set(k[1][:, i + 1]), k[0]), (cache, cache))

    wrong = jax.jit(keeping).lower(jnp.zeros((2, capacity, 1, 3))).compile().as_text()
    assert any(not computation.startswith("ENTRY") for computation in cache_copies(wrong, f"f32[2,{capacity},1,3]"))


def test_lists_one_token_prompts_and_64_bit_mode(x64: None) -> None:
    options = {"drafter": NgramDrafter(2), "draft_length": 2, "sampling": GREEDY, "max_new_tokens": 4}
    generation = generate(KEY, OWN, toys.table(1).astype(jnp.float32), [[1], [2]], [1, 1], **options)
    for b, row in enumerate(([1], [2])):
        for _ in range(4):
            row.append(int(slow_logits(row).argmax()))
        np.testing.assert_array_equal(generation.tokens[b], row)
    assert generation.tokens.dtype == jnp.int32
    assert generation.logprobs.dtype == jnp.float32


def test_generate_inside_a_compiled_function() -> None:
    inside = jax.jit(
        lambda key, tokens, lengths: (
            generate(
                key, OWN, toys.table(1), tokens, lengths, drafter=MODEL_DRAFT, draft_length=3, max_new_tokens=NEW
            ).tokens
        )
    )(KEY, PROMPT, LENGTHS)
    np.testing.assert_array_equal(inside, sample().tokens)
