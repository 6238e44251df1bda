"""Three ways to stop a loop of decode steps, on a table model whose greedy continuation is known."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.decode_loops import Decoder, by_host, by_shape, by_value, count_operations, op_by_op
from experiments.graph_replay import NEVER, choose_stop, stops_right, with_buffers
from flashspec.language_model import LanguageModel
from flashspec.measure import compile_call

CYCLE = [2, 0, 3, 1, 4]  # 0 -> 2 -> 3 -> 1 -> 0, and 4 stays


def decoder(budget=6):
    """After token 0: 2, 3, 1, 0, 2, 3."""

    def apply(table, tokens, cache):
        return table[tokens], {"length": cache["length"] + tokens.shape[1]}

    model = LanguageModel(apply, lambda batch, capacity: {"length": jnp.zeros(batch, jnp.int32)}, 5)
    pair = SimpleNamespace(target=model, target_params=jnp.eye(5)[jnp.array(CYCLE)])
    return Decoder(pair, jnp.zeros(1, jnp.int32), model.init_cache(1, 8), budget)


def loops(one):
    step = compile_call(one.step, *one.operands)
    return {
        "shape": lambda stop: by_shape(one, *one.operands, stop, budget=one.budget),
        "value": lambda stop: by_value(one, *one.operands, stop, one.budget),
        "host": lambda stop: by_host(one, step, stop, one.budget),
    }


@pytest.mark.parametrize("kind", ["shape", "value", "host"])
@pytest.mark.parametrize(
    ("stop", "expected"), [(1, [2, 3, 1]), (2, [2]), (0, [2, 3, 1, 0]), (4, [2, 3, 1, 0, 2, 3])], ids=str
)
def test_every_loop_stops_after_the_stop_token_or_the_budget(kind, stop, expected):
    run = loops(decoder())[kind]
    assert stops_right(run(stop), expected)
    if len(expected) < 6:
        assert not stops_right(run(-1), expected), "without the stop condition it goes on"


def test_without_reading_the_same_tokens_are_dispatched():
    one = decoder()
    step = compile_call(one.step, *one.operands)
    assert stops_right(by_host(one, step, 1, 3, read=False), [2, 3, 1])


@pytest.mark.parametrize(("tokens", "length"), [([2, 3, 1, 9], 3), ([2, 3, 1, 0], 4), ([2, 3, 0, 0], 3)])
def test_a_loop_that_stops_elsewhere_is_told_apart(tokens, length):
    assert stops_right((np.array([2, 3, 1, 0]), 3), [2, 3, 1])
    assert not stops_right((np.array(tokens), length), [2, 3, 1])


def test_the_stop_token_comes_late_and_first_there():
    one = decoder()
    shaped = compile_call(functools.partial(by_shape, one, budget=one.budget), *one.operands, NEVER)
    stop, expected = choose_stop(shaped)
    assert (stop, expected) == (0, [2, 3, 1, 0])


def test_a_recording_that_does_not_run_is_told_and_left_out(monkeypatch):
    monkeypatch.setattr("experiments.graph_replay.buffers", lambda: {"default": {}, "with loops": {"record": "WHILE"}})
    told = []
    job = SimpleNamespace(say=told.append)

    def compiled(refused, compiler_options):
        def run():
            if compiler_options == refused:
                raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: a loop\nat line 3")

        return run

    calls = with_buffers(job, "compiled", functools.partial(compiled, {"record": "WHILE"}))
    assert list(calls) == ["default"]
    assert told == ["compiled, command buffers with loops, does not run: UNIMPLEMENTED: a loop"]
    with pytest.raises(jax.errors.JaxRuntimeError):
        with_buffers(job, "compiled", functools.partial(compiled, {}))


def test_op_by_op_is_the_same_step():
    one = decoder()
    assert op_by_op(one)[0].tolist() == compile_call(one.step, *one.operands)()[0].tolist() == [2]


def test_operations_are_counted_inside_of_calls_and_loops():
    def body(x):
        return jnp.sin(x) + x  # two

    def looped(x):
        return jax.lax.scan(lambda c, _: (jax.jit(body)(c), None), x, None, length=5)[0]

    count = functools.partial(lambda f: count_operations(jax.make_jaxpr(f)(jnp.float32(1)).jaxpr))
    assert (count(body), count(jax.jit(body)), count(looped)) == (2, 2, 10)
