"""The programs that the experiment on fusion compares: equal results, and bytes that the compiler confirms."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from experiments.fusion import (
    DECODER,
    TAILS,
    Case,
    agreement,
    compiler_bytes,
    library_tail,
    programs,
    random_operands,
    stand,
    summary,
)
from flashspec.measure import HOST, Interleaved, Timing, checked


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


def test_a_kernel_stands_against_the_best_of_xla():
    """Of the same form: one product of gate and value is no peer of two, nor is the chain step by step one."""
    ms = {
        "step by step": 1, "XLA, as written": 12, "XLA, cuBLASLt": 11, "matmul_epilogue, xla": 13,
        "matmul_epilogue, hopper": 10, f"{DECODER}, XLA": 8, f"{DECODER}, XLA, cuBLASLt": 9, f"{DECODER}, hopper": 10,
        "one product alone": 2,
    }  # fmt: skip
    timings = {name: Timing((value / 1e3,), HOST, 1.0) for name, value in ms.items()}
    standings = stand(case("gated SiLU"), "hopper", Interleaved(timings, checked("all agree", lambda: True)))
    assert [(s.form, s.other, s.ratio) for s in standings] == [
        ("gated SiLU", "XLA, cuBLASLt", pytest.approx(1.1)),
        (f"gated SiLU, {DECODER}", f"{DECODER}, XLA", pytest.approx(0.8)),
    ]
    later = [dataclasses.replace(s, rows=8192, ratio=0.9876) for s in standings]
    assert summary(standings + later) == [
        "speed of hopper over XLA's best at 8, 8192 rows: gated SiLU 1.100 / 0.988, "
        f"gated SiLU, {DECODER} 0.800 / 0.988"
    ]
    assert summary([]) == []
