"""The facts of one call of a decoder step between two attentions, and its operands."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashspec import checks
from flashspec.checks import fail
from flashspec.selection import Target, placement, resolve_device
from pallas_kernels.gpu.hopper.decode_block_config import TOGETHER, AttentionForm, BlockShape, Heads, Places


@dataclasses.dataclass(frozen=True)
class BlockForm:
    """What all layers share.

    Args:
      heads: K key/value heads, G query heads for each, of size H: how the columns of a `qkv` follow each other.
      eps: of the norms, scale * x / sqrt(mean(x^2) + eps).
      unit_offset: whether norms multiply by 1 + scale.
      activation: phi, "silu" or another of `flashspec.fusion.ACTIVATIONS`.
    """

    heads: Heads
    eps: float
    unit_offset: bool = False
    activation: str = "silu"


class MlpWeights(NamedTuple):
    """Of a layer behind its attention.

    Args:
      out: [N H, C].
      norm: scale [C] of the norm of x'.
      gate_up: [C, 2, F].
      down: [F, C].
    """

    out: Array
    norm: Array
    gate_up: Array
    down: Array


class HeadWeights(NamedTuple):
    """Of a layer up to its attention.

    Args:
      norm: scale [C] of the norm of x''.
      qkv: [C, K (G + 2) H].
      bias: [K (G + 2) H], or None.
      query_norm, key_norm: scales [H] of the norms of every query and key, or None.
    """

    norm: Array
    qkv: Array
    bias: Array | None = None
    query_norm: Array | None = None
    key_norm: Array | None = None


class LayerWeights(NamedTuple):
    """Of a layer."""

    heads: HeadWeights
    mlp: MlpWeights


class Stream(NamedTuple):
    """What one call of a step hands to the next.

    Args:
      residual: x [rows rounded up to 4, C]; the rows added hold anything.
    """

    residual: Array


def start(x: Array) -> Stream:
    """The stream before the first call of a step, from embeddings x [rows, C]."""
    if x.ndim != 2:
        raise fail("x", "rank 2, shape [rows, C]", f"shape {list(x.shape)}")
    return Stream(jnp.pad(x, ((0, -x.shape[0] % TOGETHER), (0, 0))))


class BlockArrays(NamedTuple):
    """The arrays of a call, as `decode_block` has them."""

    stream: Stream
    attended: Array | None
    mlp: MlpWeights | None
    heads: HeadWeights | None
    places: Places | None
    key: Array | None
    value: Array | None


@dataclasses.dataclass(frozen=True)
class BlockRequest:
    """What is known of a call without looking at a value.

    Args:
      shape: rows, hidden and inner sizes and heads; a call without an MLP has an inner size of 0.
      form: what all layers share.
      dtype: of all arrays.
      options: "bias" and "head norms", where heads have them.
      platform: "cpu", "cuda", "rocm" or "tpu".
      compute_capability: of a CUDA GPU, such as "9.0"; None elsewhere and where it is not known.
      device_kind: such as "NVIDIA H200"; None where it is not known.
      on_mesh: whether the call lies on several devices, or is traced for a mesh.
    """

    shape: BlockShape
    form: BlockForm
    dtype: np.dtype
    options: frozenset[str] = frozenset()
    platform: str = "cpu"
    compute_capability: str | None = None
    device_kind: str | None = None
    on_mesh: bool = False

    def on(self, target: Target) -> "BlockRequest":
        """The same call on another device."""
        return dataclasses.replace(
            self,
            platform=target.platform,
            compute_capability=target.compute_capability,
            device_kind=target.kind or None,
        )


class LayersArrays(NamedTuple):
    """The arrays of a step through all layers.

    Args:
      x: [rows, C] embeddings, those of one batch row after the other.
      layers: weights.
      places: of the rows, in every layer.
      lengths: [2, B] integers, what each batch row holds before the step, and with its real tokens.
      keys, values: of each layer, [leads, slots, K, H]; batch row b is lead b, and position s is slot s.
    """

    x: Array
    layers: tuple[LayerWeights, ...]
    places: Places
    lengths: Array
    keys: tuple[Array, ...]
    values: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class LayersRequest:
    """What is known of a step through all layers without looking at a value."""

    block: BlockRequest
    attention: AttentionForm

    def on(self, target: Target) -> "LayersRequest":
        """The same step on another device."""
        return dataclasses.replace(self, block=self.block.on(target))


def make_layers_request(arrays: LayersArrays, form: BlockForm, scale: float) -> LayersRequest:
    """Check the arrays of a step through all layers.

    Raises:
      ValueError: one is wrong; the message names it.
    """
    (rows, hidden), (K, G, H) = arrays.x.shape, form.heads
    if not arrays.layers or {len(arrays.keys), len(arrays.values)} != {len(arrays.layers)}:
        found = f"{len(arrays.layers)}, {len(arrays.keys)} and {len(arrays.values)}"
        raise fail("layers", "one or more, and as many `keys` and `values`", found)
    stream = Stream(jax.ShapeDtypeStruct((rows + -rows % 4, hidden), arrays.x.dtype))  # type: ignore[arg-type]
    attended: Any = jax.ShapeDtypeStruct((rows, K * G * H), arrays.x.dtype)
    requests = {
        make_request(BlockArrays(stream, attended, layer.mlp, layer.heads, arrays.places, key, value), form)
        for layer, key, value in zip(arrays.layers, arrays.keys, arrays.values, strict=True)
    }
    slots = {each.shape[1] for each in (*arrays.keys, *arrays.values)}
    if len(requests) > 1 or len(slots) > 1:
        raise fail("layers", "layers and caches of one size", f"{len(requests)} and {len(slots)} of them")
    batch = checks.shape("lengths", arrays.lengths, "2 B")["B"]
    if not jnp.issubdtype(arrays.lengths.dtype, jnp.integer):
        raise fail("lengths", "integers", arrays.lengths.dtype)
    if rows % batch:
        raise fail("x", f"as many rows for each of {batch} batch rows", f"shape {[rows, hidden]}")
    leads = min(each.shape[0] for each in (*arrays.keys, *arrays.values))
    if leads < batch:
        raise fail("keys", f"a lead for each of {batch} batch rows", f"{leads} of them")
    return LayersRequest(requests.pop(), AttentionForm(rows // batch, slots.pop(), scale))


def make_request(arrays: BlockArrays, form: BlockForm) -> BlockRequest:
    """Check the arguments of `decode_block`.

    Raises:
      ValueError: an argument is wrong; the message names it.
    """
    (residual,), attended, mlp, heads, places, key, value = arrays
    K, G, H = form.heads
    sizes = checks.shape("stream.residual", residual, "R C")
    rows = _rows(arrays, sizes["R"])
    known: dict[str, int] = {"C": sizes["C"], "N": K * G * H, "Q": K * (G + 2) * H, "H": H, "rows": rows}
    known |= {"half": H // 2, "K": K}
    given: list[tuple[str, Any, str]] = []
    if mlp is not None:
        known["F"] = mlp.gate_up.shape[-1]
        given += [("attended", attended, "rows N"), ("mlp.out", mlp.out, "N C"), ("mlp.norm", mlp.norm, "C")]
        given += [("mlp.down", mlp.down, "F C")]
        checks.shape("mlp.gate_up", mlp.gate_up, "C two F", known | {"two": 2})
    if heads is not None:
        given += [("heads.norm", heads.norm, "C"), ("heads.qkv", heads.qkv, "C Q"), ("heads.bias", heads.bias, "Q")]
        given += [("heads.query_norm", heads.query_norm, "H"), ("heads.key_norm", heads.key_norm, "H")]
        given += [("cache[0]", key, "leads slots K H"), ("cache[1]", value, "leads slots K H")]
        for name in ("cos", "sin"):
            checks.shape(f"places.{name}", getattr(places, name), "rows half", known)
    for name, array, dims in given:
        if array is not None:
            checks.shape(name, array, dims, known)
            if array.dtype != residual.dtype:
                raise fail(name, f"the dtype of the stream, {residual.dtype}", array.dtype)
    options = {"bias": heads and heads.bias is not None, "head norms": heads and heads.query_norm is not None}
    target = resolve_device(None, residual)
    return BlockRequest(
        BlockShape(rows, sizes["C"], known.get("F", 0), Heads(*form.heads)),
        form,
        residual.dtype,
        frozenset(name for name, has in options.items() if has),
        target.platform,
        target.compute_capability,
        target.kind,
        any(placement(x) is not None for x in jax.tree.leaves(arrays)) or not jax.sharding.get_abstract_mesh().empty,
    )


def _rows(arrays: BlockArrays, padded: int) -> int:
    """How many rows a call has; what belongs together is there together."""
    if (arrays.attended is None) != (arrays.mlp is None):
        raise fail("attended", "an array together with `mlp`", type(arrays.attended).__name__)
    absent = {x is None for x in (arrays.heads, arrays.places, arrays.key, arrays.value)}
    if len(absent) > 1 or (arrays.mlp is None and arrays.heads is None):
        raise fail("heads", "weights together with `places` and `cache`, or none of them behind an MLP", arrays.heads)
    rows = arrays.places.lead.shape[0] if arrays.places is not None else arrays.attended.shape[0]  # type: ignore[union-attr]
    if not 0 < rows <= padded < rows + 4:
        raise fail("stream.residual", f"{rows} rows, rounded up to a multiple of 4", padded)
    return rows
