"""The adaptor of the portable GPU kernels: what it chooses, refuses and hands on, over stand-ins on any machine."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec.attention import (
    Ampere,
    AmpereBackwardConfig,
    AmpereForwardConfig,
    Contiguous,
    Hopper,
    ampere,
    dot_product_attention,
    plan_attention,
    tuning,
)
from flashspec.attention.backends import BACKENDS
from flashspec.attention.gpu_kernels import Kernels
from flashspec.attention.tuning import Entry, TuningKey, write
from tests.attention import hopper_twin

A100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"


def plan(T: int = 1024, H: int = 128, **options: Any) -> Any:
    shape = jax.ShapeDtypeStruct((2, T, 4, H), jnp.bfloat16)
    given: dict[str, Any] = {"is_causal": True, "device": A100, "implementation": "ampere"} | options
    return plan_attention(shape, shape, shape, **given)


@contextlib.contextmanager
def by_twin(forward: Any = hopper_twin.forward, backward: Any = hopper_twin.backward) -> Iterator[None]:
    """Within it, "ampere" runs on any platform, its kernels replaced by these."""
    kernels, compiled = Kernels(forward, backward), BACKENDS["ampere"]
    BACKENDS["ampere"] = dataclasses.replace(  # type: ignore[index]
        compiled,
        supports=lambda request: (),
        attend=functools.partial(ampere.ampere_attention, kernels),
        stats=functools.partial(ampere.ampere_stats, kernels),
    )
    jax.clear_caches()  # a program of other stand-ins must not answer
    try:
        yield
    finally:
        BACKENDS["ampere"] = compiled  # type: ignore[index]
        jax.clear_caches()


def test_the_plan_says_how_tiles_are_copied_and_what_a_wide_head_costs() -> None:
    older, hopper = plan(), plan(device=H200)
    assert (older.forward.config["bulk"], hopper.forward.config["bulk"]) == (0, 1)
    assert (older.backward.implementation, older.backward.config["backward_bulk"]) == ("ampere", 0)
    assert older.forward.source == older.backward.source == "heuristic"
    wide = plan(H=192)
    assert (wide.forward.implementation, wide.backward.implementation) == ("ampere", "blockwise")


def test_copies_are_counted() -> None:
    assert plan().copies == {}
    assert plan(T=192).copies == dict.fromkeys(("query", "key", "value", "output"), 2 * 256 * 4 * 128 * 2)


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        ("cpu", {}, "not on cpu"),
        (A100, {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "has no dropout"),
        (A100, {"bias": jax.ShapeDtypeStruct((1, 1, 1, 1024), jnp.float32)}, "adds no bias"),
    ],
)
def test_refusals(device: str, options: dict[str, Any], reason: str) -> None:
    found = plan(implementation=("ampere", "blockwise"), device=device, **options)
    assert found.forward.implementation == "blockwise"
    assert any(reason in line for line in found.rejected["ampere"])


def test_gpus_before_and_after() -> None:
    request = plan().request
    for capability, refused in (("7.5", True), ("8.0", False), ("8.9", False), ("10.0", False), (None, True)):
        reasons = ampere.refusals(dataclasses.replace(request, compute_capability=capability))
        assert any("runs on cuda of compute capability 8.0 or more" in reason for reason in reasons) == refused


def test_dq_has_its_own_kernel_where_memory_is_short() -> None:
    """A GPU with a copy engine and 99 KB: staging a block of dQ does not fit at H = 128."""
    request = dataclasses.replace(plan().request, platform="cuda", compute_capability="12.0")
    assert ampere.launch_config(request)["backward_deterministic"] == 1
    assert ampere.launch_config(dataclasses.replace(request, H=64, Hv=64))["backward_deterministic"] == 0


# Settings.


def test_what_the_caller_gives_comes_first_and_copies_as_the_gpu_does() -> None:
    settings = Ampere(AmpereForwardConfig(tile_q=64, block_kv=32), AmpereBackwardConfig(stages=1, warpgroups=1), True)
    for device, bulk in ((A100, 0), (H200, 1)):
        found = plan(implementation=settings, device=device)
        assert (found.forward.source, found.backward.source) == ("given", "given")
        names = ("tile_q", "block_kv", "bulk", "backward_stages", "backward_warpgroups", "backward_bulk")
        assert [found.backward.config[name] for name in names] == [64, 32, bulk, 1, 1, bulk]
        assert found.backward.config["backward_deterministic"] == 1
    assert plan().backward.config["backward_deterministic"] == 0
    assert plan(implementation=("cudnn", settings)).forward.implementation == "cudnn"


def test_settings_of_both_kinds_stand_beside_each_other() -> None:
    both = (Hopper(deterministic=True), Ampere(AmpereForwardConfig(stages=1)))
    hopper, other = plan(implementation=both, device=H200), plan(implementation=both)
    assert (hopper.forward.implementation, hopper.backward.config["backward_deterministic"]) == ("hopper", 1)
    assert (other.forward.implementation, other.forward.config["stages"]) == ("ampere", 1)
    assert other.backward.config["backward_deterministic"] == 0


def test_settings_that_a_call_cannot_have_are_refused_before_compute() -> None:
    wide = AmpereForwardConfig(tile_q=128, block_kv=128)
    with pytest.raises(NotImplementedError, match=r"the forward settings given: needs \d+ registers of 255"):
        plan(implementation=Ampere(wide))
    large = AmpereBackwardConfig(block_q=128)
    with pytest.raises(NotImplementedError, match="the backward settings given: block_q = 128 does not fit the regis"):
        plan(implementation=Ampere(backward=large))
    with pytest.raises(ValueError, match="`backward`: expected an AmpereBackwardConfig or None"):
        Ampere(backward=wide)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`deterministic`: expected"):
        Ampere(deterministic=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`implementation`: expected the Ampere kernels at most once"):
        plan(implementation=(Ampere(), Hopper(), "ampere"))


def test_what_is_given_reaches_the_kernels() -> None:
    seen: dict[str, Any] = {}

    def forward(*arrays: Any, config: Any, **options: Any) -> Any:
        seen["forward"] = config
        return hopper_twin.forward(*arrays, config=config, **options)

    def backward(*arrays: Any, config: Any, deterministic: bool, **options: Any) -> Any:
        seen.update(backward=config, deterministic=deterministic)
        return hopper_twin.backward(*arrays, config=config, **options)

    x = jnp.ones((1, 8, 1, 64))
    given = Ampere(AmpereForwardConfig(tile_q=64), AmpereBackwardConfig(stages=1), deterministic=True)
    with by_twin(forward, backward):
        jax.grad(lambda x: jnp.sum(dot_product_attention(x, x, x, implementation=given)))(x)
        assert seen == {"forward": given.forward, "backward": given.backward, "deterministic": True}
        jax.grad(lambda x: jnp.sum(dot_product_attention(x, x, x, implementation="ampere")))(x)
        assert not seen["deterministic"]


def test_odd_sizes_are_padded_and_cut_again() -> None:
    """T = 70 and S = 130 become 128 and 256, heads of 80 become 128."""
    shapes: dict[str, Any] = {}

    def forward(query: Any, key: Any, *arrays: Any, **options: Any) -> Any:
        shapes.update(query=query.shape, key=key.shape)
        return hopper_twin.forward(query, key, *arrays, **options)

    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, n, 2, 80)), jnp.float32) for n in (70, 130, 130))

    def call(implementation: str) -> Any:
        def total(*x: Any) -> Any:
            return jnp.sum(
                dot_product_attention(*x, window=(50, 20), q_positions=Contiguous(60), implementation=implementation)
                ** 2
            )

        return jax.grad(total, (0, 1, 2))(query, key, value)

    want = call("reference")
    with by_twin(forward):
        got = call("ampere")
    assert (shapes["query"], shapes["key"]) == ((1, 128, 2, 128), (1, 256, 2, 128))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


# Tuned files.

KEY = TuningKey("bfloat16", 8, 1024, 1024, 1, 128, 128, "causal")
FORWARD = Entry(KEY, AmpereForwardConfig(block_kv=32, bulk=True), 1e-4, 1.1e-4, 2e-3, "0.11.2")
BACKWARD = Entry(dataclasses.replace(KEY, deterministic=True), AmpereBackwardConfig(stages=1), 1e-4, 1.1e-4, 2e-3, "x")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tuned files of this test alone."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    (tmp_path / A100).mkdir()
    for kernel, entry in (("ampere_attention_forward", FORWARD), ("ampere_attention_backward", BACKWARD)):
        (tmp_path / A100 / f"{kernel}.json").write_text(write([entry], kernel, A100), encoding="utf-8")
    return tmp_path


def test_a_call_takes_the_entry_of_its_own_shape_and_device(folder: Path) -> None:
    tuned = plan()
    assert (tuned.forward.source, tuned.backward.source) == ("tuned", "heuristic")
    assert (tuned.forward.config["block_kv"], tuned.forward.config["bulk"]) == (32, 0)
    deterministic = plan(implementation=Ampere(deterministic=True)).backward
    assert (deterministic.source, deterministic.config["backward_stages"]) == ("tuned", 1)
    others = [plan(2048), plan(is_causal=False), plan(device=H200)]
    assert [other.forward.source for other in others] == ["heuristic"] * 3


def test_a_corrupt_file_is_named(folder: Path) -> None:
    file = folder / A100 / "ampere_attention_forward.json"
    held = json.loads(file.read_text())
    held["entries"][0]["config"]["tile_q"] = 96
    file.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"ampere_attention_forward\.json: entry 0 .*`tile_q`: expected 64 or 128"):
        plan()
