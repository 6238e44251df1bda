"""Generation through buckets: no width compiles after warming up, and nothing of the padding is attended to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.generate import BucketedGenerate, _split_prompt, generate
from flashspec.sampling import SamplingParams
from flashspec.specialize import specialize
from flashspec.speculative.arguments import prepare
from flashspec.speculative.drafters import ModelDrafter
from tests.compile_events import compilations
from tests.speculative import toys

KEYS = jax.random.split(jax.random.key(3), 9)
NEW = 4
TARGET, TABLE = toys.model(), toys.table(1)
OPTIONS = {"drafter": ModelDrafter(toys.model(), toys.table(2)), "draft_length": 1, "max_new_tokens": NEW}


def prompt(width):
    tokens = np.random.default_rng(width).integers(0, 3, (2, width))
    return tokens, np.array([width, max(1, width - 1)])


@pytest.fixture(scope="module")
def serve():
    return BucketedGenerate((4, 8), progress=False)


def test_no_width_compiles_after_warming_up(serve):
    keys = list(KEYS)
    with compilations() as first:
        serve.warm_up(keys[0], TARGET, TABLE, *prompt(1), **OPTIONS)
    with compilations() as later:
        for width in range(1, 9):
            serve(keys[width], TARGET, TABLE, *prompt(width), sampling=SamplingParams(0.5), **OPTIONS)
    assert (first, later) == ([2], [0])
    assert (serve.ledger[4].hits, serve.ledger[8].hits) == (4, 4)


def assert_like_generate(serve, width, change=lambda tokens: tokens):
    tokens, lengths = prompt(width)
    got = serve(KEYS[0], TARGET, TABLE, tokens, lengths, **OPTIONS)
    want = generate(KEYS[0], TARGET, TABLE, change(tokens), lengths, **OPTIONS)
    assert got.tokens.shape == (2, width + NEW)
    for name in ("tokens", "lengths", "finish_reason", "logprobs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    for cache in (got.state.target_cache, got.state.draft_cache):
        np.testing.assert_array_equal(cache.length, got.lengths - 1)


def test_it_equals_generate_of_the_unpadded_prompt(serve):
    assert_like_generate(serve, 7)
    with pytest.raises(AssertionError):
        assert_like_generate(serve, 7, change=lambda tokens: 2 - tokens)


def test_padding_changes_no_bit(serve):
    call, operands = _split_prompt(prepare(KEYS[0], TARGET, TABLE, *prompt(6), **OPTIONS))
    serve.programs.check_padding(call, **operands)


def assert_materialised(fill):
    """A prefill holds its rows' own lengths, and the next token's logits are those of the unpadded prefill."""
    tokens, lengths = prompt(6)
    programs = specialize(
        fill, (4, 8), in_axes={"tokens": 1}, out_axes=None, length_arg="num_valid", background=False, progress=False
    )
    padded, unpadded = programs(TABLE, tokens, num_valid=lengths), fill(TABLE, tokens, lengths)
    np.testing.assert_array_equal(padded.length, lengths)
    last = jnp.ones((2, 1), jnp.int32)
    np.testing.assert_array_equal(*(TARGET.apply(TABLE, last, cache)[0] for cache in (padded, unpadded)))


def test_the_materialised_length_is_the_true_one():
    def fill(params, tokens, num_valid):
        return TARGET.fill(params, jnp.asarray(tokens, jnp.int32), jnp.asarray(num_valid, jnp.int32), 16)

    def keeps_padding(params, tokens, num_valid):
        """WRONG: every position of the padded prompt counts."""
        return fill(params, tokens, jnp.full_like(num_valid, tokens.shape[1]))

    assert_materialised(fill)
    with pytest.raises(AssertionError):
        assert_materialised(keeps_padding)


def test_arguments_are_checked_as_in_generate(serve):
    with pytest.raises(ValueError, match="at most 8, the bound of the last bucket, got 9"):
        serve(KEYS[0], TARGET, TABLE, *prompt(9), **OPTIONS)
    with pytest.raises(ValueError, match="`prompt_lengths`"):
        serve(KEYS[0], TARGET, TABLE, prompt(3)[0], np.array([4, 1]), **OPTIONS)
    with pytest.raises(TypeError, match="state"):
        serve(KEYS[0], TARGET, TABLE, *prompt(3), state=None, **OPTIONS)
