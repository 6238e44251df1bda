"""Compiler options of loops: for one platform alone, and for the outermost program alone."""

import contextlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec import loop_compiler_options
from flashspec.generate import BucketedGenerate, Generation, generate
from flashspec.recording import RECORDED
from flashspec.selection import Target
from flashspec.speculative.drafters import ModelDrafter
from tests.compile_events import compilations
from tests.speculative import toys

GENERATE = sys.modules["flashspec.generate"]  # the package has a function of that name
MODEL, TABLE, KEY = toys.model(), toys.table(1), jax.random.key(5)
DRAFTER = ModelDrafter(MODEL, toys.table(2))
PROMPT, LENGTHS = jnp.array([[0, 1, 2, 0], [1, 1, 0, 0]], jnp.int32), jnp.array([4, 2], jnp.int32)
UNKNOWN = {"no_such_option": "1"}  # XLA refuses it, so that a program which compiles was not given it
REFUSED = "No such compile option: 'no_such_option'"


def sample(key: jax.Array = KEY, table: jax.Array = TABLE) -> Generation:
    return generate(key, MODEL, table, PROMPT, LENGTHS, drafter=DRAFTER, draft_length=2, max_new_tokens=5)


@contextlib.contextmanager
def on(platform: str = "cuda", options: dict[str, str] | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Arrays seem to lie on this platform, which has its own options or these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GENERATE, "resolve_device", lambda device, operand: Target("", platform))
        if options is not None:
            patch.setattr(GENERATE, "loop_compiler_options", lambda platform=None: options)
        yield patch


def test_only_cuda_has_options() -> None:
    assert loop_compiler_options("cuda") == {"xla_gpu_enable_command_buffer": RECORDED}
    assert {"WHILE", "CONDITIONAL"} < set(RECORDED.split(","))
    assert [loop_compiler_options(platform) for platform in ("cpu", "rocm", "tpu")] == [{}] * 3
    if jax.default_backend() == "cpu":
        assert loop_compiler_options() == {}


def test_a_platform_by_jax_s_name_is_refused() -> None:
    """`jax.default_backend()` says "gpu" of two platforms, and options that are none would go unnoticed."""
    with pytest.raises(ValueError, match=r"`platform`: expected 'cuda' or 'rocm' for a GPU, got 'gpu'"):
        loop_compiler_options("gpu")


def test_the_outermost_program_is_compiled_with_the_options() -> None:
    with on(options=UNKNOWN), pytest.raises(jax.errors.JaxRuntimeError, match=REFUSED):
        sample()
    with on(options=UNKNOWN):
        serve = BucketedGenerate((4,), progress=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSED):
        serve(KEY, MODEL, TABLE, PROMPT, LENGTHS, max_new_tokens=5)


def test_where_parameters_are_committed_decides() -> None:
    elsewhere = jax.device_put(TABLE, jax.devices()[-1])

    def resolve(device: None, operand: jax.Array | None) -> Target:
        return Target("", "cuda" if operand is not None and operand.devices() == elsewhere.devices() else "cpu")

    with on() as patch:
        patch.setattr(GENERATE, "resolve_device", resolve)
        patch.setattr(GENERATE, "loop_compiler_options", lambda platform: UNKNOWN if platform == "cuda" else {})
        sample()
        with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSED):
            sample(table=elsewhere)


def traced(form: str) -> jax.Array:
    """The tokens by a generation inside of a trace; in one form no argument of it is a tracer."""
    if form == "arguments":
        return jax.jit(lambda key: sample(key).tokens)(KEY)
    if form == "constants":
        return jax.jit(lambda: sample().tokens)()
    if form == "scan":
        return jax.lax.scan(lambda count, _: (count, sample().tokens), 0, length=1)[1][0]
    return jax.vmap(lambda key: sample(key).tokens)(KEY[None])[0]


@pytest.mark.parametrize("form", ["arguments", "constants", "scan", "vmap"])
def test_inside_of_a_trace_there_are_none(form: str) -> None:
    want = sample().tokens
    with on(options=UNKNOWN):
        np.testing.assert_array_equal(traced(form), want)


@pytest.mark.parametrize("form", ["arguments", "constants", "scan"])
def test_options_inside_of_a_trace_are_refused_by_jax(form: str) -> None:
    with on() as patch:
        patch.setattr(GENERATE, "_compiler_options", lambda call: loop_compiler_options("cuda"))
        with pytest.raises(ValueError, match=r"`compiler_options` can only be passed to top-level"):
            traced(form)


def test_platforms_in_turn_compile_once_each() -> None:
    want = sample()
    with on(), compilations() as first:
        recorded = sample()
    with compilations() as later:
        for platform in ("cpu", "cuda", "cpu"):
            with on(platform):
                sample()
    assert (first, later) == ([1], [0])
    np.testing.assert_array_equal(recorded.tokens, want.tokens)
