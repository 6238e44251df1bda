"""The programs that the experiment on fusion compares: equal results, and bytes that the compiler confirms."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from experiments.fusion import TAILS, Case, agreement, compiler_bytes, library_tail, programs, random_operands


def case(tail):
    options = TAILS[tail]
    return Case(tail, random_operands(0, 8, 64, 128, jnp.float32, **options), options["activation"])


@pytest.mark.parametrize("tail", TAILS)
def test_all_programs_of_a_case_agree_with_the_reference(tail):
    one = case(tail)
    calls = programs(one)
    assert next(iter(calls)) == "step by step"
    assert agreement(one, calls).passed
    other = dataclasses.replace(one, activation="relu")
    assert not agreement(one, {**calls, "wrong": programs(other)["XLA, as written"]}).passed


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU's compiler cannot see into library calls")
@pytest.mark.parametrize("tail", TAILS)
def test_the_compiler_counts_the_bytes_of_the_formula(tail):
    """Step by step it moves what the plan says; fused it moves less, and no less than operands and result."""
    one = case(tail)
    calls, plan = programs(one), one.plan()
    separate = compiler_bytes(calls["step by step"])
    assert separate == pytest.approx(plan.unfused_bytes / 1e6, rel=1e-3)
    for name in ("XLA, as written", "matmul_epilogue, xla"):
        assert plan.bytes / 1e6 <= compiler_bytes(calls[name]) < separate


def test_the_tail_of_a_library_call_is_read_from_the_program():
    call = programs(case("bias + SiLU"))["XLA, as written"]
    assert library_tail(call) == ""
    text = 'custom-call(), custom_call_target="__cublas$lt$matmul", backend_config={"epilogue":"BIAS_GELU"}'
    fake = dataclasses.replace(call, executable=type("Program", (), {"as_text": lambda self: text})())
    assert library_tail(fake) == "BIAS_GELU"
