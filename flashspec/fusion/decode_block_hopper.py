"""The fused decoder step by our Hopper kernel, which is passed in so that tests run a stand-in."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from flashspec.devices import find_device_facts, multiprocessors
from flashspec.fusion.decode_block_request import (
    BlockArrays,
    BlockRequest,
    HeadWeights,
    LayersArrays,
    LayersRequest,
    MlpWeights,
    Stream,
)
from flashspec.fusion.decode_block_xla import norm
from flashspec.fusion.request import ACTIVATIONS
from flashspec.selection import elsewhere
from pallas_kernels.gpu.hopper.decode_block_config import (
    COLUMNS,
    COUNTS,
    LAYERS,
    PHASES,
    PRODUCTS,
    AttentionForm,
    Begin,
    BlockConfig,
    BlockOperands,
    BlockPlan,
    Places,
    beginning,
    heuristic,
)
from pallas_kernels.gpu.hopper.decode_block_config import refusals as kernel_refusals
from pallas_kernels.gpu.hopper.decode_block_letters_config import letters_of
from pallas_kernels.launch import cdiv

CAPABILITY = "9.0"

type Kernel = Callable[[BlockPlan, BlockOperands], Any]


def refusals(request: BlockRequest, attention: AttentionForm | None = None) -> tuple[str, ...]:
    """Why the Hopper kernel cannot run a call, with attention in it if that is given; empty when it can."""
    other = elsewhere(CAPABILITY, request.platform, request.compute_capability)
    if other:
        return other
    facts = find_device_facts(request.device_kind or "")
    if facts is None or facts.cores is None:
        kind = request.device_kind or "the device"
        return (f"needs to know the multiprocessors of {kind}: its programs wait for each other",)
    return what_it_takes(request, facts.cores, attention)


def what_it_takes(request: BlockRequest, cores: int, attention: AttentionForm | None = None) -> tuple[str, ...]:
    """`refusals` but for the device."""
    rules = (
        (request.on_mesh, "reads the arrays of one device, not of a mesh"),
        (request.form.activation != "silu", f"has the activation silu, not {request.form.activation}"),
    )
    products = _products(request.shape.inner > 0, True)
    config = heuristic(request.shape, cores, attention is not None)
    limits = kernel_refusals(request.shape, config, request.dtype.name, products, attention)
    return tuple(reason for refused, reason in rules if refused) + limits


def launch_config(request: BlockRequest) -> Mapping[str, int]:
    """Launch settings, for the plan."""
    return dataclasses.asdict(_config(request))


def decode_block(kernel: Kernel, request: BlockRequest, arrays: BlockArrays) -> tuple[Any, ...]:
    """(stream, query, key, value) as `flashspec.fusion.decode_block.decode_block` gives them.

    Args:
      kernel: the kernel, or a stand-in.
      request: static facts of the call, one that `refusals` has nothing against.
      arrays: of the call.
    """
    form, mlp, heads = request.form, arrays.mlp, arrays.heads
    plan = _plan(request, _products(mlp is not None, heads is not None), _config(request))
    held = {"key": arrays.key, "value": arrays.value}
    refs: dict[str, Any] = {name: jax.new_ref(x) for name, x in held.items() if x is not None}
    given: dict[str, Any] = {}
    matrices: dict[str, Array] = {}
    if mlp is None:
        assert heads is not None
        given["x"] = norm(arrays.stream.residual[: request.shape.rows], heads.norm, form)
    else:
        given |= {"x": arrays.attended, "residual": arrays.stream.residual, "scales": {"out": mlp.norm[None]}}
        matrices |= _matrices(mlp)
    if heads is not None:
        matrices["qkv"] = heads.qkv
        given |= {"places": _narrow(arrays.places), "caches": ((refs["key"], refs["value"]),)} | _of_heads([heads])
        if mlp is not None:
            given["scales"]["down"] = heads.norm[None]
    weights = tuple((matrices[name],) for name in plan.phases)
    # What programs tell each other begins anew with every call: a word of the call before says that rows are there.
    told = {"counts": jnp.zeros(COUNTS, jnp.int32), "letters": jnp.zeros((letters_of(plan).total, 2), jnp.int32)}
    out = kernel(plan, BlockOperands(weights=weights, **given, **jax.tree.map(jax.new_ref, told)))
    after: dict[str, Array] = {name: jax.freeze(ref) for name, ref in refs.items()}
    stream = Stream(arrays.stream.residual if mlp is None else out.residual)
    query = None if heads is None else out.query.reshape(request.shape.rows, -1, form.heads.H)
    return stream, query, after.get("key"), after.get("value")


def decode_layers(kernel: Kernel, request: LayersRequest, arrays: LayersArrays) -> tuple[Any, ...]:
    """(residual, keys, values) as `flashspec.fusion.decode_layers.decode_layers` gives them, some layers a launch.

    Args:
      kernel: the kernel, or a stand-in.
      request: static facts of the call, one that `refusals` has nothing against.
      arrays: of the call.
    """
    layers, block = arrays.layers, request.block
    heads, mlps = zip(*layers, strict=True)
    plans = {run: _layers_plan(request, len(run)) for run in launches(len(layers))}
    begin, letters = jax.tree.map(jax.new_ref, _begin(_layers_plan(request, 1), arrays.x, heads[0].norm))
    caches = [(jax.new_ref(key), jax.new_ref(value)) for key, value in zip(arrays.keys, arrays.values, strict=True)]
    always: dict[str, Any] = {
        "begin": begin,
        "places": _narrow(arrays.places),
        "lengths": arrays.lengths.astype(jnp.int32),
        "counts": jax.new_ref(jnp.zeros(COUNTS, jnp.int32)),
        "letters": letters,
        # What the last layer leaves is scaled by any, and not used.
        "scales": {
            "out": jnp.stack([mlp.norm for mlp in mlps]),
            "down": jnp.stack([each.norm for each in (*heads[1:], heads[0])]),
        },
    } | _of_heads(heads)
    for run, plan in plans.items():
        matrices = [{"qkv": heads[i].qkv} | _matrices(mlps[i]) for i in run]
        weights = tuple(tuple(each[name] for each in matrices if name in each) for name in PHASES)
        own: dict[str, Any] = {"first": jnp.full(1, run.start, jnp.int32), "caches": tuple(caches[i] for i in run)}
        _launch(kernel, plan, BlockOperands(weights=weights, **own, **always))
    keys, values = (tuple(jax.freeze(cache[which]) for cache in caches) for which in range(2))
    return jax.freeze(begin.residual)[: block.shape.rows], keys, values


def launches(layers: int) -> list[range]:
    """Which layers each launch of a step takes: as many as may be, and about as many in each."""
    count = cdiv(layers, LAYERS)
    bounds = [layers * i // count for i in range(count + 1)]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


def _begin(plan: BlockPlan, x: Array, scale: Array) -> tuple[Begin, Array]:
    """The embeddings as one layer leaves its rows for the next, and all letters, of which it has sent its squares."""
    wide, letters = x.astype(jnp.float32), letters_of(plan)
    rows = wide * (scale.astype(jnp.float32) + float(plan.unit_offset))[None]
    squares = jnp.sum((wide * wide).reshape(x.shape[0], -1, COLUMNS), axis=-1)
    sent = lax.bitcast_convert_type(squares, jnp.int32).reshape(-1, 1)
    sent = jnp.concatenate([sent, jnp.ones_like(sent)], axis=1)  # of the first turn, in which they are asked for
    sent = jnp.pad(sent, ((0, letters.total - squares.size), (0, 0)))

    def padded(values: Array, shape: Any) -> Array:
        return jnp.pad(values, [(0, size - had) for had, size in zip(values.shape, shape.shape, strict=True)])

    return Begin(*map(padded, (x, rows.astype(x.dtype)), beginning(plan, x.dtype))), sent


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that launches that are alike are lowered once
def _launch(kernel: Kernel, plan: BlockPlan, operands: BlockOperands) -> None:
    kernel(plan, operands)


def _matrices(mlp: MlpWeights) -> dict[str, Array]:
    """By the products that they are of."""
    return {"out": mlp.out, "gate_up": mlp.gate_up.reshape(mlp.gate_up.shape[0], -1), "down": mlp.down}


def _of_heads(layers: Sequence[HeadWeights]) -> dict[str, Any]:
    """What makes queries and keys besides the product, of some layers."""

    def stacked(name: str) -> Array | None:
        return None if getattr(layers[0], name) is None else jnp.stack([getattr(heads, name) for heads in layers])

    scales = [] if layers[0].query_norm is None else ["query_norm", "key_norm"]
    return {"bias": stacked("bias"), "head_scales": tuple(map(stacked, scales))}


def _narrow(places: Any) -> Places:
    """Places in the kernel's numbers, whatever the caller's are."""
    lead, slot, cos, sin = places
    return Places(lead.astype(jnp.int32), slot.astype(jnp.int32), cos.astype(jnp.float32), sin.astype(jnp.float32))


def _products(has_mlp: bool, has_heads: bool) -> tuple[str, ...]:
    return (PRODUCTS[:3] if has_mlp else ()) + (PRODUCTS[3:] if has_heads else ())


def _layers_plan(request: LayersRequest, layers: int) -> BlockPlan:
    return _plan(request.block, PHASES, layers_config(request), attention=request.attention, layers=layers)


def _plan(request: BlockRequest, phases: tuple[str, ...], config: BlockConfig, **more: Any) -> BlockPlan:
    form = request.form
    return BlockPlan(
        request.shape,
        config,
        phases,
        form.eps,
        form.unit_offset,
        ACTIVATIONS[form.activation],
        biased="bias" in request.options,
        head_norms="head norms" in request.options,
        **more,
    )


def _config(request: BlockRequest) -> BlockConfig:
    return heuristic(request.shape, multiprocessors(request.device_kind))


def layers_config(request: LayersRequest) -> BlockConfig:
    """Launch settings of `decode_layers`."""
    return heuristic(request.block.shape, multiprocessors(request.block.device_kind), attends=True)
