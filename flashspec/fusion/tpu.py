"""A matmul with its tail by our TPU kernel, which is passed in so that tests run it in an interpreter."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.fusion.request import ACTIVATIONS, EpilogueOperands, EpilogueRequest
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
    split = tuple(f"{axis} is split over devices" for axis in request.partitioned)
    return split + tuple(reason for refused, reason in rules if refused)


def launch_config(request: EpilogueRequest) -> Mapping[str, int]:
    """Block sizes, for the plan."""
    config = _config(request)
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
    rows, outputs = request.rows, request.outputs
    result = kernel(
        operands.x.reshape(rows, request.inputs),
        operands.w,
        operands.bias,
        activation=None if request.activation is None else request.activate,
        gate=operands.gate,
        gate_bias=operands.gate_bias,
        residual=None if operands.residual is None else operands.residual.reshape(rows, outputs),
        config=_config(request),
        interpret=interpret,
    )
    return result.reshape(*operands.x.shape[:-1], outputs)


def _config(request: EpilogueRequest) -> MatmulEpilogueConfig:
    return heuristic(request.rows, request.outputs, request.inputs, request.dtype.itemsize, request.products)
