"""Arguments of `generate` that do not fit: a ValueError that names the argument, before any compute."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.generate import generate
from flashspec.sampling import SamplingParams
from flashspec.speculative.drafters import ShallowDrafter
from flashspec.speculative.start import init_state
from tests.speculative import toys

PROMPT, LENGTHS = jnp.array([[0, 1, 2, 0], [1, 1, 0, 0]], jnp.int32), jnp.array([4, 2], jnp.int32)
OWN = toys.model()
KEY = jax.random.key(5)

BAD = [
    ({"prompt_lengths": jnp.array([4, 0])}, "`prompt_lengths`: expected at least one token in each prompt"),
    ({"prompt_lengths": jnp.array([5, 1])}, "`prompt_lengths`: expected at most the 4 columns"),
    ({"prompt_lengths": jnp.array([4])}, "`prompt_lengths`: expected shape"),
    ({"prompt_lengths": jnp.array([4.0, 2.0])}, "`prompt_lengths`: expected an integer dtype"),
    ({"prompt_tokens": jnp.zeros((2, 0), jnp.int32)}, "`prompt_tokens`: expected at least one row"),
    ({"prompt_tokens": jnp.full((2, 4), 3)}, "`prompt_tokens`: expected ids in 0..2"),
    ({"prompt_tokens": jnp.full((2, 4), -1)}, "`prompt_tokens`: expected ids in 0..2"),
    ({"key": jnp.zeros(2, jnp.uint32)}, "`key`: expected a typed key"),
    ({"key": jax.random.split(jax.random.key(0), 3)}, "`key`: expected a scalar key or one key a row"),
    ({"target": dataclasses.replace(OWN, vocab_size=4)}, "`model.apply`: expected logits of shape"),
    ({"draft_length": 0}, "`draft_length`: expected an integer of at least 1"),
    ({"max_new_tokens": 0}, "`max_new_tokens`: expected an integer of at least 1"),
    ({"min_new_tokens": 9}, "`min_new_tokens`: expected counts in 0..max_new_tokens = 8"),
    ({"min_new_tokens": -1}, "`min_new_tokens`: expected counts in 0..max_new_tokens = 8"),
    ({"stop_tokens": (3,)}, "`stop_tokens`: expected ids in 0..2"),
    ({"rule": "typical"}, "`rule`: expected one of 'chain', 'match', 'greedy'"),
    ({"rule": "greedy"}, "`rule`: expected 'chain' or 'match' where a temperature is above 0"),
    ({"rule": "greedy", "sampling": SamplingParams(temperature=jnp.array([0.0, 1.0]))}, "`rule`"),
    ({"prompt_tokens": [[0, 1], [1]]}, "`prompt_tokens`: expected an array, or nested lists with rows of one length"),
    ({"min_new_tokens": [1, 2, 3]}, "`min_new_tokens`: expected shape [B]"),
    ({"min_new_tokens": "2"}, "`min_new_tokens`: expected an array, a number or a dtype"),
    ({"sampling": SamplingParams(temperature=[0.5])}, "`temperature`: expected shape [B]"),
    ({"sampling": SamplingParams(temperature=-1.0)}, "`temperature`"),
    ({"draft_sampling": SamplingParams(top_p=0.0)}, "`top_p`"),
    ({"sampling": SamplingParams(logit_bias=jnp.zeros(4))}, "`logit_bias`"),
    ({"drafter": "small"}, "`drafter`: expected an object with the methods"),
    (
        {"drafter": ShallowDrafter(toys.model(vocab=5), toys.table(2, vocab=5))},
        "`drafter`: expected the target's vocabulary",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_bad_input_is_named_before_any_compute(wrong: dict[str, Any], message: str) -> None:
    prompt = {"prompt_tokens": PROMPT, "prompt_lengths": LENGTHS}
    good = {"key": KEY, "target": OWN, "target_params": toys.table(1), **prompt, "max_new_tokens": 8}
    generate(**good)
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(**{**good, **wrong})


def test_a_state_that_is_not_the_prompt_s_is_refused() -> None:
    state = init_state(KEY, OWN, toys.table(1), PROMPT, LENGTHS, max_new_tokens=8)

    def resume(tokens: jax.Array, lengths: jax.Array) -> None:
        generate(KEY, OWN, toys.table(1), tokens, lengths, max_new_tokens=8, state=state)

    with pytest.raises(ValueError, match="`state`: expected the prompt's batch of 1, got 2"):
        resume(PROMPT[:1], LENGTHS[:1])
    with pytest.raises(ValueError, match="`prompt_tokens`: expected how the state's rows begin"):
        resume(PROMPT.at[0, 0].set(1), LENGTHS)
    with pytest.raises(ValueError, match="`prompt_lengths`: expected at most the lengths of the state's rows"):
        resume(PROMPT, jnp.array([4, 3], jnp.int32))


def same_call(**kinds: Any) -> jax.Array:
    """The tokens of one call, whatever its numbers come in."""
    numbers = {"prompt_tokens": PROMPT, "prompt_lengths": LENGTHS, "min_new_tokens": jnp.array([2, 0]), **kinds}
    sampling = SamplingParams(**{"temperature": jnp.array([0.5, 1.0]), "top_k": 2} | numbers.pop("sampling", {}))
    return generate(KEY, OWN, toys.table(1), max_new_tokens=8, stop_tokens=(2,), sampling=sampling, **numbers).tokens


KINDS = [
    {"prompt_tokens": PROMPT.tolist(), "prompt_lengths": [4, 2], "min_new_tokens": [2, 0]},
    {"prompt_tokens": PROMPT.astype(jnp.uint8), "prompt_lengths": LENGTHS.astype(jnp.uint8)},
    {"prompt_tokens": np.asarray(PROMPT, np.int64), "min_new_tokens": jnp.array([2, 0], jnp.int16)},
    {"sampling": {"temperature": [0.5, 1], "top_k": [2, 2], "logit_bias": [0.0] * 3, "allowed_tokens": [True] * 3}},
    {"sampling": {"top_k": np.int64(2), "top_p": 1, "min_p": 0, "temperature": np.array([0.5, 1.0])}},
]


@pytest.mark.parametrize("kinds", KINDS)
def test_numbers_come_in_any_kind(kinds: dict[str, Any]) -> None:
    np.testing.assert_array_equal(same_call(**kinds), same_call())


def test_numbers_come_in_any_kind_in_64_bit_mode(x64: None) -> None:
    wide = {"prompt_lengths": LENGTHS.astype(jnp.int64), "min_new_tokens": jnp.array([2, 0], jnp.int64)}
    sampling = {"temperature": jnp.array([0.5, 1.0], jnp.float64), "top_k": jnp.array(2, jnp.int64)}
    np.testing.assert_array_equal(same_call(**wide, sampling=sampling), same_call())
    assert (np.asarray(same_call(sampling={"top_k": 1})) != np.asarray(same_call())).any()


def test_a_traced_stop_token_below_0_is_none() -> None:
    def tokens(stops: jax.Array) -> jax.Array:
        return generate(KEY, OWN, toys.table(1), PROMPT, LENGTHS, max_new_tokens=8, stop_tokens=stops).tokens

    stopped, by_none, by_last = (jax.jit(tokens)(jnp.array([1, stop])) for stop in (1, -1, 2))
    np.testing.assert_array_equal(by_none, stopped)
    assert (np.asarray(by_last) != np.asarray(stopped)).any()
