"""Decoding by our Hopper kernel: from a cache view and what hides its keys to what the kernel reads.

The kernel is passed in, so that tests run the very same code over a stand-in. It reads views where they lie. It has no
backward: gradients are those of the same attention on XLA, which is passed in too.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.attention import tuning
from flashspec.attention.lifting import lift
from flashspec.attention.request import AttentionRequest
from flashspec.attention.settings import Hopper, settings_of
from flashspec.attention.views import PagedView, View, WindowView
from flashspec.checks import fail
from flashspec.devices import multiprocessors
from flashspec.selection import elsewhere
from pallas_kernels.gpu.hopper.attention_decode_config import (
    NOWHERE,
    DecodeCall,
    DecodeConfig,
    DecodeOperands,
    DecodeShape,
    config_refusals,
    heuristic,
)
from pallas_kernels.gpu.hopper.attention_decode_config import (
    refusals as kernel_refusals,
)
from pallas_kernels.launch import cdiv

CAPABILITY = "9.0"

type Kernel = Callable[[DecodeCall, DecodeOperands], tuple[Array, ...]]

# Axes of what the kernel takes, as `lift` has them.
_AXES = {
    "query": "B T N H",
    "key": "B S K H",
    "value": "B S K H",
    "length": "B",
    "real": "B",
    "page_table": "B M",
    "positions": "B S",
    "ancestors": "B T",
    "oldest": "B T",
    "sinks": "N",
}
_PAGED_AXES = _AXES | {"key": "P S K H", "value": "P S K H"}


class DecodeArrays(NamedTuple):
    """The arrays of a decoding call.

    Args:
      query: [B, T, N, H].
      view: of the cache, which holds the keys of the queries.
      q_lengths: [B] integers, the real queries of each row; None for all T.
      tree_mask: bool [T, T] or [B, T, T], or None.
      sinks: [N], or None.
    """

    query: Array
    view: View
    q_lengths: Array | None
    tree_mask: Array | None
    sinks: Array | None


class _Program(NamedTuple):
    """What is static: hashable, so that it can stand beside differentiated arguments."""

    kernel: Kernel
    twin: Callable[[DecodeArrays], tuple[Array, ...]]
    request: AttentionRequest
    num_splits: int | None


def refusals(request: AttentionRequest, page: int | None) -> tuple[str, ...]:
    """Why the Hopper kernel cannot decode a call; empty when it can.

    Args:
      request: of the call over the gathered view.
      page: positions in a page of the view; None where it has no pages.
    """
    other = elsewhere(CAPABILITY, request.platform, request.compute_capability)
    shape = DecodeShape(request.B, request.T, request.S, request.N, request.K, request.H, page)
    limits = kernel_refusals(shape, itemsize=request.dtype.itemsize, value_size=request.Hv)
    split = tuple(f"{axis} is split over devices" for axis in request.partitioned)
    given, cores = settings_of(request.settings, Hopper).decode, multiprocessors(request.device_kind)
    return other + split + (limits or config_refusals(shape, given or heuristic(shape, cores)))


def hopper_decode(
    kernel: Kernel,
    twin: Callable[[DecodeArrays], tuple[Array, ...]],
    request: AttentionRequest,
    num_splits: int | None,
    arrays: DecodeArrays,
) -> tuple[Array, ...]:
    """Output [B, T, N, H] and log-normaliser [B, T, N] of a decoding call, or m, l, u and nonempty; differentiable.

    Args:
      kernel: the kernel, or a stand-in.
      twin: the same call on XLA, whose gradients are used.
      request: static facts of the call, one that `refusals` has nothing against.
      num_splits: into how many parts the slots are cut, whatever the batch; None for what keeps the chip busy.
      arrays: of the call.
    """
    return _attend(_Program(kernel, twin, request, num_splits), arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(program: _Program, arrays: DecodeArrays) -> tuple[Array, ...]:
    given = _operands(program.request, arrays)
    names = tuple(given)
    axes = _PAGED_AXES if isinstance(arrays.view, PagedView) else _AXES
    run = functools.partial(_run, program, type(arrays.view), names)
    results = ["B T N", "B T N", "B T N H"] if program.request.statistics else ["B T N H", "B T N"]
    computed = tuple(lift(run, [axes[name] for name in names], results)(*given.values()))
    return (*computed, computed[0] != -jnp.inf) if program.request.statistics else computed


def _forward(program: _Program, arrays: DecodeArrays) -> tuple[tuple[Array, ...], DecodeArrays]:
    return _attend(program, arrays), arrays


def _backward(program: _Program, arrays: DecodeArrays, gradients: tuple[Array, ...]) -> Any:
    _, gradient_of = jax.vjp(program.twin, arrays)
    return gradient_of(gradients)


_attend.defvjp(_forward, _backward)


def _run(program: _Program, kind: type, names: tuple[str, ...], *arrays: Array) -> tuple[Array, ...]:
    """The kernel on the arrays of one device, whose sizes they say."""
    operands = DecodeOperands(**dict(zip(names, arrays, strict=True)))
    B, T, N, H = operands.query.shape
    _, S, K, _ = operands.key.shape
    page = None
    if operands.page_table is not None:
        page, S = S, operands.page_table.shape[1] * S
    shape = DecodeShape(B, T, S, N, K, H, page)
    config, _ = launch_config(program.request, shape, kind, program.num_splits)
    blocks = cdiv(S, config.block_keys)
    call = DecodeCall(
        shape,
        config,
        program.request.scale,
        program.request.logits_soft_cap,
        left=_limit(program.request.window[0]),
        split=None if program.num_splits is None else cdiv(blocks, program.num_splits),
        is_tree=operands.ancestors is not None,
        is_ring=kind is WindowView,
        statistics=program.request.statistics,
    )
    return program.kernel(call, operands)


def launch_config(
    request: AttentionRequest, shape: DecodeShape, kind: type, num_splits: int | None
) -> tuple[DecodeConfig, str]:
    """Launch settings of a call, and where they come from: "given", "tuned" or "heuristic".

    Tuned ones and those with clusters depend on the batch, and `num_splits` promises that a row's result does not.

    Args:
      request: of the call.
      shape: its sizes on one device.
      kind: of the view.
      num_splits: as in `decode_attention`.

    Raises:
      ValueError: `num_splits` stands beside settings for clusters, whose size is the number of parts.
    """
    given, pinned = settings_of(request.settings, Hopper).decode, num_splits is not None
    if given is not None and given.cluster > 1 and pinned:
        raise fail("num_splits", f"None beside settings for clusters of {given.cluster}", num_splits)
    key = tuning_key(shape, request.dtype.name, is_ring=kind is WindowView)
    device = None if pinned else request.device_kind
    cores = multiprocessors(request.device_kind)
    return tuning.choose("attention_decode", device, key, given, lambda: heuristic(shape, cores, pinned=pinned))


def described(shape: DecodeShape, config: DecodeConfig) -> dict[str, int]:
    """Launch settings by name, those alone that the form has, and its number of kernels: one with clusters, or two."""
    settings = dataclasses.asdict(config)
    if config.cluster == 1:
        return settings | {"launches": 2}
    sizes = {name: settings[name] for name in ("block_keys", "stages", "cluster")}
    return sizes | {"programs": shape.B * shape.K * config.cluster, "launches": 1}


def tuning_key(shape: DecodeShape, dtype: str, *, is_ring: bool = False) -> tuning.TuningKey:
    """By what a tuned entry of a decoding call is found."""
    view = "window" if is_ring else "dense"
    return tuning.TuningKey(
        dtype=dtype,
        heads=tuning.heads_of(shape.B * shape.N),
        T=shape.T,
        S=shape.S,
        G=shape.G,
        H=shape.H,
        Hv=shape.H,
        mask=f"pages of {shape.page}" if shape.page else view,
    )


def _limit(positions: int | None) -> int | None:
    """A side of a window; None where it is wider than any cache."""
    return positions if positions is not None and positions < NOWHERE else None


def _operands(request: AttentionRequest, arrays: DecodeArrays) -> dict[str, Array]:
    """The kernel's operands by name, but for those that the call does not have."""
    view, length = arrays.view, jnp.asarray(arrays.view.length, jnp.int32)
    real = None
    if arrays.q_lengths is not None:
        real = jnp.clip(arrays.q_lengths, 0, request.T).astype(jnp.int32)
    given: dict[str, Array | None] = {"query": arrays.query, "length": length, "real": real}
    if isinstance(view, PagedView):
        given |= {"key": view.key_pages, "value": view.value_pages}
        given |= {"page_table": jnp.asarray(view.page_table, jnp.int32)}
    else:
        given |= {"key": view.key, "value": view.value}
    if isinstance(view, WindowView):
        positions = jnp.asarray(view.positions, jnp.int32)
        given["positions"] = jnp.where((positions >= 0) & (positions < length[:, None]), positions, NOWHERE)
    if arrays.tree_mask is not None:
        given |= _tree(request, arrays.tree_mask, length, jnp.full_like(length, request.T) if real is None else real)
    if arrays.sinks is not None:
        given["sinks"] = arrays.sinks.astype(jnp.float32)
    return {name: x for name, x in given.items() if x is not None}


def _tree(request: AttentionRequest, tree: Array, length: Array, real: Array) -> dict[str, Array]:
    """The ancestors of each new token as bits, and the first position that it sees; a window counts depth."""
    B, T = request.B, request.T
    left, right = map(_limit, request.window)
    tree = jnp.broadcast_to(tree, (B, T, T))
    depth = jnp.sum(tree, axis=-1, dtype=jnp.int32) - 1
    back = depth[:, :, None] - depth[:, None, :]
    token = jnp.arange(T, dtype=jnp.int32)
    seen = tree & (token[None, None, :] < real[:, None, None])
    seen = seen if left is None else seen & (back <= left)
    seen = seen if right is None else seen & (back >= -right)
    bits = jnp.sum(jnp.where(seen, jnp.left_shift(1, token)[None, None, :], 0), axis=-1, dtype=jnp.int32)
    oldest = jnp.full((B, T), 1 - NOWHERE, jnp.int32)
    if left is not None:
        oldest = jnp.maximum(oldest, (length - real)[:, None] + depth - left)
    return {"ancestors": bits, "oldest": oldest}
