"""Decoding by our TPU kernel: from a cache view and what hides its keys to what the kernel reads.

The kernel is passed in, so that tests run the very same code in an interpreter. It reads views where they lie. It has
no backward: gradients are those of the same attention on XLA, which is passed in too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashspec.attention.lifting import lift, placed, uneven_groups
from flashspec.attention.request import AttentionRequest
from flashspec.attention.tpu import unseen_splits
from flashspec.attention.views import PagedView, View, WindowView
from flashspec.devices import find_device_facts
from flashspec.masks import Contiguous, make_mask
from flashspec.online_softmax import SoftmaxStats, finalize, merge_axis
from pallas_kernels.launch import cdiv
from pallas_kernels.tpu.attention_config import HIGHEST, LANES, AttentionCall
from pallas_kernels.tpu.attention_decode_config import ROWS, AttentionDecodeConfig, heads_lie_apart, heuristic

MAX_QUERIES = 16
# Step words and page tables lie in scalar memory.
LARGEST_TABLES = 2**17


class Kernel(NamedTuple):
    """The kernel of `pallas_kernels.tpu.attention_decode` and what it takes, or stand-ins."""

    decode: Callable[..., tuple[Array, Array, Array]]
    cache: Callable[..., Any]
    rows: Callable[..., Any]
    interpret: Any = False


class _Program(NamedTuple):
    """What is static: hashable, so that it can stand beside differentiated arguments."""

    kernel: Kernel
    twin: Callable[[Any], tuple[Array, ...]]
    request: AttentionRequest
    num_splits: int | None


def refusals(request: AttentionRequest, page: int | None) -> tuple[str, ...]:
    """Why the TPU kernel cannot decode a call; empty when it can.

    Args:
      request: of the call over the gathered view.
      page: positions in a page of the view; None where it has no pages.
    """
    platform = () if request.platform == "tpu" else (f"runs on TPUs only, not on {request.platform}",)
    return platform + kernel_refusals(request, page)


def kernel_refusals(request: AttentionRequest, page: int | None) -> tuple[str, ...]:
    """`refusals` but for the platform: what the kernel cannot do wherever it runs."""
    heads = request.K // request.head_shards if request.K % request.head_shards == 0 else request.K
    config = _config(request, page, None, heads)
    tables = request.B * (cdiv(request.S, config.block_kv) + (0 if page is None else cdiv(request.S, page)))
    sizes = {request.H, request.Hv}
    rules = (
        (request.dtype not in (jnp.bfloat16, np.float32), f"computes in bfloat16 or float32, not in {request.dtype}"),
        (
            any(size % LANES for size in sizes),
            f"reads heads of {LANES}, 256, ... where they lie, not of {sorted(sizes)}",
        ),
        uneven_groups(request),
        (
            heads_lie_apart(heads) and (page or request.S) % ROWS != 0,
            f"copies {heads} heads by {ROWS} positions, and a {'page' if page else 'row'} has {page or request.S}",
        ),
        (
            heads == 1 and request.dtype == np.float32 and max(sizes) > LANES,
            f"would copy a cache of one float32 head of {max(sizes)}, which XLA lays out another way",
        ),
        (request.T > MAX_QUERIES, f"takes at most {MAX_QUERIES} new tokens"),
        (0 in (request.B, request.S), "takes no empty cache"),
        (tables > LARGEST_TABLES, f"lists at most {LARGEST_TABLES} blocks and pages"),
    )
    split = tuple(f"{axis} is split over devices" for axis in request.partitioned)
    split += unseen_splits(request)
    return split + tuple(reason for refused, reason in rules if refused)


def tpu_decode(
    kernel: Kernel,
    twin: Callable[[Any], tuple[Array, ...]],
    request: AttentionRequest,
    num_splits: int | None,
    arrays: Any,
) -> tuple[Array, ...]:
    """Output [B, T, N, Hv] and log-normaliser [B, T, N] of a decoding call, or m, l, u and nonempty; differentiable.

    Args:
      kernel: the kernel, or a stand-in.
      twin: the same call on XLA, whose gradients are used.
      request: static facts of the call, one that `kernel_refusals` has nothing against.
      num_splits: into how many parts the keys are cut; None for one for each core that shares a grid.
      arrays: a pytree with the call's `query`, `view`, `q_lengths`, `tree_mask` and `sinks`.
    """
    return _attend(_Program(kernel, twin, request, num_splits), arrays)


# Axes of what the kernel takes, as `lift` has them.
_AXES = {
    "query": "B T N H",
    "key": "B S K H",
    "value": "B S K H",
    "pages": "B M",
    "positions": "B S",
    "start": "B",
    "length": "B",
    "first": "B T",
    "ancestors": "B T",
}
_PAGED_AXES = _AXES | {"key": "P S K H", "value": "P S K H"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(program: _Program, arrays: Any) -> tuple[Array, ...]:
    request = program.request
    given = {"query": arrays.query, **_cache(arrays.view), **_rows(request, arrays)._asdict()}
    axes = _PAGED_AXES if isinstance(arrays.view, PagedView) else _AXES
    run = functools.partial(_run, program, tuple(given))
    results = ("B T N", "B T N", "B T N H")
    call = lift(run, [axes[name] for name in given], results, placed(request.placement))
    m, l, u = call(*given.values())
    stats = SoftmaxStats(m, l, u, m != -jnp.inf)
    if request.statistics:
        return stats.m, stats.l, stats.u, stats.nonempty
    return finalize(stats, sinks=arrays.sinks, dtype=request.dtype)


def _run(program: _Program, names: tuple[str, ...], *arrays: Array) -> tuple[Array, ...]:
    """The statistics of the arrays of one device, whose sizes they say."""
    given = dict(zip(names, arrays, strict=True))
    request, kernel = program.request, program.kernel
    cache = kernel.cache(**{name: given[name] for name in ("key", "value", "pages", "positions") if name in given})
    page = cache.key.shape[1] if cache.pages is not None else None
    m, l, u = kernel.decode(
        given["query"],
        cache,
        kernel.rows(*(given[name] for name in _Rows._fields)),
        call=AttentionCall(request.scale, request.logits_soft_cap),
        config=_config(request, page, program.num_splits, heads=cache.key.shape[2]),
        interpret=kernel.interpret,
    )
    stats = merge_axis(SoftmaxStats(m, l, u, m != -jnp.inf), 0)
    return stats.m, stats.l, stats.u


def _forward(program: _Program, arrays: Any) -> tuple[tuple[Array, ...], Any]:
    return _attend(program, arrays), arrays


def _backward(program: _Program, arrays: Any, gradients: tuple[Array, ...]) -> Any:
    _, gradient_of = jax.vjp(program.twin, arrays)
    return gradient_of(gradients)


_attend.defvjp(_forward, _backward)


def _config(request: AttentionRequest, page: int | None, num_splits: int | None, heads: int) -> AttentionDecodeConfig:
    sizes = request.S, heads, request.G * request.T, request.H, request.Hv, request.dtype.itemsize
    return heuristic(*sizes, page=page or 1, splits=num_splits or _cores(request))


def _cores(request: AttentionRequest) -> int:
    """Cores of the device that share one grid; 1 where it is not known."""
    facts = find_device_facts(request.device_kind or "")
    return (facts and facts.cores) or 1


def _cache(view: View) -> dict[str, Array]:
    """The view as the kernel's `Cache`."""
    if isinstance(view, PagedView):
        pages = jnp.clip(jnp.asarray(view.page_table, jnp.int32), 0, view.key_pages.shape[0] - 1)
        return {"key": view.key_pages, "value": view.value_pages, "pages": pages}
    if not isinstance(view, WindowView):
        return {"key": view.key, "value": view.value}
    positions = jnp.asarray(view.positions, jnp.int32)
    live = (positions >= 0) & (positions < jnp.asarray(view.length, jnp.int32)[:, None])
    return {"key": view.key, "value": view.value, "positions": jnp.where(live, positions, -1)}


class _Rows(NamedTuple):
    """The kernel's `DecodeRows`."""

    start: Array
    length: Array
    first: Array
    ancestors: Array


def _rows(request: AttentionRequest, arrays: Any) -> _Rows:
    """Start, length, first position and ancestors of each new token."""
    B, T = request.B, request.T
    length = jnp.asarray(arrays.view.length, jnp.int32)
    real = jnp.full_like(length, T)
    if arrays.q_lengths is not None:
        real = jnp.clip(arrays.q_lengths, 0, T).astype(jnp.int32)
    start, token = length - real, jnp.arange(T, dtype=jnp.int32)
    among_new = make_mask(
        (B, 1, T, T),
        is_causal=arrays.tree_mask is None,
        window=request.window,
        q_positions=Contiguous(start),
        kv_positions=Contiguous(start),
        q_lengths=real,
        kv_lengths=real,
        tree_mask=arrays.tree_mask,
    ).full()[:, 0]
    ancestors = jnp.sum(among_new.astype(jnp.int32) << token[None, None], axis=-1, dtype=jnp.int32)
    depth = token[None]
    if arrays.tree_mask is not None:
        depth = jnp.sum(arrays.tree_mask, axis=-1, dtype=jnp.int32).reshape(-1, T) - 1
    left = request.window[0]
    first = jnp.zeros((B, T), jnp.int32)
    if left is not None:
        first = jnp.maximum(start[:, None] + depth - min(left, HIGHEST // 2), 0)
    first = jnp.where(token[None] < real[:, None], first, HIGHEST)
    return _Rows(start, length, first, jnp.broadcast_to(ancestors, (B, T)))
