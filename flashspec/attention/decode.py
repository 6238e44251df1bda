"""Attention of the newest tokens over a cache that already holds their keys.

Query i of T sits at logical position length - T + i of its row, never at array index i: aligned by index, the one query
of a decoding step would see the first key only, and its output would still be finite (section 33.3).

The keys are read in parts, each giving (m, l, u) (eq. 33.3), merged by eq. 33.4 and 33.5. One part is two products and
a softmax; more parts keep many cores busy when there are few rows.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.attention import backends, hopper_decode, reference, tpu_decode
from flashspec.attention.hopper_decode import DecodeArrays
from flashspec.attention.request import (
    AttentionOperands,
    AttentionRequest,
    make_request,
    partitioned_axes,
    placement_of,
)
from flashspec.attention.settings import AttentionImplementation, split
from flashspec.attention.views import PagedView, View, WindowView, check_view, gather
from flashspec.checks import fail
from flashspec.masks import Contiguous, Window, make_mask
from flashspec.online_softmax import SoftmaxStats, empty_stats, finalize, merge_axis, shifted_weights
from flashspec.selection import first_that_can, named, resolve_device
from pallas_kernels.launch import cdiv

MAX_QUERIES = 16
# Keys of one part by default: enough that the merge costs nothing beside reading them.
PART = 4096


def decode_attention(
    query: ArrayLike,
    view: View,
    *,
    q_lengths: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    window: Window = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    implementation: AttentionImplementation = None,
    return_lse: bool = False,
    num_splits: int | None = None,
) -> Any:
    """Causal attention of 1 to 16 new tokens over a cache view that already holds their keys.

        output = sum_j e^(score_j) v_j / sum_j e^(score_j),   score = soft_cap(scale * q.k)        (eq. 33.2)

    over keys whose logical position is at most the query's own; or, among the new tokens, over the query's ancestors.
    Slots that no query may see, NaN included, change no bit of the result; a row of length 0 gives 0.

    Args:
      query: [B, T, N, H], T from 1 to 16; query i sits at position length - T + i.
      view: a `DenseView`, `WindowView` or `PagedView` of the same B rows.
      q_lengths: [B] integers: the first n queries of a row are real and sit at length - n + i, the rest are empty rows.
      tree_mask: bool [T, T] or [B, T, T]: [i, j] says that new token i descends from new token j, itself included. New
        token j lies in slot length - n + j, and its logical position is that of its depth in the tree.
      window: (left, right) or an integer: how many positions besides its own a query sees on each side.
      scale: a Python number of at most 1e30 in magnitude; 1 / sqrt(H) by default.
      logits_soft_cap: c of c tanh(score / c), a Python number in [1e-30, 1e30].
      sinks: [N] natural-log logits, one more key with value 0 for each head; neither scaled nor capped. In lse too.
      implementation: "hopper" or "tpu" (our kernels, the default on GPUs of compute capability 9.0 and on TPUs for what
        they take; `Hopper(decode=...)` is the former with launch settings of the caller's own), "blockwise" (keys in
        parts on XLA, the default for the rest) or "reference"; or a sequence of them, of which the first that supports
        the call runs.
      return_lse: whether to return the log-normaliser too.
      num_splits: into how many parts the slots of a row are cut. By default "blockwise" takes one for every 4096, and
        a kernel as many as keep the chip busy; with a number given, a row's result on "hopper" is the same bit for bit
        whatever rows are beside it.

    Returns:
      output [B, T, N, Hv] in the query's dtype; with `return_lse` also lse [B, T, N] in float32 (float64 for float64).

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call; the message has every reason.
    """
    options: dict[str, Any] = {"q_lengths": q_lengths, "tree_mask": tree_mask, "window": window, "scale": scale}
    options |= {"logits_soft_cap": logits_soft_cap, "sinks": sinks}
    checks.flag("return_lse", return_lse)
    output, lse = _decode(query, view, implementation, num_splits, options)
    return (output, lse) if return_lse else output


def decode_stats(
    query: ArrayLike,
    view: View,
    *,
    q_lengths: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    window: Window = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    implementation: AttentionImplementation = None,
    num_splits: int | None = None,
) -> SoftmaxStats:
    """Statistics of new tokens over a cache view (eq. 33.3), to be merged with those of other, disjoint keys.

    Args:
      query: [B, T, N, H], T from 1 to 16.
      view: a `DenseView`, `WindowView` or `PagedView` of the same B rows.
      The others are those of `decode_attention`.

    Returns:
      m, l, nonempty [B, T, N] and u [B, T, N, Hv], in float32 (float64 for float64).

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call.
    """
    options: dict[str, Any] = {"q_lengths": q_lengths, "tree_mask": tree_mask, "window": window, "scale": scale}
    options |= {"logits_soft_cap": logits_soft_cap, "statistics": True}
    return SoftmaxStats(*_decode(query, view, implementation, num_splits, options))


def _decode(
    query: ArrayLike,
    view: View,
    implementation: AttentionImplementation,
    num_splits: int | None,
    options: dict[str, Any],
) -> Any:
    """(output, lse), or with `statistics` among the options (m, l, u, nonempty), by the implementation selected."""
    request, arrays = _prepare(query, view, settings=split(implementation)[1], **options)
    if not 1 <= request.T <= MAX_QUERIES:
        raise fail("query", f"1 to {MAX_QUERIES} new tokens T (`cached_attention` takes more)", f"T = {request.T}")
    if num_splits is not None:
        num_splits = checks.at_least("num_splits", num_splits, 1)
    select = functools.partial(_select, implementation, arrays.view)
    return backends.by_platform(request, arrays, select, functools.partial(_run, num_splits))


def cached_attention(
    query: ArrayLike,
    view: View,
    *,
    q_lengths: ArrayLike | None = None,
    window: Window = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
) -> Array:
    """Causal attention of any number of new tokens over a cache view that already holds their keys.

    `decode_attention` for few tokens, `dot_product_attention` over the gathered view for many; the same function of the
    same arguments. It is what the models of this package call by default.

    Args:
      query: [B, T, N, H], T >= 1; query i sits at position length - T + i.
      view: a `DenseView`, `WindowView` or `PagedView` of the same B rows.
      q_lengths: [B] integers: the first n queries of a row are real and sit at length - n + i, the rest are empty rows.
      The others are those of `decode_attention`.

    Returns:
      output [B, T, N, Hv] in the query's dtype.

    Raises:
      ValueError: an argument is wrong.
    """
    options: dict[str, Any] = {"q_lengths": q_lengths, "window": window, "scale": scale}
    options |= {"logits_soft_cap": logits_soft_cap, "sinks": sinks}
    if jnp.ndim(query) == 4 and 1 <= jnp.shape(query)[1] <= MAX_QUERIES:
        return decode_attention(query, view, **options)
    request, arrays = _prepare(query, view, **options)
    return backends.run(request, _operands(request, arrays), None)[0]


def _prepare(
    query: ArrayLike,
    view: View,
    *,
    q_lengths: ArrayLike | None,
    window: Window,
    tree_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    **options: Any,
) -> tuple[AttentionRequest, DecodeArrays]:
    """Check a call. The view is brought into dense form only in the abstract: a kernel reads it where it lies."""
    sizes = checks.shape("query", query, "B T N H")
    check_view(view, sizes["B"])
    if q_lengths is not None:
        q_lengths = checks.array("q_lengths", q_lengths)
        checks.shape("q_lengths", q_lengths, "B", sizes)
        checks.integer("q_lengths", q_lengths)
    arrays = DecodeArrays(
        checks.array("query", query),
        view,
        q_lengths,
        None if tree_mask is None else checks.array("tree_mask", tree_mask),
        None if sinks is None else checks.array("sinks", sinks),
    )
    held = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
    target = resolve_device(None, query)
    facts = options | {"platform": target.platform, "compute_capability": target.compute_capability}
    facts["device_kind"] = target.kind
    facts["partitioned"] = partitioned_axes(query=query, **held)
    facts["placement"] = placement_of(query, view.key_pages if isinstance(view, PagedView) else view.key)
    requests: list[AttentionRequest] = []

    def describe(arrays: DecodeArrays) -> AttentionOperands:
        request, operands = _dense(arrays, window=window, **facts)
        requests.append(request)
        return operands

    jax.eval_shape(describe, arrays)
    return requests[0], arrays


def _dense(arrays: DecodeArrays, *, window: Window, **facts: Any) -> tuple[AttentionRequest, AttentionOperands]:
    """The call over the gathered view, with its queries at the end of each row."""
    B, T, N, _ = arrays.query.shape
    view, length = arrays.view, jnp.asarray(arrays.view.length, jnp.int32)
    real: Any = T if arrays.q_lengths is None else jnp.clip(arrays.q_lengths, 0, T).astype(jnp.int32)
    key, value, kv_positions, kv_valid = gather(view)
    structure: dict[str, Any] = {
        "is_causal": arrays.tree_mask is None,
        "window": window,
        "q_positions": Contiguous(length - real),
        "kv_positions": kv_positions,
        "q_lengths": arrays.q_lengths,
        # A ring's slots are not in order of position, so that which of them are live is no length.
        "mask": kv_valid[:, None, None, :] if isinstance(view, WindowView) else None,
        "kv_lengths": None if isinstance(view, WindowView) else length,
    }
    request, operands = make_request(arrays.query, key, value, sinks=arrays.sinks, **structure, **facts)
    if arrays.tree_mask is not None:
        mask = make_mask((B, N, T, key.shape[1]), **structure, tree_mask=arrays.tree_mask)
        operands = dataclasses.replace(operands, mask=mask)
    return request, operands


def _operands(request: AttentionRequest, arrays: DecodeArrays) -> AttentionOperands:
    """What implementations on XLA take: the view in dense form, and a mask."""
    return _dense(arrays, window=request.window, scale=request.scale, logits_soft_cap=request.logits_soft_cap)[1]


def refusals(name: str, request: AttentionRequest, view: View) -> tuple[str, ...]:
    """Why an implementation cannot decode a request; empty when it can."""
    page = view.key_pages.shape[1] if isinstance(view, PagedView) else None
    if name == "hopper":
        return hopper_decode.refusals(request, page)
    if name == "tpu":
        return tpu_decode.refusals(request, page)
    return _REFUSALS.get(name) or backends.BACKENDS[name].supports(request)


def _select(implementation: AttentionImplementation, view: View, request: AttentionRequest) -> str:
    """The first implementation that can decode this request: of those named, or of all, the best first."""
    kernels = {"cuda": ("hopper",), "tpu": ("tpu",)}.get(request.platform, ())
    given, _ = split(implementation)
    names = (*kernels, "blockwise") if given is None else named(given, tuple(backends.BACKENDS))
    return first_that_can(names, lambda name: refusals(name, request, view))


_REFUSALS: Mapping[str, tuple[str, ...]] = {
    "ampere": ("there is no decode kernel of this name",),
    "cudnn": ("it reads neither rings nor pages, and hides keys in its own way",),
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # so that eager calls are one program
def _run(num_splits: int | None, request: AttentionRequest, name: str, arrays: DecodeArrays) -> Any:
    def on_xla(arrays: DecodeArrays) -> Any:
        operands = _operands(request, arrays)
        if name == "reference":
            return _fields(request, reference.reference_stats(request, operands), operands)
        splits = num_splits or max(cdiv(request.S, PART), 1)
        return _fields(request, _split_stats(request, operands, splits), operands)

    def call(arrays: DecodeArrays) -> tuple[Array, ...]:
        with jax.named_scope(backends.scope(name)):
            if name == "hopper":
                kernel = backends.hopper_decode_kernel()
                return hopper_decode.hopper_decode(kernel, on_xla, request, num_splits, arrays)
            if name == "tpu":
                return tpu_decode.tpu_decode(backends.tpu_decode_kernel(), on_xla, request, num_splits, arrays)
            return on_xla(arrays)

    rows, wide = backends.row_specs(arrays.query)
    return backends.in_auto_mode(call, arrays, (rows, rows, wide, rows) if request.statistics else (wide, rows))


def _fields(request: AttentionRequest, stats: SoftmaxStats, operands: AttentionOperands) -> tuple[Array, ...]:
    """What the request asks for: m, l, u and nonempty; or output and lse."""
    if request.statistics:
        return stats.m, stats.l, stats.u, stats.nonempty
    return finalize(stats, sinks=operands.sinks, dtype=request.dtype)


def _split_stats(request: AttentionRequest, operands: AttentionOperands, splits: int) -> SoftmaxStats:
    """Statistics of every query over all keys, read in `splits` parts; rows [B, T, N]."""
    if request.S == 0:
        return empty_stats((request.B, request.T, request.N), request.Hv, request.stats_dtype)
    size = cdiv(request.S, splits)
    parts = [_part_stats(request, operands, k, min(size, request.S - k)) for k in range(0, request.S, size)]
    if len(parts) == 1:
        return parts[0]
    return merge_axis(jax.tree.map(lambda *part: jnp.stack(part, axis=1), *parts), axis=1)


def _part_stats(request: AttentionRequest, operands: AttentionOperands, start: int, size: int) -> SoftmaxStats:
    """Statistics over the keys start .. start + size (eq. 33.3).

    Keys and values enter their products as they lie in the cache, [B, S, K, size], keys on the left and values on the
    right: the order in which XLA on a CPU copies rows, where the opposite one transposes elements.
    """
    visible = operands.mask.tile(0, request.T, start, size)[:, :, :, None, :]  # [B|1, 1, T, 1, S]
    query = operands.query.reshape(request.B, request.T, request.K, request.G, request.H)
    key, value = (lax.slice_in_dim(x, start, start + size, axis=1) for x in (operands.key, operands.value))
    # What takes part in no visible pair becomes 0: a weight of 0 would not hide its NaN.
    seen, sees = jnp.any(visible, axis=(1, 2, 3))[:, :, None, None], jnp.any(visible, axis=(1, 4))[..., None, None]
    query, key, value = jnp.where(sees, query, 0), jnp.where(seen, key, 0), jnp.where(seen, value, 0)
    scores = _product(request, key, query, (((3,), (4,)), ((0, 2), (0, 2)))) * request.scale  # [B, K, S, T, G]
    if request.logits_soft_cap is not None:
        scores = request.logits_soft_cap * jnp.tanh(scores / request.logits_soft_cap)
    m, weights, nonempty = shifted_weights(jnp.moveaxis(scores, 2, 4), visible)  # [B, K, T, G], [B, K, T, G, S]
    u = _product(request, weights.astype(request.dtype), value, (((4,), (1,)), ((0, 1), (0, 2))))  # [B, K, T, G, Hv]
    return jax.tree.map(_rows, SoftmaxStats(m, jnp.sum(weights, axis=-1), u, nonempty))


def _product(request: AttentionRequest, a: Array, b: Array, dimensions: Any) -> Array:
    """A product accumulated in the dtype of the statistics; float32 operands use the highest precision."""
    precision = None if request.dtype.itemsize == 2 else lax.Precision.HIGHEST
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=request.stats_dtype)


def _rows(x: Array) -> Array:
    """[B, K, T, G, ...] as [B, T, N, ...]."""
    x = jnp.moveaxis(x, 1, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])
