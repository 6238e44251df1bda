"""The fused decoder step by our Hopper kernel, which is passed in so that tests run a stand-in."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

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
    COUNTS,
    PHASES,
    PRODUCTS,
    TOGETHER,
    AttentionForm,
    BlockConfig,
    BlockOperands,
    BlockPlan,
    Places,
    heuristic,
)
from pallas_kernels.gpu.hopper.decode_block_config import refusals as kernel_refusals

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
    held = {"key": arrays.key, "value": arrays.value, "counts": arrays.stream.counts}
    refs: dict[str, Any] = {name: jax.new_ref(x) for name, x in held.items() if x is not None}
    given: dict[str, Any] = {"scales": (), "weights": ()}
    if mlp is None:
        assert heads is not None
        given["x"] = norm(arrays.stream.residual[: request.shape.rows], heads.norm, form)
    else:
        given |= {"x": arrays.attended, "residual": arrays.stream.residual, "scales": (mlp.norm,)}
        given["weights"] = _matrices(mlp)
        given["scales"] += () if heads is None else (heads.norm,)
    if heads is not None:
        given |= {"weights": (*given["weights"], heads.qkv), "places": _narrow(arrays.places)} | _of_heads(heads)
        given["written"] = refs["key"], refs["value"]
    out = kernel(plan, BlockOperands(**given, counts=refs["counts"]))
    after: dict[str, Array] = {name: jax.freeze(ref) for name, ref in refs.items()}
    stream = Stream(arrays.stream.residual if mlp is None else out.residual, after["counts"])
    query = None if heads is None else out.query.reshape(request.shape.rows, -1, form.heads.H)
    return stream, query, after.get("key"), after.get("value")


def decode_layers(kernel: Kernel, request: LayersRequest, arrays: LayersArrays) -> tuple[Any, ...]:
    """(residual, keys, values) as `flashspec.fusion.decode_layers.decode_layers` gives them, a layer a launch.

    The first launch makes the first layer's queries; each one after it has a layer, and makes the next queries.

    Args:
      kernel: the kernel, or a stand-in.
      request: static facts of the call, one that `refusals` has nothing against.
      arrays: of the call.
    """
    layers, block = arrays.layers, request.block
    refs = jax.tree.map(jax.new_ref, (arrays.keys, arrays.values, jnp.zeros(COUNTS, jnp.int32)))
    *caches, counts = (*zip(refs[0], refs[1], strict=True), refs[2])
    launch = functools.partial(_launch, kernel, request, layers_config(request))
    always: dict[str, Any] = {
        "places": _narrow(arrays.places),
        "lengths": arrays.lengths.astype(jnp.int32),
        "counts": counts,
    }
    x = norm(arrays.x, layers[0].heads.norm, block.form)
    first: dict[str, Any] = {"x": x, "weights": (layers[0].heads.qkv,), "written": caches[0]}
    _, query = launch(PHASES[-1:], BlockOperands(**first, **_of_heads(layers[0].heads), **always))
    residual = jnp.pad(arrays.x, ((0, -block.shape.rows % TOGETHER), (0, 0)))
    for layer, (_, mlp) in enumerate(layers):
        given: dict[str, Any] = {"attended": caches[layer], "weights": (None, None, *_matrices(mlp))}
        given["scales"] = (mlp.norm,)
        phases: tuple[str, ...] = PHASES[:-1]
        if layer + 1 < len(layers):
            after, phases = layers[layer + 1].heads, PHASES
            given |= {"weights": (*given["weights"], after.qkv), "scales": (mlp.norm, after.norm)} | _of_heads(after)
            given["written"] = caches[layer + 1]
        residual, query = launch(phases, BlockOperands(residual=residual, query=query, **given, **always))
    keys, values, _ = jax.tree.map(jax.freeze, refs)
    assert residual is not None
    return residual[: block.shape.rows], keys, values


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))  # so that launches that are alike are lowered once
def _launch(
    kernel: Kernel, request: LayersRequest, config: BlockConfig, phases: tuple[str, ...], operands: BlockOperands
) -> tuple[Array | None, Array | None]:
    out = kernel(_plan(request.block, phases, config, request.attention), operands)
    return out.residual, out.query


def _matrices(mlp: MlpWeights) -> tuple[Array, Array, Array]:
    return mlp.out, mlp.gate_up.reshape(mlp.gate_up.shape[0], -1), mlp.down


def _of_heads(heads: HeadWeights) -> dict[str, Any]:
    """What makes queries and keys besides the product."""
    scales = () if heads.query_norm is None else (heads.query_norm, heads.key_norm)
    return {"bias": heads.bias, "head_scales": scales}


def _narrow(places: Any) -> Places:
    """Places in the kernel's numbers, whatever the caller's are."""
    lead, slot, cos, sin = places
    return Places(lead.astype(jnp.int32), slot.astype(jnp.int32), cos.astype(jnp.float32), sin.astype(jnp.float32))


def _products(has_mlp: bool, has_heads: bool) -> tuple[str, ...]:
    return (PRODUCTS[:3] if has_mlp else ()) + (PRODUCTS[3:] if has_heads else ())


def _plan(
    request: BlockRequest, phases: tuple[str, ...], config: BlockConfig, attention: AttentionForm | None = None
) -> BlockPlan:
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
        attention=attention,
    )


def _config(request: BlockRequest) -> BlockConfig:
    return heuristic(request.shape, multiprocessors(request.device_kind))


def layers_config(request: LayersRequest) -> BlockConfig:
    """Launch settings of `decode_layers`."""
    return heuristic(request.block.shape, multiprocessors(request.block.device_kind), attends=True)
