"""The choice among implementations: by name, by refusal, by platform, and what a split operand shows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashspec import selection
from flashspec.selection import Target

KNOWN = ("fast", "slow")


def test_names_are_checked():
    assert selection.named("fast", KNOWN) == ("fast",)
    assert selection.named(["slow", "fast"], KNOWN) == ("slow", "fast")
    for wrong in ("quick", ("fast", "quick"), ()):
        with pytest.raises(ValueError, match="`implementation`"):
            selection.named(wrong, KNOWN)


def test_the_first_without_refusals_is_taken_and_every_reason_is_kept():
    refusals = {"fast": ("too odd", "too long"), "slow": ()}
    assert selection.first_that_can(KNOWN, refusals.__getitem__) == "slow"
    with pytest.raises(NotImplementedError, match=r"(?s)fast: too odd.*fast: too long.*slow: no"):
        selection.first_that_can(KNOWN, (refusals | {"slow": ("no",)}).__getitem__)


def test_concrete_operands_choose_for_where_they_lie():
    asked = []

    def select(target):
        asked.append(target.platform)
        return target.platform

    assert selection.run_where_lowered(jnp.ones(2), Target("", "tpu"), select, lambda name, x: name) == "tpu"
    assert asked == ["tpu"]


@pytest.mark.parametrize("refusing", [False, True])
def test_traced_operands_run_what_is_chosen_for_the_platform_that_they_are_lowered_for(refusing, monkeypatch):
    """Traced for "cuda" by default, lowered for this CPU: its own choice runs, unless nothing there can."""
    monkeypatch.setattr(selection, "targets", lambda: (Target("", "cpu"), Target("", "cuda", "9.0")))

    def select(target):
        if refusing and target.platform == "cpu":
            raise NotImplementedError("not here")
        return {"cpu": "slow", "cuda": "fast"}[target.platform]

    def execute(name, x):
        return x * {"slow": 2, "fast": 3}[name]

    run = functools.partial(selection.run_where_lowered, target=Target("", "cuda"), select=select, execute=execute)
    np.testing.assert_array_equal(jax.jit(run)(jnp.ones(2)), [3, 3] if refusing else [2, 2])


def test_devices_are_named_by_kind():
    assert selection.resolve_device("NVIDIA H200", None) == ("NVIDIA H200", "cuda", "9.0")
    assert selection.resolve_device("TPU v5e", None) == ("TPU v5e", "tpu", None)
    here = jax.devices()[0]
    assert selection.resolve_device(here, None) == (here.device_kind, selection.platform_of(here), None)
    assert selection.resolve_device(None, jax.ShapeDtypeStruct((1,), np.float32)) == selection.resolve_device(
        here, None
    )
    for wrong in ("abacus", ""):
        with pytest.raises(ValueError, match="`device`"):
            selection.resolve_device(wrong, None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("spec", "expected"), [(P(), ()), (P("a"), (0,)), (P(None, "b"), (1,)), (P("b", "a"), (0, 1))])
def test_split_axes_are_seen(kind, spec, expected):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=jax.devices()[:4])
    array = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, spec))
    assert selection.split_axes(array) == expected
    assert selection.split_axes(jax.ShapeDtypeStruct((4, 4), np.float32, sharding=array.sharding)) == expected
    seen = []
    jax.jit(lambda x: seen.append(selection.split_axes(x)))(array)
    assert seen == [expected if kind == AxisType.Explicit else ()]
    assert selection.split_axes(np.ones((4, 4))) == ()


def test_an_axis_over_one_device_is_not_split():
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    assert selection.split_axes(jax.device_put(jnp.ones(4), NamedSharding(mesh, P("a")))) == ()
