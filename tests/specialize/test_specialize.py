"""A specialised function equals the function at every length, compiles for buckets alone, and keeps a true ledger."""

import functools
import gc
import json
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.specialize import BucketEntry, ShapeBuckets, specialize
from flashspec.specialize.ledger import COLUMNS
from tests.compile_events import compilations

BUCKETS = ShapeBuckets((4, 8, 16))


def centred(x, weights, length):
    """Rows [T, F] less the mean of the first `length`, times the weights, and that mean."""
    live = (jnp.arange(x.shape[0], dtype=jnp.int32) < length)[:, None]
    mean = jnp.where(live, x, 0).sum(axis=0) / length.astype(x.dtype)
    return {"rows": (x - mean[None, :]) @ weights["w"], "mean": mean}


def ignores_length(x, weights, length):
    """WRONG: the mean is over the padding too."""
    mean = x.mean(axis=0)
    return {"rows": (x - mean[None, :]) @ weights["w"], "mean": mean}


def masks_by_product(x, weights, length):
    """WRONG: 0 times NaN is NaN."""
    live = (jnp.arange(x.shape[0], dtype=jnp.int32) < length)[:, None].astype(x.dtype)
    mean = (x * live).sum(axis=0) / length.astype(x.dtype)
    return {"rows": (x - mean[None, :]) @ weights["w"], "mean": mean}


WEIGHTS = {"w": np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)}
OUT = {"rows": 0, "mean": None}


def make(fn=centred, buckets=BUCKETS, **options):
    options = {"in_axes": (0, None), "out_axes": OUT, "length_arg": "length", "progress": False, **options}
    return specialize(fn, buckets, **options)


def rows(length, seed=1):
    return np.random.default_rng((seed, length)).normal(size=(length, 3)).astype(np.float32)


def assert_equals_unpadded(special):
    for length in range(1, 17):
        x, got = rows(length), special(rows(length), WEIGHTS)
        assert got["rows"].shape == (length, 2)
        np.testing.assert_allclose(got["rows"], (x - x.mean(axis=0)) @ WEIGHTS["w"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got["mean"], x.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_every_length_equals_numpy_without_padding():
    assert_equals_unpadded(make())
    with pytest.raises(AssertionError):
        assert_equals_unpadded(make(ignores_length))


def test_no_length_compiles_after_warming_up():
    special = make()
    with compilations() as first:
        special.warm_up(jax.ShapeDtypeStruct((1, 3), np.float32), WEIGHTS)
    inputs = [array for length in range(1, 17) for array in (rows(length), jax.device_put(rows(length)))]
    with compilations() as later:
        for array in inputs:
            special(array, WEIGHTS)
    with compilations() as jitted:
        for length in (1, 2, 3):
            jax.jit(centred)(rows(length), WEIGHTS, np.int32(length))
    assert (first, later, jitted) == ([3], [0], [3])


def test_padding_may_hold_anything():
    make().check_padding(rows(5), WEIGHTS)
    for wrong in (ignores_length, masks_by_product):
        with pytest.raises(ValueError, match=r"do not depend on the padding, got other bits of \['"):
            make(wrong).check_padding(rows(5), WEIGHTS)
    with pytest.raises(ValueError, match="so that there is padding"):
        make().check_padding(rows(8), WEIGHTS)


def test_integer_and_boolean_padding_is_poisoned_too():
    def largest(ids, flags, length):
        live = jnp.arange(ids.shape[0], dtype=jnp.int32) < length
        return jnp.where(live, ids, 0).max(), (flags & live).any()

    def leaky(ids, flags, length):
        return ids.max(), (flags & (jnp.arange(ids.shape[0], dtype=jnp.int32) < length)).any()

    operands = np.array([3, 1, 2, 0, 1], np.int32), np.zeros(5, bool)
    options = {"in_axes": 0, "out_axes": None, "length_arg": 2, "progress": False}
    specialize(largest, BUCKETS, **options).check_padding(*operands)
    with pytest.raises(ValueError, match=r"other bits of \[0\]"):
        specialize(leaky, BUCKETS, **options).check_padding(*operands)


def test_lengths_of_rows_pass_through():
    """Rows [B, T] with lengths [B], by keyword or in their place."""

    def total(x, lengths, scale=1.0):
        live = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
        return jnp.where(live, x, 0).sum(axis=1) * scale

    special = specialize(total, BUCKETS, in_axes={"x": 1}, out_axes=None, length_arg="lengths", progress=False)
    x, lengths = np.arange(10, dtype=np.float32).reshape(2, 5), np.array([2, 5], np.int32)
    np.testing.assert_array_equal(special(x, lengths=lengths), [1, 35])
    np.testing.assert_array_equal(special(x, lengths, 2.0), [2, 70])
    special.check_padding(x, lengths=lengths)


def test_positional_operands_pass_over_the_length():
    special = specialize(
        lambda x, length, factor: x * factor,
        BUCKETS,
        in_axes=(-1, None),
        out_axes=-1,
        length_arg="length",
        progress=False,
    )
    np.testing.assert_array_equal(special(np.ones((1, 3), np.float32), 2.0), [[2, 2, 2]])


def test_it_decorates():
    @functools.partial(specialize, buckets=BUCKETS, in_axes=0, out_axes=0, length_arg=None, progress=False)
    def running_sum(x):
        """Sums of the first elements."""
        return jnp.cumsum(x)

    assert running_sum.__name__ == "running_sum"
    assert running_sum.__doc__ == "Sums of the first elements."
    np.testing.assert_array_equal(running_sum(np.ones(3, np.float32)), [1, 2, 3])
    running_sum.check_padding(np.ones(3, np.float32))


def test_other_shapes_and_settings_get_executables_of_their_own():
    special = make()
    special(rows(3), WEIGHTS)
    special(rows(3), {"w": np.ones((3, 5), np.float32)})
    with jax.default_matmul_precision("highest"):
        special(rows(3), WEIGHTS)
    assert special.ledger[4].compilations == 3
    special(rows(2), WEIGHTS)
    assert special.ledger[4].compilations == 3


def test_a_placed_operand_stays_where_it_is():
    device = jax.devices()[-1]
    result = make()(jax.device_put(rows(3), device), jax.device_put(WEIGHTS, device))
    assert result["rows"].devices() == {device}
    assert result["rows"].shape == (3, 2)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((np.ones((17, 3), np.float32), WEIGHTS), "at most 16, the bound of the last bucket, got 17"),
        ((np.ones((0, 3), np.float32), WEIGHTS), "`length`: expected an integer of at least 1, got 0"),
        ((np.float32(1), WEIGHTS), r"`x`: expected an array with an axis 0, got shape \[\]"),
        (("text", WEIGHTS), r"`x`: expected an array \(bind what is static"),
        ((rows(3), {"w": None, "b": object()}), r"`weights\['b'\]`: expected an array"),
    ],
)
def test_a_wrong_operand_is_named(operands, message):
    with pytest.raises(ValueError, match=message):
        make()(*operands)


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (lambda x, length: x.sum(), {}, r"`the result`: expected an array with an axis 0, got shape \[\]"),
        (lambda x, length: x[:2], {}, r"`out_axes`: expected the result with the padded size 4 on axis 0.*\[2\]"),
        # The size of the first bucket by accident: it is another at the last one.
        (lambda x, length: jnp.ones(4), {}, r"`out_axes`: expected the result with the padded size 16.*\[4\]"),
        (lambda x, length: x, {"out_axes": (0, 0)}, "`out_axes`: expected a pytree prefix"),
        (lambda x, length: x, {"out_axes": 1.0}, "`out_axes`: expected integers and None, got 1.0"),
    ],
)
def test_results_without_the_padded_axis_are_refused(fn, options, message):
    special = specialize(fn, BUCKETS, **{"in_axes": 0, "out_axes": 0, "length_arg": 1, "progress": False, **options})
    with pytest.raises(ValueError, match=message):
        special(np.ones(3, np.float32))
    with pytest.raises(ValueError, match=message):
        special(np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": ()}, "`bounds`: expected at least one bound"),
        ({"buckets": (8, 4)}, "strictly increasing"),
        ({"buckets": (0, 4)}, "at least 1"),
        ({"fn": lambda *rows: rows}, "parameters all have names"),
        ({"length_arg": "size"}, "`length_arg`: expected a parameter of the function"),
        ({"length_arg": 3}, "`length_arg`"),
        ({"in_axes": (0,)}, "`in_axes`: expected 2 entries"),
        ({"in_axes": {"y": 0}}, "`in_axes`: expected names out of"),
        ({"in_axes": (0, None, 0)}, "None for the length"),
        ({"max_executables": 0}, "`max_executables`"),
    ],
)
def test_a_wrong_specialisation_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_axes_that_cannot_be_padded_are_refused():
    with pytest.raises(ValueError, match=r"padded axes of one length, got x: 3, y: 4"):
        specialize(lambda x, y: x, BUCKETS, in_axes=0, out_axes=0, length_arg=None)(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="at least one argument with a padded axis"):
        make(in_axes=None)(rows(3), WEIGHTS)
    with pytest.raises(ValueError, match="call the function itself"):
        jax.jit(lambda x: make()(x, WEIGHTS))(rows(3))
    with pytest.raises(ValueError, match="array of numbers along a padded axis"):
        specialize(lambda x: x, BUCKETS, in_axes=0, out_axes=0, length_arg=None)(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(TypeError, match="missing a required argument: 'weights'"):
        make()(rows(3))


def wait_for(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "it took too long"
        time.sleep(0.005)


class Gate:
    """A function whose tracing at one size waits until it is let through, as a long compilation would."""

    def __init__(self, size):
        self.size, self.error = size, None
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, x, length):
        if x.shape[0] == self.size:
            self.reached.set()
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error
        return x + jnp.where(length > 0, 1, 0).astype(x.dtype)


def gated(gate, **options):
    special = specialize(gate, (4, 8, 16), in_axes=0, out_axes=0, length_arg="length", progress=False, **options)
    gate.opened.set()
    special.warm_up(np.ones(1, np.float32), bounds=(8, 16))
    gate.opened.clear()
    gate.reached.clear()
    return special


def test_a_larger_bucket_serves_while_one_compiles():
    gate = Gate(4)
    special = gated(gate, background=True)
    for _ in range(3):
        np.testing.assert_array_equal(special(np.ones(3, np.float32)), [2, 2, 2])
    assert gate.reached.wait(60)
    entry = special.ledger[4]
    assert (entry.calls, entry.borrowed, entry.hits, entry.lender, entry.padding) == (3, 3, 0, 8, 15)
    assert entry.served == 0, "calls that a larger bucket served are not this bucket's"
    gate.opened.set()
    wait_for(lambda: entry.compilations)
    wait_for(lambda: special(np.ones(3, np.float32)) is not None and entry.hits >= 3)
    assert entry.before_is == "bucket 8"
    assert entry.borrowed_calls == entry.borrowed - 1, "the first call of an executable is no steady one"
    assert entry.net_benefit_s == pytest.approx(
        entry.served * (entry.borrowed_s / entry.borrowed_calls - entry.steady_s / entry.steady_calls) - entry.compile_s
    )


def test_without_a_larger_bucket_a_call_compiles_its_own():
    special = make(background=True)
    assert special(rows(12), WEIGHTS)["rows"].shape == (12, 2)
    assert special.ledger[16].waits == 1


def test_an_error_in_the_background_is_raised_by_the_next_call():
    gate = Gate(4)
    special = gated(gate, background=True)
    gate.error = RuntimeError("no such luck")
    special(np.ones(3, np.float32))
    gate.opened.set()

    def raised():
        try:
            special(np.ones(3, np.float32))
        except RuntimeError as found:
            return "no such luck" in str(found)
        return False

    wait_for(raised)
    gate.error = None
    wait_for(lambda: special(np.ones(3, np.float32)) is not None and special.ledger[4].hits)


def test_the_background_keeps_the_settings_of_the_caller(x64):
    special = specialize(lambda x: x * 2, (4, 8), in_axes=0, out_axes=0, length_arg=None, background=True)
    special.warm_up(np.ones(1), bounds=(8,))
    wait_for(lambda: special(np.ones(3)).dtype == np.float64 and special.ledger[4].hits)


def test_threads_that_ask_at_once_compile_once():
    special = make()
    with compilations() as count:
        threads = [threading.Thread(target=special, args=(rows(3), WEIGHTS)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    entry = special.ledger[4]
    assert count == [1]
    assert (entry.calls, entry.compilations, entry.hits + entry.waits) == (8, 1, 8)


def test_the_executable_that_was_unused_for_longest_goes():
    special = make(max_executables=2)
    for length in (3, 7, 3, 15):  # the one for 8 goes
        special(rows(length), WEIGHTS)
    assert [entry.memory_bytes > 0 for entry in special.ledger.entries.values()] == [True, False, True]
    for length in (3, 15, 7):
        special(rows(length), WEIGHTS)
    assert [entry.compilations for entry in special.ledger.entries.values()] == [1, 2, 1]
    with pytest.raises(ValueError, match="at most max_executables = 2"):
        special.warm_up(rows(1), WEIGHTS)


def live_executables():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.parametrize(("most", "kept"), [(1, 1), (None, 3)])
def test_an_evicted_executable_is_freed(most, kept):
    special, before = make(max_executables=most), live_executables()
    for length in (3, 7, 15):
        special(rows(length), WEIGHTS)
    assert live_executables() == before + kept


def test_the_ledger_counts_calls_and_padding(tmp_path, capsys):
    special = make()
    special.warm_up(rows(1), WEIGHTS, bounds=(4,))
    for length in (1, 2, 4, 5):
        special(rows(length), WEIGHTS)
    four, eight = special.ledger[4], special.ledger[8]
    assert (four.calls, four.hits, four.waits, four.padding, four.steady_calls) == (3, 3, 0, 3 + 2, 2)
    assert (eight.calls, eight.hits, eight.waits, eight.padding, eight.steady_calls) == (1, 0, 1, 3, 0)
    assert eight.time_after is eight.net_benefit_s is None, "a first call is no steady one"
    special.time_op_by_op(rows(3), WEIGHTS)
    assert four.before_is == "op by op"
    assert four.net_benefit_s == pytest.approx(3 * (four.op_by_op_s - four.time_after) - four.compile_s)
    special.ledger.write_json(tmp_path / "new" / "ledger.json")
    kept = json.loads((tmp_path / "new" / "ledger.json").read_text())
    assert [entry["bound"] for entry in kept] == [4, 8, 16]
    assert kept[0]["net_benefit_s"] == four.net_benefit_s
    header, *table = str(special.ledger).splitlines()
    assert header.split() == " ".join(COLUMNS).split()
    assert [line.split()[0] for line in table] == ["4", "8", "16"]


def test_the_net_benefit_is_that_of_the_chapter():
    """C = 3 s and 2 to 1.5 ms: 6,000 calls break even, and the first call is no steady one."""
    entry = BucketEntry(64, compile_s=3.0, waits=1, hits=5999, steady_s=1.5, steady_calls=1000, op_by_op_s=0.002)
    assert entry.net_benefit_s == pytest.approx(0)
    entry.first_calls_s = 100.0
    assert entry.net_benefit_s == pytest.approx(0)
    entry.borrowed, entry.borrowed_calls, entry.borrowed_s = 4000, 4000, 8.0
    assert entry.net_benefit_s == pytest.approx(0), "borrowed calls saved nothing"
    entry.hits += 1
    assert entry.net_benefit_s > 0


def test_warming_up_shows_progress(capsys):
    make(progress=True).warm_up(rows(1), WEIGHTS, bounds=(4,))
    shown = capsys.readouterr()
    assert "compiling centred" in shown.out + shown.err
    with pytest.raises(ValueError, match="`bounds`: expected one of 4, 8, 16, got 5"):
        make().warm_up(rows(1), WEIGHTS, bounds=(5,))


def test_a_program_can_be_exported():
    special = make()
    exported = special.export(rows(1), WEIGHTS, bound=8)
    padded, want = np.pad(rows(5), ((0, 3), (0, 0))), special(rows(5), WEIGHTS)
    result = exported.call(padded, WEIGHTS, np.int32(5))
    np.testing.assert_array_equal(result["rows"][:5], want["rows"])
    np.testing.assert_array_equal(result["mean"], want["mean"])
    assert special.export(rows(1), WEIGHTS, bound=4, platforms=("cpu", "cuda")).platforms == ("cpu", "cuda")


def test_an_exported_program_survives_as_bytes():
    pytest.importorskip("flatbuffers", reason="jax serialises with it")
    data = make().export(rows(1), WEIGHTS, bound=4).serialize()
    result = jax.export.deserialize(data).call(np.ones((4, 3), np.float32), WEIGHTS, np.int32(4))
    np.testing.assert_array_equal(result["mean"], [1, 1, 1])


PROCESS = """
import sys
import numpy as np
from flashspec.specialize import specialize, use_persistent_cache

use_persistent_cache(sys.argv[1])
special = specialize(lambda x: x @ x.T + 1, (4, 8), in_axes=0, out_axes=0, length_arg=None)
print(special(np.ones((3, 2), np.float32)).shape, special.ledger[4].loads)
"""


def test_another_process_loads_what_one_compiled(tmp_path):
    def loads(folder):
        command = [sys.executable, "-c", PROCESS, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout.split()[-1]

    assert [loads(tmp_path), loads(tmp_path)] == ["0", "1"]
