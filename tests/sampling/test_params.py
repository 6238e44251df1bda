"""Settings that make no sense are refused by name, before any compute."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flashspec.sampling import SamplingParams, probabilities

BATCH, SIZE = 2, 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", jnp.asarray([1.0, -1.0])),
        ("temperature", jnp.ones((3,))),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", jnp.asarray([[1, 2]])),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", jnp.asarray([1.0, 0.0])),
        ("min_p", -0.5),
        ("min_p", 1.0),
        ("logit_bias", jnp.zeros((SIZE + 1,))),
        ("logit_bias", jnp.zeros((BATCH + 1, SIZE))),
        ("logit_bias", jnp.zeros((SIZE,), jnp.int32)),
        ("logit_bias", jnp.asarray([0.0, jnp.inf, 0.0])),
        ("logit_bias", jnp.asarray([0.0, jnp.nan, 0.0])),
        ("allowed_tokens", jnp.ones((BATCH, SIZE), jnp.int32)),
        ("allowed_tokens", jnp.ones((BATCH, 1), jnp.bool_)),
    ],
)
def test_a_setting_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^`{name}`: expected"):
        SamplingParams(**{name: value}).check(BATCH, SIZE)
    with pytest.raises(ValueError, match=f"^`{name}`: expected"):
        probabilities(jnp.zeros((BATCH, SIZE)), SamplingParams(**{name: value}))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_k=50, top_p=1, min_p=0),
        SamplingParams(jnp.ones((BATCH,)), jnp.asarray([0, 9]), jnp.asarray([0.1, 1.0]), jnp.asarray([0.0, 0.5])),
        SamplingParams(logit_bias=jnp.asarray([0.0, -jnp.inf, 1.0]), allowed_tokens=jnp.ones((BATCH, SIZE), jnp.bool_)),
    ],
)
def test_scalars_and_rows_are_accepted(params: SamplingParams) -> None:
    params.check(BATCH, SIZE)
    jax.jit(lambda params: params.check(BATCH, SIZE))(params)


@pytest.mark.parametrize(
    ("name", "logits", "suppress"),
    [
        ("logits", jnp.zeros((SIZE,)), None),
        ("logits", jnp.zeros((BATCH, SIZE), jnp.int32), None),
        ("V of `logits`", jnp.zeros((BATCH, 0)), None),
        ("suppress", jnp.zeros((BATCH, SIZE)), jnp.zeros((SIZE,), jnp.bool_)),
        ("suppress", jnp.zeros((BATCH, SIZE)), jnp.zeros((BATCH, SIZE), jnp.int32)),
        ("suppress", jnp.zeros((BATCH, 4, SIZE)), jnp.zeros((BATCH, 3, SIZE), jnp.bool_)),
    ],
)
def test_arrays_of_the_wrong_shape_are_refused(name: str, logits: Any, suppress: Any) -> None:
    with pytest.raises(ValueError, match=f"^`{name}`: expected"):
        probabilities(logits, SamplingParams(), suppress=suppress)
