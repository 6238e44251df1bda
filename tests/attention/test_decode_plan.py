"""The plan of a decoding call: against the compiled program, and its counts against loops."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashspec import plan_decode, selection
from flashspec.attention import DenseView, PagedView, decode, decode_attention, decode_plan, tpu_decode
from flashspec.attention.decode_plan import plan_decode as plan
from flashspec.attention.settings import Hopper
from flashspec.selection import Target
from pallas_kernels.gpu.hopper import attention_decode_config
from pallas_kernels.gpu.hopper.attention_decode_config import DecodeConfig
from pallas_kernels.tpu.attention_decode import Cache, DecodeRows
from tests.attention.test_api import scopes
from tests.attention.test_decode import LENGTHS, VIEWS, B, H, K, N, S, T, history, make_view, options_of
from tests.mutants import mutant

STRUCT = jax.ShapeDtypeStruct


def call(kind: str) -> tuple[jax.Array, Any]:
    q, k, v = history()
    return jnp.asarray(q), make_view(kind, k, v)


@pytest.mark.parametrize("implementation", [None, "reference", ("hopper", "blockwise")])
@pytest.mark.parametrize("kind", VIEWS)
def test_the_program_holds_what_the_plan_names(kind: str, implementation: Any) -> None:
    q, view = call(kind)
    options = options_of(kind, implementation=implementation)
    planned = plan(q, view, **options)
    assert planned.forward.implementation == ("reference" if implementation == "reference" else "blockwise")
    assert planned.rejected.keys() == {"hopper", "ampere", "tpu", "cudnn"}
    decode = functools.partial(decode_attention, **options)
    assert scopes(jax.jit(decode).lower(q, view).compile().as_text()) == {planned.forward.implementation}
    slope = jax.grad(lambda q: jnp.sum(decode(q, view)))
    assert scopes(jax.jit(slope).lower(q).compile().as_text()) == {planned.backward.implementation}


def test_a_plan_for_another_implementation_is_noticed() -> None:
    q, view = call("dense")
    text = jax.jit(functools.partial(decode_attention, implementation="reference")).lower(q, view).compile().as_text()
    assert scopes(text) != {plan(q, view).forward.implementation}


def wide(kind: str, lengths: Any = None) -> tuple[Any, Any]:
    """Shapes that the Hopper kernel takes."""
    keys, length = STRUCT((2, 256, 2, 64), jnp.bfloat16), STRUCT((2,), jnp.int32) if lengths is None else lengths
    query = STRUCT((2, 3, 4, 64), jnp.bfloat16)
    if kind == "dense":
        return query, DenseView(keys, keys, length)
    pages = STRUCT((20, 32, 2, 64), jnp.bfloat16)
    return query, PagedView(pages, pages, STRUCT((2, 8), jnp.int32), length)


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_the_program_for_a_hopper_gpu_holds_what_the_plan_names(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = (Target("cpu", "cpu"), Target("NVIDIA H200", "cuda", "9.0"))
    monkeypatch.setattr(selection, "targets", lambda: targets)
    traced = jax.jit(decode_attention).trace(*wide(kind))
    for target in targets:
        planned = plan(*wide(kind), device=target.kind)
        text = traced.lower(lowering_platforms=(target.platform,)).as_text(debug_info=True)
        assert scopes(text) == {planned.forward.implementation}
        assert text.count("custom_call @mosaic_gpu") == (2 if planned.forward.implementation == "hopper" else 0)
    assert planned.forward.implementation == "hopper"
    assert planned.backward.implementation == "blockwise"
    assert planned.forward.config.keys() >= {"block_keys", "programs", "stages"}
    assert planned.forward.source in ("heuristic", "tuned")
    assert planned.copies == {}
    bound = planned.forward.lower_bound_seconds
    assert bound is not None
    assert bound == pytest.approx(planned.forward.bytes / 4.8e12)
    assert "hopper" in str(planned)


@pytest.mark.parametrize(
    ("num_splits", "given", "launches"),
    [(None, None, 1), (2, None, 2), (None, DecodeConfig(), 2), (None, DecodeConfig(64, cluster=4), 1)],
)
def test_the_plan_says_how_many_kernels_there_are(
    num_splits: int | None, given: DecodeConfig | None, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_decode_config, "CLUSTERS", (4,))
    monkeypatch.setattr(selection, "targets", lambda: (Target("cpu", "cpu"), Target("NVIDIA H200", "cuda", "9.0")))
    keys = STRUCT((2, 256, 2, 128), jnp.bfloat16)
    arrays = STRUCT((2, 3, 4, 128), jnp.bfloat16), DenseView(keys, keys, STRUCT((2,), jnp.int32))
    options: dict[str, Any] = {"num_splits": num_splits, "implementation": (Hopper(decode=given), "blockwise")}
    config = plan(*arrays, device="NVIDIA H200", **options).forward.config
    assert config["launches"] == launches
    assert (config["cluster"], config["programs"]) == ((4, 16) if launches == 1 else (1, 132))
    traced = jax.jit(functools.partial(decode_attention, **options)).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == launches


def test_pinned_splits_take_no_clusters() -> None:
    options: Any = {"num_splits": 2, "implementation": Hopper(decode=DecodeConfig(64, cluster=4))}
    keys = STRUCT((2, 256, 2, 128), jnp.bfloat16)
    view = DenseView(keys, keys, STRUCT((2,), jnp.int32))
    with pytest.raises(ValueError, match="`num_splits`: expected None beside settings for clusters of 4, got 2"):
        plan(STRUCT((2, 3, 4, 128), jnp.bfloat16), view, device="NVIDIA H200", **options)


def test_parts_are_those_of_the_program() -> None:
    q, view = call("dense")
    assert plan(q, view).forward.config == {"splits": 1, "part": S}
    for splits in (3, 5, 7):
        config = plan(q, view, num_splits=splits).forward.config
        text = jax.jit(functools.partial(decode_attention, num_splits=splits)).lower(q, view).as_text()
        assert text.count("dot_general") == 2 * config["splits"]
    pinned = plan(*wide("dense"), device="NVIDIA H200", num_splits=2)
    assert (pinned.forward.config["splits"], pinned.forward.config["part"]) == (2, 128)
    assert plan(*wide("paged"), device="cpu").copies == dict.fromkeys(
        ("key_pages", "value_pages"), 2 * 256 * 2 * 64 * 2
    )


@pytest.mark.parametrize("num_splits", [None, 3])
def test_the_launch_on_a_tpu_is_the_adaptor_s(num_splits: int | None) -> None:
    keys = STRUCT((2, 2048, 8, 128), jnp.bfloat16)
    view = DenseView(keys, keys, STRUCT((2,), jnp.int32))
    launched: list[Any] = []

    def kernel(*arrays: Any, config: Any, **options: Any) -> Any:
        launched.append(config)
        raise StopIteration

    planned = plan(STRUCT((2, 3, 16, 128), jnp.bfloat16), view, device="TPU v5e", num_splits=num_splits)
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (STRUCT((2, 3, 16, 128), jnp.bfloat16), view))
    _, operands = decode._prepare(*arrays, q_lengths=None, window=None)
    stand_in = tpu_decode.Kernel(kernel, Cache, DecodeRows)
    with pytest.raises(StopIteration):
        tpu_decode._attend(tpu_decode._Program(stand_in, lambda _: None, planned.request, num_splits), operands)
    assert planned.forward.implementation == "tpu"
    assert planned.forward.config == dataclasses.asdict(launched[0])


def counted(lengths: np.ndarray, left: int | None) -> tuple[int, int]:
    """Pairs, and positions that some query sees, one by one."""
    pairs, seen = 0, set()
    for b, length in enumerate(np.minimum(lengths, S)):
        for at in range(length - T, length):
            keys = [key for key in range(at + 1) if left is None or key >= at - left]
            pairs += len(keys)
            seen |= {(b, key) for key in keys}
    return pairs, len(seen)


def assert_counts(module: Any) -> None:
    q, k, v = history()
    for lengths in (LENGTHS, np.array([2, 0, S + 3], np.int32)):
        for left in (None, 5, 40):
            view = make_view("dense", k, v, np.minimum(lengths, S))
            view = DenseView(view.key, view.value, jnp.asarray(lengths))
            planned = module.plan_decode(jnp.asarray(q), view, window=left).forward
            pairs, seen = counted(lengths, left)
            assert planned.flops == 2 * (H + v.shape[-1]) * N * pairs
            queries = B * T * N * (H + v.shape[-1]) * 4
            assert planned.bytes == seen * K * (H + v.shape[-1]) * 4 + queries + lengths.nbytes


def test_counts_are_those_of_loops() -> None:
    assert_counts(decode_plan)


@pytest.mark.parametrize(
    "edit",
    [
        ("seen = held - request.T + 1 +", "seen = held - request.T +"),
        ("min(total, left + request.T)", "min(total, left + 1)"),
        ("None if left is None else left + 1)", "None)"),
        ("np.asarray(view.length), 0, None) if known", "np.asarray(view.length), 0, None) if not known"),
    ],
)
def test_another_count_is_seen(edit: tuple[str, str]) -> None:
    with pytest.raises((AssertionError, TypeError)):
        assert_counts(mutant(decode_plan, edit))


def test_what_cannot_be_planned() -> None:
    query, view = wide("dense")
    with pytest.raises(NotImplementedError, match=r"hopper: runs on cuda of compute capability 9\.0 only, not on cpu"):
        plan_decode(query, view, implementation="hopper", device="cpu")
    with pytest.raises(ValueError, match="`query`: expected 1 to 16 new tokens"):
        plan_decode(STRUCT((2, 17, 4, 64), jnp.bfloat16), view)
    with pytest.raises(ValueError, match="`num_splits`"):
        plan_decode(query, view, num_splits=0)
    with pytest.raises(ValueError, match="`implementation`: expected one of"):
        plan_decode(query, view, implementation="numpy")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_on_a_gpu(kind: str) -> None:
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), wide(kind))
    planned = plan(*arrays)
    assert planned.forward.implementation == plan(*wide(kind)).forward.implementation
    text = jax.jit(decode_attention).lower(*arrays).compile().as_text()
    assert scopes(text) == {planned.forward.implementation}


@pytest.mark.parametrize(("device", "cores"), [("NVIDIA H200", 132), ("NVIDIA H100 PCIe", 114)])
def test_a_launch_is_shaped_for_the_device_that_is_named(device: str, cores: int) -> None:
    """As many programs as run at once, and clusters only where all of them do."""

    def config(rows: int, slots: int) -> Any:
        keys = STRUCT((rows, slots, 8, 128), jnp.bfloat16)
        view = DenseView(keys, keys, STRUCT((rows,), jnp.int32))
        return plan(STRUCT((rows, 1, 32, 128), jnp.bfloat16), view, device=device).forward.config

    assert config(1, 32768)["programs"] == cores
    assert config(1, 2048)["cluster"] == 8
    assert config(2, 2048)["launches"] == (1 if cores >= 2 * 8 * 8 else 2)
