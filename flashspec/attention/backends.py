"""The implementations of attention, what each refuses, and the one loop that selects among them.

This is the only file of the package that imports kernel bodies.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flashspec.attention import ampere, blockwise, cudnn, hopper, reference, tpu, tpu_decode
from flashspec.attention.gpu_kernels import Kernels
from flashspec.attention.request import AttentionOperands, AttentionRequest
from flashspec.attention.settings import AttentionImplementation, split
from flashspec.online_softmax import SoftmaxStats
from flashspec.selection import Target, first_that_can, named, run_where_lowered

type Attend = Callable[[AttentionRequest, AttentionOperands], tuple[jax.Array, jax.Array | None]]

# Up to this many scores a head, a matrix is no larger than one tile of the blockwise scan, which then gains nothing.
SMALL = 128 * 128


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation.

    Args:
      name: what callers select it by.
      supports: reasons why it cannot run a request, forward and backward; pure, and empty when it can.
      attend: the call itself, None where nothing is built in; returns output and lse (None if it has none).
      stats: the same for `attention_stats`.
      config: launch settings for a request, for the plan.
      sources: where those of each direction come from, "forward" and "backward".
      backward: which implementation computes the gradients, where it is another one.
      copies: bytes of each array that it copies whatever its layout, for the plan.
      row_major: whether it reads row-major operands only, so that any other layout costs a copy.
    """

    name: str
    supports: Callable[[AttentionRequest], tuple[str, ...]]
    attend: Attend | None = None
    stats: Callable[[AttentionRequest, AttentionOperands], SoftmaxStats] | None = None
    config: Callable[[AttentionRequest], Mapping[str, int]] = lambda request: {}
    sources: Callable[[AttentionRequest], Mapping[str, str]] = lambda request: {}
    row_major: bool = False
    backward: Callable[[AttentionRequest], str] | None = None
    copies: Callable[[AttentionRequest], Mapping[str, int]] = lambda request: {}


def _partitioned(request: AttentionRequest) -> tuple[str, ...]:
    advice = "compute `attention_stats` of each part in `jax.shard_map` and merge them with `merge_across`"
    return tuple(f"{axis} is split over devices: {advice}" for axis in request.partitioned)


def _cudnn(request: AttentionRequest) -> tuple[str, ...]:
    return cudnn.refusals(request) + _partitioned(request)


def _hopper(request: AttentionRequest) -> tuple[str, ...]:
    return hopper.refusals(request) + _partitioned(request)


def _hopper_kernels() -> Kernels:
    """Imported when first used, so that `import flashspec` stays quick."""
    from pallas_kernels.gpu.hopper.attention_backward import attention_backward
    from pallas_kernels.gpu.hopper.attention_backward_delta import delta_and_zeros
    from pallas_kernels.gpu.hopper.attention_forward import attention_forward

    return Kernels(attention_forward, attention_backward, delta_and_zeros)


def _ampere(request: AttentionRequest) -> tuple[str, ...]:
    return ampere.refusals(request) + _partitioned(request)


def _ampere_kernels() -> Kernels:
    """Imported when first used, so that `import flashspec` stays quick."""
    from pallas_kernels.gpu.ampere.attention_backward import attention_backward
    from pallas_kernels.gpu.ampere.attention_forward import attention_forward

    return Kernels(attention_forward, attention_backward)


def hopper_decode_kernel() -> Callable[..., tuple[jax.Array, ...]]:
    """The decode kernel for Hopper; imported when first used."""
    from pallas_kernels.gpu.hopper.attention_decode import decode

    return decode


def _tpu(request: AttentionRequest) -> tuple[str, ...]:
    return tpu.refusals(request) + _partitioned(request)


def _tpu_kernels() -> tpu.Kernels:
    """Imported when first used, so that `import flashspec` stays quick."""
    from pallas_kernels.tpu.attention_backward import attention_backward
    from pallas_kernels.tpu.attention_forward import attention_forward

    return tpu.Kernels(attention_forward, attention_backward)


def tpu_decode_kernel() -> tpu_decode.Kernel:
    """The decode kernel for TPUs; imported when first used."""
    from pallas_kernels.tpu.attention_decode import Cache, DecodeRows, attention_decode

    return tpu_decode.Kernel(attention_decode, Cache, DecodeRows)


def _blocks(request: AttentionRequest) -> Mapping[str, int]:
    blocks = blockwise.Blocks()
    return {"block_queries": min(blocks.query, request.T), "block_keys": min(blocks.key, request.S)}


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            "hopper",
            _hopper,
            lambda request, operands: hopper.hopper_attention(_hopper_kernels(), request, operands),
            lambda request, operands: hopper.hopper_stats(_hopper_kernels(), request, operands),
            config=hopper.launch_config,
            sources=hopper.sources,
            row_major=True,
            copies=hopper.copies,
        ),
        Backend(
            "ampere",
            _ampere,
            lambda request, operands: ampere.ampere_attention(_ampere_kernels(), request, operands),
            lambda request, operands: ampere.ampere_stats(_ampere_kernels(), request, operands),
            config=ampere.launch_config,
            sources=ampere.sources,
            row_major=True,
            backward=ampere.backward,
            copies=ampere.copies,
        ),
        Backend(
            "tpu",
            _tpu,
            lambda request, operands: tpu.tpu_attention(_tpu_kernels(), request, operands),
            lambda request, operands: tpu.tpu_stats(_tpu_kernels(), request, operands),
            config=tpu.launch_config,
            row_major=True,
        ),
        Backend("cudnn", _cudnn, cudnn.cudnn_attention, row_major=True),
        Backend("blockwise", _partitioned, blockwise.blockwise_attention, blockwise.blockwise_stats, config=_blocks),
        Backend("reference", _partitioned, reference.reference_attention, reference.reference_stats),
    )
}


def candidates(request: AttentionRequest, implementation: AttentionImplementation) -> tuple[str, ...]:
    """Names to try in order: those that the caller gave, or the best first for the request's platform.

    Kernels of the platform come first, then what XLA compiles anywhere: "reference" for matrices of at most `SMALL`
    scores, "blockwise" for larger ones.
    """
    names, _ = split(implementation)
    if names is not None:
        return named(names, tuple(BACKENDS))
    kernels = {"cuda": ("hopper", "cudnn", "ampere"), "tpu": ("tpu",)}.get(request.platform, ())
    xla = ("reference", "blockwise") if request.T * request.S <= SMALL else ("blockwise", "reference")
    return (*kernels, *xla)


def select(request: AttentionRequest, implementation: AttentionImplementation) -> Backend:
    """The first candidate that supports the request.

    Raises:
      ValueError: an implementation that does not exist.
      NotImplementedError: none supports the request; the message has every reason of every candidate.
    """
    return BACKENDS[first_that_can(candidates(request, implementation), lambda name: BACKENDS[name].supports(request))]


def run(request: AttentionRequest, operands: AttentionOperands, implementation: AttentionImplementation) -> Any:
    """Run a call on the implementation selected for the platform that it will be lowered for.

    Concrete operands say where they are. While tracing, the platform is known to XLA alone, so where the platforms of
    this process would select differently, each one's selection is traced and the lowering keeps its own.

    Returns:
      (output, lse), with lse None unless asked for, or `SoftmaxStats` when the request is for statistics.
    """
    return by_platform(request, operands, lambda request: select(request, implementation).name, _execute)


def by_platform(
    request: AttentionRequest,
    operands: Any,
    choose: Callable[[AttentionRequest], str],
    execute: Callable[[AttentionRequest, str, Any], Any],
) -> Any:
    """`execute(request, name, operands)` by the name chosen for each platform that the call may be lowered for.

    What is executed has the facts of the platform that chose it; where several choose alike, those of the first.
    """
    chosen: dict[str, AttentionRequest] = {}

    def choose_for(target: Target) -> str:
        there = dataclasses.replace(
            request,
            platform=target.platform,
            compute_capability=target.compute_capability,
            device_kind=target.kind or None,
        )
        name = choose(there)
        chosen.setdefault(name, there)
        return name

    here = Target(request.device_kind or "", request.platform, request.compute_capability)
    return run_where_lowered(operands, here, choose_for, lambda name, arrays: execute(chosen[name], name, arrays))


def scope(name: str) -> str:
    """The named scope of an implementation: what marks its operations in a compiled program."""
    return f"flashspec.attention.{name}"


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that repeated eager calls compile their loops once
def _execute(request: AttentionRequest, name: str, operands: AttentionOperands) -> Any:
    rows, wide = row_specs(operands.query)
    results: Any = (wide, rows if request.return_lse else None)
    if request.statistics:
        results = SoftmaxStats(rows, rows, wide, rows)
    return in_auto_mode(functools.partial(_call, request, BACKENDS[name]), operands, results)


def row_specs(query: jax.Array) -> tuple[Any, Any]:
    """How the rows [B, T, N] and the output [B, T, N, Hv] of a query are split in explicit mode: as it is."""
    batch, _, heads, _ = jax.typeof(query).sharding.spec
    return PartitionSpec(batch, None, heads), PartitionSpec(batch, None, heads, None)


def in_auto_mode[T](call: Callable[[Any], T], operands: Any, results: Any) -> T:
    """`call(operands)` with the explicit axes of the query's mesh left to XLA, shardings named for `results` alone.

    Loops and masks in explicit mode would each have to name theirs.
    """
    mesh = jax.typeof(operands.query).sharding.mesh
    if not mesh.explicit_axes:
        return call(operands)
    with jax.sharding.use_abstract_mesh(mesh):  # the operands may lie on a mesh that nobody has set
        return jax.sharding.auto_axes(call, axes=mesh.explicit_axes, out_sharding=results)(operands)


def _call(request: AttentionRequest, backend: Backend, operands: AttentionOperands) -> Any:
    with jax.named_scope(scope(backend.name)):
        if request.statistics:
            assert backend.stats is not None
            return backend.stats(request, operands)
        assert backend.attend is not None
        output, lse = backend.attend(request, operands)
    return output, (lse if request.return_lse else None)
