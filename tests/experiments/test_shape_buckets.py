"""The parts of the experiment on shape buckets: what it serves, and how it settles the accounts of a bucket."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.corpus import Document
from experiments.pairs import load_pair
from experiments.shape_buckets import Policy, library_functions, sample, scorer, settle_one
from flashspec.attention import dot_product_attention
from flashspec.models import merge
from flashspec.specialize import BucketEntry, ShapeBuckets, specialize

SOURCE = """import os

class A:
    def method(self):
        def inner():
            return 1
        return inner

async def coroutine(): pass
"""


def test_every_function_is_found_with_its_whole_text():
    found = set(library_functions([Document("a.py", SOURCE)]))
    method = "    def method(self):\n        def inner():\n            return 1\n        return inner\n"
    assert found == {method, "        def inner():\n            return 1\n", "async def coroutine(): pass\n"}


def test_requests_are_drawn_without_replacement_from_what_can_be_served():
    tokens = [np.full(length, length, np.int32) for length in (3, 512, 513, 7)]
    assert sorted(len(ids) for ids in sample(tokens, 9, seed=0)) == [3, 7, 512]
    assert len(sample(tokens, 2, seed=0)) == 2


@pytest.fixture(scope="module")
def pair():
    return load_pair(layers=1)


def assert_scores(score, pair):
    """The log-probability of each token after the first, given those before it, by whole rows without padding."""
    tokens = np.array([5, 9, 700, 3, 12], np.int32)
    program = specialize(score, (8,), in_axes={"tokens": 0}, out_axes=0, length_arg="length", progress=False)
    logits = merge(pair.config, pair.target_params)(jnp.asarray(tokens)[None], attention=dot_product_attention)[0]
    want = np.asarray(jax.nn.log_softmax(logits))[np.arange(4), tokens[1:]]
    np.testing.assert_allclose(program(pair.target_params, tokens), [0, *want], rtol=1e-4, atol=1e-4)
    program.check_padding(pair.target_params, tokens)


def test_a_request_is_scored_by_the_tokens_before_each(pair):
    assert_scores(scorer(pair), pair)

    def shifted(params, tokens, length):
        """WRONG: each token is scored by the row that has read it."""
        return jnp.roll(scorer(pair)(params, tokens, length), 1)

    with pytest.raises(AssertionError):
        assert_scores(shifted, pair)


def entry(bound, compile_s, after, op_by_op=None):
    return BucketEntry(bound, compile_s=compile_s, hits=10, steady_s=10 * after, steady_calls=10, op_by_op_s=op_by_op)


def test_a_bucket_is_settled_by_eq_33_9():
    """C = 3 s, 1.5 ms; op by op 2 ms, the next bucket 1.6 ms: pays from 6,001 and from 30,001 calls."""
    buckets = ShapeBuckets((8, 16))
    policy = Policy("fake", buckets, specialize(lambda x: x, buckets, in_axes=0, out_axes=0, length_arg=None))
    row = settle_one(entry(8, 3.0, 0.0015, 0.002), entry(16, 1.0, 0.0016), policy, Counter({5: 3, 12: 1}))
    assert row[:2] == [8, 3.0]
    assert row[2:5] == pytest.approx([1.5, 2, 1.6])
    assert row[5] == 6001
    assert row[6] == 30001
    assert row[7:] == ["75.0%", "no (-2.92 s)"]
    slower = settle_one(entry(8, 3.0, 0.0015), entry(16, 1.0, 0.001), policy, Counter({5: 1}))
    assert slower[5:7] == [None, math.inf], "a larger bucket that is faster leaves nothing to repay with"
    last = settle_one(entry(16, 1.0, 0.001, 0.003), None, policy, Counter({12: 1}))
    assert last[8] == "yes (1 s)"
