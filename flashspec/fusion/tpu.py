"""A matmul with its tail by our TPU kernel, which is passed in so that tests run it in an interpreter."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from flashspec.fusion.request import ACTIVATIONS, EpilogueOperands, EpilogueRequest
from flashspec.selection import axis_names
from pallas_kernels.tpu.matmul_epilogue_config import MatmulEpilogueConfig, heuristic

# What the TPU compiler lowers inside of a kernel: no erfc, and nobody knows what a caller's own function is made of.
IN_KERNEL = tuple(name for name in ACTIVATIONS if name != "gelu_exact")


def refusals(request: EpilogueRequest) -> tuple[str, ...]:
    """Why the TPU kernel cannot run a call; empty when it can."""
    platform = () if request.platform == "tpu" else (f"runs on TPUs only, not on {request.platform}",)
    return platform + kernel_refusals(request)


def kernel_refusals(request: EpilogueRequest) -> tuple[str, ...]:
    """`refusals` but for the platform: what the kernel cannot do wherever it runs."""
    rules = (
        (request.dtype not in (jnp.bfloat16, np.float32), f"computes in bfloat16 or float32, not in {request.dtype}"),
        (
            request.activation is not None and request.activation not in IN_KERNEL,
            f"has the activations {', '.join(IN_KERNEL)}, not {request.activation}",
        ),
        (0 in (request.rows, request.inputs, request.outputs), "takes no empty operand"),
    )
    return _split_refusals(request) + tuple(reason for refused, reason in rules if refused)


def _split_refusals(request: EpilogueRequest) -> tuple[str, ...]:
    """Why the kernel cannot run on the parts of operands that devices have: they may split rows and outputs."""
    if request.placements == (None, None):
        return ()
    if request.paired:
        return ("takes the gate as an array of its own where w is split",)
    advice = "call it in `jax.shard_map`"
    layout = _layout(request)
    if layout is None:
        return (f"lies on a mesh where tracing does not show how x and w are split, or in part: {advice}",)
    reasons = []
    if layout.inputs:
        reasons.append(f"finishes its sums inside, and devices split what is summed over: {advice}")
    columns = axis_names(layout.outputs)
    if any(name in columns for entry in layout.rows for name in axis_names(entry)):
        reasons.append(f"splits rows and outputs over different mesh axes only: {advice}")
    return tuple(reasons)


class _Layout(NamedTuple):
    """Over which axes of a mesh devices split a call.

    Args:
      mesh: of the devices.
      rows: for each leading axis of x.
      outputs: for the last axis of w.
      inputs: whether the axis that is summed over is split.
    """

    mesh: Any
    rows: tuple[Any, ...]
    outputs: Any
    inputs: bool


def _layout(request: EpilogueRequest) -> _Layout | None:
    """How devices split a call; None where that is not visible."""
    x, w = request.placements
    if x is None or w is None or x.spec is None or w.spec is None:
        return None
    inputs = any(entry is not None for entry in (x.spec[-1], w.spec[0]))
    return _Layout(x.mesh, x.spec[:-1], w.spec[-1], inputs)


def launch_config(request: EpilogueRequest) -> Mapping[str, int]:
    """Block sizes on one device, for the plan."""
    x, w = request.placements
    row_parts = 1 if x is None or x.spec is None else math.prod(x.parts(axis) for axis in range(len(x.spec) - 1))
    config = _config(request, request.rows // row_parts, request.outputs // (1 if w is None else w.parts(1)))
    return {"block_m": config.block_m, "block_n": config.block_n, "block_k": config.block_k}


def tpu_epilogue(
    kernel: Callable[..., jax.Array], request: EpilogueRequest, operands: EpilogueOperands, interpret: Any = False
) -> jax.Array:
    """phi(x W + b), or phi(x W_g + b_g) * (x W + b); + residual (section 33.4).

    Args:
      kernel: `matmul_epilogue` of `pallas_kernels.tpu`, or a stand-in.
      request: static facts of the call, one that `kernel_refusals` has nothing against.
      operands: its arrays.
      interpret: as in `pl.pallas_call`.
    """
    operands = operands.apart()

    def local(operands: EpilogueOperands) -> jax.Array:
        x, residual = operands.x, operands.residual
        outputs = operands.w.shape[1]
        result = kernel(
            x.reshape(-1, request.inputs),
            operands.w,
            operands.bias,
            activation=None if request.activation is None else request.activate,
            gate=operands.gate,
            gate_bias=operands.gate_bias,
            residual=None if residual is None else residual.reshape(-1, outputs),
            config=_config(request, math.prod(x.shape[:-1]), outputs),
            interpret=interpret,
        )
        return result.reshape(*x.shape[:-1], outputs)

    layout = _layout(request)
    if layout is None:
        return local(operands)
    of_rows, weights, vector = (P(*layout.rows, layout.outputs), P(None, layout.outputs), P(layout.outputs))
    specs = {"x": P(*layout.rows), "w": weights, "gate": weights, "bias": vector, "gate_bias": vector}
    specs["residual"] = of_rows
    given: Any = {name: None if getattr(operands, name) is None else spec for name, spec in specs.items()}
    split = jax.shard_map(
        local,
        mesh=layout.mesh if jax.sharding.get_abstract_mesh().empty else None,
        in_specs=(EpilogueOperands(**given),),
        out_specs=of_rows,
        check_vma=False,  # nothing differentiates through it
    )
    return split(operands)


def _config(request: EpilogueRequest, rows: int, outputs: int) -> MatmulEpilogueConfig:
    return heuristic(rows, outputs, request.inputs, request.dtype.itemsize, request.products)
