"""The fused decoder step by our Hopper kernel, which is passed in so that tests run a stand-in."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flashspec.devices import find_device_facts, multiprocessors
from flashspec.fusion.decode_block_request import BlockArrays, BlockRequest, Stream
from flashspec.fusion.decode_block_xla import norm
from flashspec.fusion.request import ACTIVATIONS
from flashspec.selection import elsewhere
from pallas_kernels.gpu.hopper.decode_block_config import (
    PRODUCTS,
    BlockConfig,
    BlockOperands,
    BlockPlan,
    Places,
    heuristic,
)
from pallas_kernels.gpu.hopper.decode_block_config import refusals as kernel_refusals

CAPABILITY = "9.0"

type Kernel = Callable[[BlockPlan, BlockOperands], Any]


def refusals(request: BlockRequest) -> tuple[str, ...]:
    """Why the Hopper kernel cannot run a call; empty when it can."""
    other = elsewhere(CAPABILITY, request.platform, request.compute_capability)
    if other:
        return other
    facts = find_device_facts(request.device_kind or "")
    if facts is None or facts.cores is None:
        kind = request.device_kind or "the device"
        return (f"needs to know the multiprocessors of {kind}: its programs wait for each other",)
    return what_it_takes(request, facts.cores)


def what_it_takes(request: BlockRequest, cores: int) -> tuple[str, ...]:
    """`refusals` but for the device."""
    rules = (
        (request.on_mesh, "reads the arrays of one device, not of a mesh"),
        (request.form.activation != "silu", f"has the activation silu, not {request.form.activation}"),
    )
    products = _products(request.shape.inner > 0, True)
    limits = kernel_refusals(request.shape, heuristic(request.shape, cores), request.dtype.name, products)
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
    plan = BlockPlan(
        request.shape,
        _config(request),
        _products(mlp is not None, heads is not None),
        form.eps,
        form.unit_offset,
        ACTIVATIONS[form.activation],
        biased="bias" in request.options,
        head_norms="head norms" in request.options,
    )
    held = {"key": arrays.key, "value": arrays.value, "counts": arrays.stream.counts}
    refs: dict[str, Any] = {name: jax.new_ref(x) for name, x in held.items() if x is not None}
    given: dict[str, Any] = {"scales": (), "weights": ()}
    if mlp is None:
        assert heads is not None
        given["x"] = norm(arrays.stream.residual[: request.shape.rows], heads.norm, form)
    else:
        given |= {"x": arrays.attended, "residual": arrays.stream.residual, "scales": (mlp.norm,)}
        given["weights"] = (mlp.out, mlp.gate_up.reshape(mlp.gate_up.shape[0], -1), mlp.down)
        given["scales"] += () if heads is None else (heads.norm,)
    if heads is not None:
        given |= {"weights": (*given["weights"], heads.qkv), "bias": heads.bias, "places": _narrow(arrays.places)}
        if heads.query_norm is not None:
            given["head_scales"] = (heads.query_norm, heads.key_norm)
    out = kernel(plan, BlockOperands(**given, **refs))
    after: dict[str, Array] = {name: jax.freeze(ref) for name, ref in refs.items()}
    stream = Stream(arrays.stream.residual if mlp is None else out.residual, after["counts"])
    return stream, out.query, after.get("key"), after.get("value")


def _narrow(places: Any) -> Places:
    """Places in the kernel's numbers, whatever the caller's are."""
    lead, slot, cos, sin = places
    return Places(lead.astype(jnp.int32), slot.astype(jnp.int32), cos.astype(jnp.float32), sin.astype(jnp.float32))


def _products(has_mlp: bool, has_heads: bool) -> tuple[str, ...]:
    return (PRODUCTS[:3] if has_mlp else ()) + (PRODUCTS[3:] if has_heads else ())


def _config(request: BlockRequest) -> BlockConfig:
    return heuristic(request.shape, multiprocessors(request.device_kind))
