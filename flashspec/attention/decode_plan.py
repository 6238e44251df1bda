"""What will run for one decoding call, and at least how long that takes.

Work is counted over the positions that rows hold where lengths are concrete, and over all slots where they are not;
bytes count what those positions take of the cache, each read once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from flashspec import checks
from flashspec.attention import backends, decode, hopper_decode, tpu_decode
from flashspec.attention.plan import AttentionPlan, Pass, copied_operands, roofline_s
from flashspec.attention.request import AttentionRequest, partitioned_axes
from flashspec.attention.settings import AttentionImplementation, split
from flashspec.attention.views import PagedView, View, slots
from flashspec.checks import fail, is_concrete
from flashspec.devices import find_device_facts
from flashspec.masks import Window
from flashspec.selection import resolve_device
from pallas_kernels.gpu.hopper.attention_decode_config import DecodeShape
from pallas_kernels.launch import cdiv

type Shaped = ArrayLike | jax.ShapeDtypeStruct

# Which implementation computes the gradients of a kernel that has none of its own.
BACKWARD = {"hopper": "blockwise", "tpu": "blockwise"}


def plan_decode(
    query: Shaped,
    view: View,
    *,
    q_lengths: Shaped | None = None,
    tree_mask: Shaped | None = None,
    window: Window = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Shaped | None = None,
    implementation: AttentionImplementation = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    device: jax.Device | str | None = None,
) -> AttentionPlan:
    """What `decode_attention` would run for these arguments, and why not something else; computes nothing.

    Args:
      query: [B, T, N, H], an array or a `jax.ShapeDtypeStruct`; so are all other arrays, those of the view too.
      view: a `DenseView`, `WindowView` or `PagedView` of the same B rows. With concrete lengths [B] FLOPs and bytes
        are counted over the positions that they say; else over all slots, of which shorter rows take less.
      device: a device or the kind of one, such as "NVIDIA H200"; where the query lies by default.
      The others are those of `decode_attention`.

    Returns:
      The plan; `print` shows it as a table. Its forward config has `splits` and `part`, slots of a part, where keys are
      cut before they are read, and on Hopper `launches`: one kernel of clusters that merge within, or two.

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call.
    """
    options: dict[str, Any] = {"window": window, "scale": scale, "logits_soft_cap": logits_soft_cap}
    options["settings"] = split(implementation)[1]
    arrays = {"query": query, "view": view, "q_lengths": q_lengths, "tree_mask": tree_mask, "sinks": sinks}
    target = resolve_device(device, query)
    request = dataclasses.replace(
        _request(arrays, options),
        platform=target.platform,
        compute_capability=target.compute_capability,
        device_kind=target.kind,
        return_lse=checks.flag("return_lse", return_lse),
    )
    if not 1 <= request.T <= decode.MAX_QUERIES:
        raise fail("query", f"1 to {decode.MAX_QUERIES} new tokens T", f"T = {request.T}")
    if num_splits is not None:
        num_splits = checks.at_least("num_splits", num_splits, 1)
    name = decode._select(implementation, view, request)
    refused = {other: decode.refusals(other, request, view) for other in backends.BACKENDS}
    config, source = _config(name, request, view, num_splits)
    return AttentionPlan(
        request=request,
        device=target.kind,
        forward=_pass("forward", name, config, source, request, arrays),
        backward=_pass("backward", BACKWARD.get(name, name), {}, "", request, arrays),
        rejected={other: reasons for other, reasons in refused.items() if reasons},
        copies=_copies(name, request, query, view),
    )


def _request(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> AttentionRequest:
    """The static facts of a call, from arrays or from their shapes."""
    requests: list[AttentionRequest] = []

    def prepare(arrays: Mapping[str, Any]) -> None:
        requests.append(decode._prepare(**arrays, **options)[0])

    if all(map(_is_array, jax.tree.leaves(dict(arrays)))):
        prepare(arrays)
        return requests[0]
    jax.eval_shape(prepare, dict(arrays))
    view = arrays["view"]
    held = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
    return dataclasses.replace(requests[0], partitioned=partitioned_axes(query=arrays["query"], **held))


def _is_array(leaf: Any) -> bool:
    return not isinstance(leaf, jax.ShapeDtypeStruct)


def _config(name: str, request: AttentionRequest, view: View, num_splits: int | None) -> tuple[Mapping[str, int], str]:
    """Launch settings by name, and where they come from."""
    page = view.key_pages.shape[1] if isinstance(view, PagedView) else None
    if name == "hopper":
        shape = DecodeShape(request.B, request.T, request.S, request.N, request.K, request.H, page)
        config, source = hopper_decode.launch_config(request, shape, type(view), num_splits)
        settings = hopper_decode.described(shape, config)
        part = None if num_splits is None else cdiv(cdiv(request.S, config.block_keys), num_splits) * config.block_keys
        return {**settings, **({} if part is None else _parts(request.S, part))}, source
    if name == "tpu":
        blocks = dataclasses.asdict(tpu_decode._config(request, page, num_splits, request.K))
        return {key: int(value) for key, value in blocks.items()}, ""
    if name == "reference":
        return {}, ""
    return _parts(request.S, cdiv(request.S, num_splits or max(cdiv(request.S, decode.PART), 1))), ""


def _parts(total: int, part: int) -> Mapping[str, int]:
    """Into how many parts the slots of a row are cut, and how many slots each has."""
    return {"splits": cdiv(total, max(part, 1)), "part": part}


def positions(view: View, request: AttentionRequest) -> np.ndarray:
    """[B] how many of the latest positions a row's queries may see at most: those it holds, or all slots."""
    total, left = slots(view), request.window[0]
    known = is_concrete(view.length)
    lengths = np.clip(np.asarray(view.length), 0, None) if known else np.full(request.B, total)
    return np.minimum(lengths, total if left is None else min(total, left + request.T))


def _pairs(view: View, request: AttentionRequest) -> int:
    """Pairs of a query and a key that positions and the window allow, over all rows."""
    held, left = positions(view, request)[:, None], request.window[0]
    seen = held - request.T + 1 + np.arange(request.T)[None, :]
    return int(np.clip(seen, 0, None if left is None else left + 1).sum())


def _pass(
    direction: str,
    name: str,
    config: Mapping[str, int],
    source: str,
    request: AttentionRequest,
    arrays: Mapping[str, Any],
) -> Pass:
    H, Hv, size = request.H, request.Hv, request.dtype.itemsize
    rows = request.B * request.T * request.N
    cache = int(positions(arrays["view"], request).sum()) * request.K * (H + Hv) * size
    small = (arrays["q_lengths"], arrays["tree_mask"], arrays["sinks"], arrays["view"].length, *_tables(arrays["view"]))
    moved = cache + rows * (H + Hv) * size + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(small))
    lse = rows * request.stats_dtype.itemsize
    if direction == "forward":
        flops, moved = 2 * (H + Hv), moved + (lse if request.return_lse else 0)
    else:  # the output, its gradient and the normaliser are read, a gradient of query, keys and values is written
        flops, moved = 2 * (3 * H + 2 * Hv), moved + lse + rows * (H + Hv) * size + cache
    flops *= request.N * _pairs(arrays["view"], request)
    bound = roofline_s(request, find_device_facts(request.device_kind or ""), flops, moved)
    return Pass(name, config, flops, moved, bound, source)


def _tables(view: View) -> tuple[Any, ...]:
    """What a view holds beside keys, values and lengths."""
    return tuple(getattr(view, name) for name in ("page_table", "positions") if hasattr(view, name))


def _copies(name: str, request: AttentionRequest, query: Any, view: View) -> Mapping[str, int]:
    """Bytes copied: kernels read views where they lie, XLA brings pages together first."""
    if name in BACKWARD:
        keys = ("key_pages", "value_pages") if isinstance(view, PagedView) else ("key", "value")
        return copied_operands({"query": query} | {key: getattr(view, key) for key in keys})
    if not isinstance(view, PagedView):
        return {}
    rows = request.B * request.S * request.K * request.dtype.itemsize
    return {"key_pages": rows * request.H, "value_pages": rows * request.Hv}
