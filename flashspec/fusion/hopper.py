"""A matmul with its tail by our Hopper kernels, which are passed in so that tests run stand-ins."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from flashspec.devices import multiprocessors
from flashspec.fusion.request import ACTIVATIONS, EpilogueOperands, EpilogueRequest
from flashspec.fusion.splitting import lift
from flashspec.fusion.xla import xla_epilogue
from flashspec.selection import elsewhere
from pallas_kernels.gpu.hopper.matmul_epilogue_config import (
    FewRowsConfig,
    MatmulShape,
    heuristic,
    passed_over,
    unmeasured_pair,
)
from pallas_kernels.launch import round_up, varying_alike

CAPABILITY = "9.0"
IN_KERNEL = tuple(name for name in ACTIVATIONS if name != "gelu_exact")  # the chip has no fast error function
ROWS, COLUMNS = 8, 64  # what the copy engine takes: whole multiples of them


class Kernels(NamedTuple):
    """The kernels of `pallas_kernels.gpu.hopper`, or stand-ins with their signatures."""

    many_rows: Callable[..., Array]
    few_rows: Callable[..., Array]


def refusals(request: EpilogueRequest) -> tuple[str, ...]:
    """Why the Hopper kernels cannot run a call; empty when they can."""
    return elsewhere(CAPABILITY, request.platform, request.compute_capability) + kernel_refusals(request)


def kernel_refusals(request: EpilogueRequest) -> tuple[str, ...]:
    """`refusals` but for the device: what the kernels cannot do wherever they are compiled for."""
    sizes = f"{request.inputs} inputs and {request.outputs} outputs"
    rules = (
        (request.dtype not in (jnp.bfloat16, np.float16), f"computes in bfloat16 or float16, not in {request.dtype}"),
        (
            request.activation is not None and request.activation not in IN_KERNEL,
            f"has the activations {', '.join(IN_KERNEL)}, not {request.activation}",
        ),
        (0 in (request.rows, request.inputs, request.outputs), "takes no empty operand"),
        (
            request.inputs % COLUMNS > 0 or request.outputs % COLUMNS > 0,
            f"needs inputs and outputs in multiples of {COLUMNS}, not {sizes}",
        ),
        (request.wide_options, "takes biases and residuals of 16 or 32 bits, not of 64"),
    )
    return tuple(reason for refused, reason in rules if refused)


def launch_config(request: EpilogueRequest) -> Mapping[str, int]:
    """Launch settings, for the plan."""
    return {name: int(value) for name, value in dataclasses.asdict(heuristic(*_launch(request))).items()}


def slower(request: EpilogueRequest) -> str | None:
    """Why XLA is taken for a call that the kernels can run, unless they are asked for; None where they are."""
    return passed_over(*_launch(request))


def unmeasured(request: EpilogueRequest) -> str | None:
    """Why a gate beside what it gates is left to XLA's one product of both; None where that was slower."""
    return unmeasured_pair(request.rows, request.inputs, request.outputs)


def _launch(request: EpilogueRequest) -> tuple[MatmulShape, int]:
    """Sizes of the launch of a call on one device, and the multiprocessors of that."""
    rows = request.rows if request.rows <= ROWS else round_up(request.rows, ROWS)
    itemsize = 4 if "residual" in request.options else 0
    shape = MatmulShape(rows, request.outputs, request.inputs, request.products, itemsize)
    return shape, multiprocessors(request.device_kind)


def hopper_epilogue(kernels: Kernels, request: EpilogueRequest, operands: EpilogueOperands) -> Array:
    """phi(x W + b), or phi(x W_g + b_g) * (x W + b); + residual (section 33.4).

    Args:
      kernels: the kernels, or stand-ins.
      request: static facts of the call, one that `kernel_refusals` has nothing against.
      operands: its arrays.
    """
    leading, outputs = operands.x.shape[:-1], request.outputs
    flat = dataclasses.replace(
        operands,
        x=operands.x.reshape(-1, request.inputs),
        residual=None if operands.residual is None else operands.residual.reshape(-1, outputs),
    )
    call = lift(functools.partial(_on_one_device, kernels, request), functools.partial(xla_epilogue, request))
    return call(varying_alike(flat)).reshape(*leading, outputs)


def _on_one_device(kernels: Kernels, request: EpilogueRequest, operands: EpilogueOperands) -> Array:
    """The kernel that suits the sizes; or XLA where a part of a split call is none that the kernels take."""
    (rows, inputs), outputs = operands.x.shape, operands.w.shape[-1]
    if kernel_refusals(dataclasses.replace(request, rows=rows, inputs=inputs, outputs=outputs)):
        return xla_epilogue(request, operands)
    padded = rows if rows <= ROWS else round_up(rows, ROWS)
    x, residual = operands.x, operands.residual
    if padded > rows:
        x = jnp.pad(x, ((0, padded - rows), (0, 0)))
        residual = None if residual is None else jnp.pad(residual, ((0, padded - rows), (0, 0)))
    itemsize = 0 if residual is None else residual.dtype.itemsize
    shape = MatmulShape(padded, outputs, inputs, request.products, itemsize)
    config = heuristic(shape, multiprocessors(request.device_kind))
    kernel = kernels.few_rows if isinstance(config, FewRowsConfig) else kernels.many_rows
    activation = request.activation if isinstance(request.activation, str) else None
    options = {"gate": operands.gate, "gate_bias": operands.gate_bias, "residual": residual}
    return kernel(x, operands.w, operands.bias, activation=activation, config=config, **options)[:rows]
