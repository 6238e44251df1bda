"""When the Hopper kernels are chosen, what they refuse, and what the plan says of them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flashspec.attention import plan_attention


def test_the_default_on_a_hopper_gpu() -> None:
    shape = jax.ShapeDtypeStruct((2, 24, 4, 64), jnp.bfloat16)
    for device, chosen in (("NVIDIA H200", "hopper"), ("NVIDIA A100-SXM4-80GB", "cudnn")):
        assert plan_attention(shape, shape, shape, device=device).forward.implementation == chosen


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": jax.ShapeDtypeStruct((1, 1, 1, 24), jnp.float32)}, "adds no bias"),
        ({"mask": jax.ShapeDtypeStruct((1, 1, 1, 24), jnp.bool_)}, "reads no explicit mask"),
        ({"is_causal": True, "q_positions": jax.ShapeDtypeStruct((24,), jnp.int32)}, "takes positions as `Contiguous`"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "has no dropout"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    shape = jax.ShapeDtypeStruct((2, 24, 4, 64), jnp.bfloat16)
    plan = plan_attention(shape, shape, shape, **options, device="NVIDIA H200")
    assert any(reason in line for line in plan.rejected["hopper"])
    assert plan.forward.implementation != "hopper"


def test_a_call_without_pairs_has_a_plan() -> None:
    for T, S in ((0, 8), (8, 0)):
        shapes = (jax.ShapeDtypeStruct((2, n, 4, 64), jnp.bfloat16) for n in (T, S, S))
        assert plan_attention(*shapes, device="NVIDIA H200").forward.implementation == "hopper"


def test_the_plan_counts_copies() -> None:
    def copies(T: int, H: int, **options: Any) -> dict[str, int]:
        shape = jax.ShapeDtypeStruct((2, T, 4, H), jnp.bfloat16)
        return dict(plan_attention(shape, shape, shape, **options, device="NVIDIA H200").copies)

    assert copies(24, 64, is_causal=True) == {}
    assert copies(24, 80) == dict.fromkeys(("query", "key", "value", "output"), 2 * 24 * 4 * 128 * 2)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert set(copies(24, 64, kv_lengths=lengths)) == {"query", "key", "value"}


def test_the_backward_of_wide_heads_pads_more_and_says_so() -> None:
    shape = jax.ShapeDtypeStruct((1, 24, 2, 192), jnp.bfloat16)
    plan = plan_attention(shape, shape, shape, device="NVIDIA H200")
    assert (plan.forward.implementation, plan.backward.implementation) == ("hopper", "hopper")
    padded = {f"{name} of the backward": 24 * 2 * 256 * 2 for name in ("query", "key", "value", "output")}
    assert plan.copies == padded
