"""Attention by Mosaic GPU kernels, differentiable: what the adaptors for Hopper and for other GPUs share.

Forward and backward are one function, differentiable in query, key, value and sinks: through output and log-normaliser,
or through (l, u) with m held constant (eq. 33.6 to 33.8).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from flashspec.attention.blockwise import blockwise_attention, blockwise_stats
from flashspec.attention.hopper_mask import Structure, hide, kernel_structure
from flashspec.attention.kernel_operands import without_pairs
from flashspec.attention.lifting import lift
from flashspec.attention.request import AttentionOperands, AttentionRequest
from flashspec.online_softmax import SoftmaxStats, empty_stats
from pallas_kernels.gpu.hopper.attention_forward_config import AttentionShape
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, SegmentIds
from pallas_kernels.launch import round_up, varying_alike

HEAD_MULTIPLE = 64
DQ_AXES = "B N I J P Q"  # of dQ while it is summed: tiles of a head, and the rows and columns of each


class Kernels(NamedTuple):
    """The kernels of `pallas_kernels.gpu.hopper` or `.ampere`, which share their signatures, or stand-ins.

    Args:
      forward, backward: the attention kernels.
      delta: of output, its gradient and the query's head size: delta, and `dq` of the backward, which then has no pass
        of its own over memory to make it; None to leave delta to XLA.
    """

    forward: Callable[..., tuple[Array, ...]]
    backward: Callable[..., tuple[Array, ...]]
    delta: Callable[..., tuple[Array, Array]] | None = None


class Tensors(NamedTuple):
    """What is differentiated, padded; also the form of its gradients."""

    query: Array  # [B, T, N, H]
    key: Array  # [B, S, K, H]
    value: Array  # [B, S, K, Hv]
    sinks: Array | None  # float32 [N]


@dataclasses.dataclass(frozen=True)
class Program:
    """What is static about a call: hashable, so that it can stand beside differentiated arguments.

    Args:
      kernels: of the device.
      mask, scale, soft_cap, statistics, deterministic: as the kernels take them.
      forward, backward: launch settings of the two kernels.
      backward_heads: the head sizes (H, Hv) that the backward computes with, at least those of the tensors.
    """

    kernels: Kernels
    mask: AttentionMask
    scale: float
    soft_cap: float | None
    statistics: bool
    forward: Any
    backward: Any
    backward_heads: tuple[int, int]
    deterministic: bool


class Family(NamedTuple):
    """The kernels of one kind of GPU, as an adaptor for it describes them.

    Args:
      name: of the backend.
      shape: the sizes, at least the call's own, that the forward computes with.
      program: what is static about a call with a mask.
      backward: which backend computes the gradients of a call; None where it is always this one.
    """

    name: str
    shape: Callable[[AttentionRequest], AttentionShape]
    program: Callable[[AttentionRequest, AttentionMask], Program]
    backward: Callable[[AttentionRequest], str] | None = None


def shape_of(request: AttentionRequest) -> AttentionShape:
    """The call's own sizes."""
    return AttentionShape(request.B, request.T, request.S, request.N, request.K, request.H, request.Hv)


def least_heads(sizes: Sequence[tuple[int, int]], H: int, Hv: int) -> tuple[int, int]:
    """The head sizes that a forward computes with: the least of the backward's `sizes`, else multiples of 64."""
    fitting = (pair for pair in sizes if pair[0] >= H and pair[1] >= Hv)
    return next(fitting, (round_up(H, HEAD_MULTIPLE), round_up(Hv, HEAD_MULTIPLE)))


def padded_bytes(
    given: AttentionShape, padded: AttentionShape, itemsize: int, *, blanked: bool = False
) -> dict[str, int]:
    """Bytes of each array whose sizes differ, and of all operands where what nobody sees is blanked, for the plan."""
    sizes = {
        "query": (given.B * given.N, (given.T, given.H), (padded.T, padded.H)),
        "key": (given.B * given.K, (given.S, given.H), (padded.S, padded.H)),
        "value": (given.B * given.K, (given.S, given.Hv), (padded.S, padded.Hv)),
        "output": (given.B * given.N, (given.T, given.Hv), (padded.T, padded.Hv)),
    }
    return {
        name: rows * length * size * itemsize
        for name, (rows, own, (length, size)) in sizes.items()
        if own != (length, size) or (blanked and name != "output")
    }


def launch_table(forward: Any, backward: Any | None, deterministic: bool) -> Mapping[str, int]:
    """Launch settings of forward and backward, for the plan; None where another backend has the gradients."""
    settings = dataclasses.asdict(forward)
    if backward is not None:
        others = dataclasses.asdict(backward) | {"deterministic": deterministic}
        settings |= {f"backward_{name}": value for name, value in others.items()}
    return {name: int(value) for name, value in settings.items()}


def kernel_attention(family: Family, request: AttentionRequest, operands: AttentionOperands) -> tuple[Array, Array]:
    """Attention output [B, T, N, Hv] and log-normaliser [B, T, N], differentiable."""
    if 0 in (request.B, request.T, request.S):
        return without_pairs(request, operands)

    def forward(operands: AttentionOperands) -> tuple[Array, Array]:
        output, lse = _run(family, request, operands)
        return output[:, : request.T, :, : request.Hv], jnp.swapaxes(lse[:, :, : request.T], 1, 2)

    return _differentiable(family, request, forward, blockwise_attention)(operands)


def kernel_stats(family: Family, request: AttentionRequest, operands: AttentionOperands) -> SoftmaxStats:
    """Statistics (m, l, u) of the call's keys, rows [B, T, N], differentiable."""
    if 0 in (request.B, request.T, request.S):
        return empty_stats((request.B, request.T, request.N), request.Hv, request.stats_dtype)

    def forward(operands: AttentionOperands) -> SoftmaxStats:
        u, m, l = _run(family, request, operands)
        m, l = (jnp.swapaxes(x[:, :, : request.T], 1, 2) for x in (lax.stop_gradient(m), l))
        return SoftmaxStats(m, l, u[:, : request.T, :, : request.Hv], m != -jnp.inf)

    return _differentiable(family, request, forward, blockwise_stats)(operands)


def _differentiable[T](
    family: Family, request: AttentionRequest, forward: Callable[[AttentionOperands], T], twin: Callable[..., T]
) -> Callable[[AttentionOperands], T]:
    """`forward`, which differentiates itself; or with the gradients of its twin, where the kernels have none."""
    if family.backward is None or family.backward(request) == family.name:
        return forward
    call = jax.custom_vjp(forward)

    def gradients(operands: AttentionOperands, cotangents: T) -> tuple[AttentionOperands]:
        _, pull = jax.vjp(functools.partial(twin, request), operands)
        return pull(cotangents)

    call.defvjp(lambda operands: (forward(operands), operands), gradients)
    return call


def _run(family: Family, request: AttentionRequest, operands: AttentionOperands) -> tuple[Array, ...]:
    """The kernels over padded operands: (output, lse), or (u, m, l) for statistics, rows [B, N, T padded]."""
    mask, structure = kernel_structure(operands.mask)
    query, key, value = hide(request, operands, structure)
    s = family.shape(request)
    tensors = Tensors(_pad(query, s.T, s.H), _pad(key, s.S, s.H), _pad(value, s.S, s.Hv), operands.sinks)
    tensors, structure = varying_alike((tensors, structure))
    return attend(family.program(request, mask), tensors, structure)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(program: Program, tensors: Tensors, structure: Structure) -> tuple[Array, ...]:
    """The kernels over padded tensors, differentiable: (output, lse), or (u, m, l) for statistics, rows [B, N, T]."""

    def kernel(query: Array, key: Array, value: Array, *rest: Array) -> tuple[Array, ...]:
        given = dict(zip(names, rest, strict=True))
        return program.kernels.forward(
            query,
            key,
            value,
            given.get("bounds"),
            _segments(given),
            given.get("sinks"),
            mask=program.mask,
            scale=program.scale,
            soft_cap=program.soft_cap,
            statistics=program.statistics,
            config=program.forward,
        )

    names, arrays, axes = _present(structure, tensors.sinks, tensors.query.shape[0])
    results = ("B T N V", "B N T", "B N T") if program.statistics else ("B T N V", "B N T")
    call = lift(kernel, ("B T N H", "B S K H", "B S K V", *axes), results)
    return call(*tensors[:3], *arrays)


def _attend_forward(program: Program, tensors: Tensors, structure: Structure) -> tuple[Any, Any]:
    results = attend(program, tensors, structure)
    return results, (tensors, structure, results[:2])


def _attend_backward(program: Program, saved: Any, cotangents: tuple[Array, ...]) -> tuple[Tensors, None]:
    """Gradients by eq. 33.6 to 33.8: for (u, m, l), weights e^(s - m) and no row mean."""
    tensors, structure, (output, lse) = saved
    dq = None
    if program.statistics:
        output_gradient, _, g_l = cotangents
        delta = -g_l[:, :, : output.shape[1]]
    else:
        output_gradient, g_lse = cotangents
        if not program.mask.shows_every_query_a_key():  # a copy of the gradient
            empty = jnp.swapaxes(lse[:, :, : output.shape[1]] == -jnp.inf, 1, 2)
            output_gradient = jnp.where(empty[..., None], 0, output_gradient)
        sums, dq = _delta(program, output, output_gradient)
        delta = sums - jnp.where(lse == -jnp.inf, 0, g_lse)[:, :, : output.shape[1]]

    def kernel(query: Array, key: Array, value: Array, *rest: Array) -> tuple[Array, ...]:
        output_gradient, lse, delta, *others = rest
        given = dict(zip(names, others, strict=True))
        return program.kernels.backward(
            query,
            key,
            value,
            output_gradient,
            lse,
            delta,
            given.get("bounds"),
            _segments(given),
            **{name: given[name] for name in ("dq",) if name in given},
            mask=program.mask,
            scale=program.scale,
            soft_cap=program.soft_cap,
            deterministic=program.deterministic,
            config=program.backward,
        )

    names, arrays, axes = _present(structure, None, tensors.query.shape[0])
    if dq is not None:
        names, arrays, axes = (*names, "dq"), [*arrays, dq], [*axes, DQ_AXES]
    H, Hv = program.backward_heads
    query, key, value = (_pad(x, x.shape[1], size) for x, size in zip(tensors[:3], (H, H, Hv), strict=True))
    output_gradient = _pad(output_gradient.astype(value.dtype), output_gradient.shape[1], Hv)
    operands = ("B T N H", "B S K H", "B S K V", "B T N V", "B N T", "B N T", *axes)
    call = lift(kernel, operands, ("B T N H", "B S K H", "B S K V"))
    gradients = call(query, key, value, output_gradient, lse, delta, *arrays)
    sinks = None
    if tensors.sinks is not None:
        weights = jnp.exp(tensors.sinks[None, :, None] - lse[:, :, : output.shape[1]])
        sinks = -jnp.sum(weights * delta, axis=(0, 2))
    query, key, value = (x[..., : y.shape[3]] for x, y in zip(gradients, tensors[:3], strict=True))
    return Tensors(query, key, value, sinks), None


def _delta(program: Program, output: Array, output_gradient: Array) -> tuple[Array, Array | None]:
    """Sums over Hv of output times its gradient, float32 [B, N, T], and `dq` of the backward or None."""
    kernel = program.kernels.delta
    if kernel is None:
        products = output_gradient.astype(jnp.float32) * output.astype(jnp.float32)
        return jnp.swapaxes(jnp.sum(products, axis=-1), 1, 2), None

    def sized(output: Array, output_gradient: Array) -> tuple[Array, ...]:
        return kernel(output, output_gradient, head_size=program.backward_heads[0])

    sums, dq = lift(sized, ("B T N V", "B T N V"), ("B N T", DQ_AXES))(output, output_gradient)
    return sums[:, :, : output.shape[1]], dq


attend.defvjp(_attend_forward, _attend_backward)


def _present(structure: Structure, sinks: Array | None, batch: int) -> tuple[tuple[str, ...], list[Array], list[str]]:
    """Names, arrays and axes of the optional operands that a call has; each leads with the batch."""
    given = structure._asdict() | {"sinks": None if sinks is None else jnp.broadcast_to(sinks, (batch, *sinks.shape))}
    letters = {"bounds": "B C", "q_ids": "B T", "kv_ids": "B S", "sinks": "B N"}
    present = {name: array for name, array in given.items() if array is not None}
    return tuple(present), list(present.values()), [letters[name] for name in present]


def _segments(given: Mapping[str, Array]) -> SegmentIds | None:
    return SegmentIds(given["q_ids"], given["kv_ids"]) if "q_ids" in given else None


def _pad(x: Array, length: int, head: int) -> Array:
    """[B, length, heads, size] with zeros up to a length and a head size."""
    widths = [(0, 0), (0, length - x.shape[1]), (0, 0), (0, head - x.shape[3])]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x
