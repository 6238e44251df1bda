"""The implementations of a matmul with its tail, what each refuses, and the choice among them.

This is the only file of the package that imports kernel bodies.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flashspec.fusion import decode_block_hopper, hopper, tpu
from flashspec.fusion.reference import reference_epilogue
from flashspec.fusion.request import EpilogueOperands, EpilogueRequest
from flashspec.fusion.xla import xla_epilogue
from flashspec.selection import Implementation, Target, axis_names, first_that_can, named, run_where_lowered


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation.

    Args:
      name: what callers select it by.
      supports: reasons why it cannot run a request, forward and backward; pure, and empty when it can.
      compute: the call itself; None where nothing is built in.
      backward: the name of what runs in the backward; its own where `compute` differentiates itself.
      config: launch settings for a request, for the plan.
      slower: why XLA is taken where nobody asks for this one, by measurement; None where this one is taken.
    """

    name: str
    supports: Callable[[EpilogueRequest], tuple[str, ...]]
    compute: Callable[[EpilogueRequest, EpilogueOperands], jax.Array] | None = None
    backward: str = "xla"
    config: Callable[[EpilogueRequest], Mapping[str, int]] = lambda request: {}
    slower: Callable[[EpilogueRequest], str | None] = lambda request: None


@functools.cache
def _hopper_kernels() -> hopper.Kernels:
    """Imported when first used, so that `import flashspec` stays quick."""
    from pallas_kernels.gpu.hopper.matmul_epilogue import matmul_epilogue
    from pallas_kernels.gpu.hopper.matmul_epilogue_rows import matmul_epilogue_rows

    return hopper.Kernels(matmul_epilogue, matmul_epilogue_rows)


def decode_block_kernel() -> decode_block_hopper.Kernel:
    """Imported when first used, so that `import flashspec` stays quick."""
    from pallas_kernels.gpu.hopper.decode_block import decode_block

    return decode_block


def _tpu_kernel() -> Callable[..., jax.Array]:
    """Imported when first used, so that `import flashspec` stays quick."""
    from pallas_kernels.tpu.matmul_epilogue import matmul_epilogue

    return matmul_epilogue


def _anything(request: EpilogueRequest) -> tuple[str, ...]:
    return ()


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            "hopper",
            hopper.refusals,
            lambda request, operands: hopper.hopper_epilogue(_hopper_kernels(), request, operands),
            config=hopper.launch_config,
            slower=hopper.slower,
        ),
        Backend(
            "tpu",
            tpu.refusals,
            lambda request, operands: tpu.tpu_epilogue(_tpu_kernel(), request, operands),
            config=tpu.launch_config,
        ),
        Backend("xla", _anything, xla_epilogue),
        Backend("reference", _anything, reference_epilogue, backward="reference"),
    )
}


def candidates(request: EpilogueRequest, implementation: Implementation) -> tuple[str, ...]:
    """Names to try in order: those that the caller gave, or a kernel of the request's platform, then XLA.

    A kernel that can run the call and is slower there is left out.
    """
    if implementation is not None:
        return named(implementation, tuple(BACKENDS))
    kernels = {"cuda": ("hopper",), "tpu": ("tpu",)}.get(request.platform, ())
    return (*(name for name in kernels if BACKENDS[name].slower(request) is None), "xla")


def select(request: EpilogueRequest, implementation: Implementation) -> Backend:
    """The first candidate that supports the request.

    Raises:
      ValueError: an implementation that does not exist.
      NotImplementedError: none supports the request; the message has every reason of every candidate.
    """
    return BACKENDS[first_that_can(candidates(request, implementation), lambda name: BACKENDS[name].supports(request))]


def run(request: EpilogueRequest, operands: EpilogueOperands, implementation: Implementation) -> jax.Array:
    """Run a call on the implementation selected for the platform that it will be lowered for."""

    def select_for(target: Target) -> str:
        return select(request.on(target), implementation).name

    here = Target(request.device_kind or "", request.platform, request.compute_capability)
    return run_where_lowered(operands, here, select_for, functools.partial(execute, request))


def scope(name: str) -> str:
    """The named scope of an implementation: what marks its operations in a compiled program."""
    return f"flashspec.fusion.{name}"


@functools.partial(jax.jit, static_argnums=(0, 1))
def execute(request: EpilogueRequest, name: str, operands: EpilogueOperands) -> jax.Array:
    """A call on the implementation of this name, which has to support it."""
    compute = _differentiable(request, BACKENDS[name])

    def call(operands: EpilogueOperands) -> jax.Array:
        with jax.named_scope(scope(name)):
            return compute(operands)

    mesh = jax.typeof(operands.x).sharding.mesh
    if not mesh.explicit_axes:
        return call(operands)
    # XLA puts the reduction of a split contraction right after the product: before bias, activation and residual.
    with jax.sharding.use_abstract_mesh(mesh):
        auto = jax.sharding.auto_axes(call, axes=mesh.explicit_axes, out_sharding=_result_spec(operands))
        return auto(operands)


def _differentiable(request: EpilogueRequest, backend: Backend) -> Callable[[EpilogueOperands], jax.Array]:
    """The call with the backward that the backend names; another's computes the products again."""
    compute: Any = backend.compute
    if backend.backward == backend.name:
        return functools.partial(compute, request)
    other: Any = BACKENDS[backend.backward].compute

    @jax.custom_vjp
    def call(operands: EpilogueOperands) -> jax.Array:
        return compute(request, operands)

    def forward(operands: EpilogueOperands) -> tuple[jax.Array, EpilogueOperands]:
        return call(operands), operands

    def backward(operands: EpilogueOperands, gradient: jax.Array) -> Any:
        return jax.vjp(functools.partial(other, request), operands)[1](gradient)

    call.defvjp(forward, backward)
    return call


def _result_spec(operands: EpilogueOperands) -> PartitionSpec:
    """The result is split like the rows of x and the columns of w, as far as one mesh axis does not serve both."""
    rows = jax.typeof(operands.x).sharding.spec[:-1]
    columns = jax.typeof(operands.w).sharding.spec[-1]
    return PartitionSpec(
        *rows, None if set(axis_names(columns)) & {n for row in rows for n in axis_names(row)} else columns
    )
