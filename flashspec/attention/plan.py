"""What will run for one attention call, and at least how long that takes: `AttentionPlan`.

Work is counted over the pairs that the static structure allows; lengths, positions, segments and explicit masks are
known only at run time and may leave less of it. Bytes count each operand read and each result written once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flashspec import costs
from flashspec.attention.backends import BACKENDS, Backend, select
from flashspec.attention.request import AttentionOperands, AttentionRequest
from flashspec.attention.settings import AttentionImplementation
from flashspec.checks import is_concrete
from flashspec.devices import DeviceFacts, find_device_facts


@dataclasses.dataclass(frozen=True)
class Pass:
    """One direction of a call.

    Args:
      implementation: the backend's name.
      config: its launch settings.
      source: where they come from: "given" by the caller, "tuned" on such a device, or "heuristic"; "" where there is
        no choice.
      flops: multiplications and additions of the matrix products.
      bytes: operands and results, each moved once.
      lower_bound_seconds: the roofline max(F / R, Q / b) of section 33.1 for these counts, which no program can beat
        and few reach; None where the device's rates are unknown.
    """

    implementation: str
    config: Mapping[str, int]
    flops: int
    bytes: int
    lower_bound_seconds: float | None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The selection for one call, and what it costs at least; `print` shows it as a table.

    Args:
      request: the static facts of the call.
      device: kind of the device planned for.
      forward, backward: the two passes; a backend whose kernels have no backward for a call names the one that has.
      rejected: every other backend that cannot run the request, with all its reasons.
      copies: bytes copied for each array that the implementation does not read or return as it lies: for its layout, or
        padded or blanked.
    """

    request: AttentionRequest
    device: str
    forward: Pass
    backward: Pass
    rejected: Mapping[str, tuple[str, ...]]
    copies: Mapping[str, int]

    def __str__(self) -> str:
        r = self.request
        head = f"attention on {self.device}: B={r.B} T={r.T} S={r.S} N={r.N} K={r.K} H={r.H} Hv={r.Hv} {r.dtype}"
        rows: list[tuple[str, ...]] = [("pass", "implementation", "config", "FLOPs", "bytes", "time (lower bound)")]
        rows += [_row("forward", self.forward), _row("backward", self.backward)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [head, *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)]
        lines += [f"copied: {name}, {size:,} bytes" for name, size in self.copies.items()]
        lines += [f"rejected {name}: {reason}" for name, reasons in self.rejected.items() for reason in reasons]
        return "\n".join(line.rstrip() for line in lines)


def make_plan(
    request: AttentionRequest,
    operands: AttentionOperands,
    given: Mapping[str, Any],
    implementation: AttentionImplementation,
    device: str,
) -> AttentionPlan:
    """The plan of a checked call.

    Args:
      request: its static facts, with the platform of `device`.
      operands: its operands, or their shapes.
      given: query, key and value as the caller passed them, by name, for their layouts.
      implementation: as in `dot_product_attention`.
      device: kind of the device.

    Raises:
      NotImplementedError: no implementation supports the call.
    """
    backend = select(request, implementation)
    gradient = BACKENDS[backend.backward(request)] if backend.backward else backend
    refusals = {name: other.supports(request) for name, other in BACKENDS.items()}
    facts = find_device_facts(device)
    return AttentionPlan(
        request=request,
        device=device,
        forward=_pass(
            "forward", backend, request, facts, 2 * (request.H + request.Hv), _forward_bytes(request, operands)
        ),
        # Products: the scores again, G_V, G_P, G_Q and G_K (eq. 33.6 to 33.8).
        backward=_pass(
            *("backward", gradient, request, facts),
            *(2 * (3 * request.H + 2 * request.Hv), _backward_bytes(request, operands)),
        ),
        rejected={name: reasons for name, reasons in refusals.items() if reasons},
        copies={**(copied_operands(given) if backend.row_major else {}), **backend.copies(request)},
    )


def visible_pairs(request: AttentionRequest) -> int:
    """How many of the T S pairs the static structure allows: limits count only where positions are 0, 1, ..."""
    if request.options & {"q_positions", "kv_positions"}:
        return request.T * request.S
    left, right = request.window
    right = 0 if request.is_causal else right
    query = np.arange(request.T, dtype=np.int64)
    last = np.full_like(query, request.S - 1) if right is None else np.minimum(query + right, request.S - 1)
    first = np.zeros_like(query) if left is None else np.maximum(query - left, 0)
    return int(np.sum(np.maximum(last - first + 1, 0)))


def _pass(
    direction: str,
    backend: Backend,
    request: AttentionRequest,
    facts: DeviceFacts | None,
    flops_a_pair: int,
    moved: int,
) -> Pass:
    flops = request.B * request.N * visible_pairs(request) * flops_a_pair
    bound, source = roofline_s(request, facts, flops, moved), backend.sources(request).get(direction, "")
    return Pass(backend.name, backend.config(request), flops, moved, bound, source)


def roofline_s(request: AttentionRequest, facts: DeviceFacts | None, flops: int, moved: int) -> float | None:
    """max(F / R, Q / b) of section 33.1 by the rates that the device's data sheet gives; None where it gives none."""
    if facts is None:
        return None
    return costs.sheet_bound_s(flops, moved, facts, request.dtype.itemsize)


def _forward_bytes(request: AttentionRequest, operands: AttentionOperands) -> int:
    lse = request.B * request.T * request.N * request.stats_dtype.itemsize if request.return_lse else 0
    return _bytes(operands) + _output_bytes(request) + lse


def _backward_bytes(request: AttentionRequest, operands: AttentionOperands) -> int:
    """The operands, the output, its gradient and one normaliser a row are read, a gradient for each is written."""
    lse = request.B * request.T * request.N * request.stats_dtype.itemsize
    gradients = (operands.query, operands.key, operands.value, operands.bias, operands.sinks)
    return _bytes(operands) + 2 * _output_bytes(request) + lse + _bytes(gradients)


def _output_bytes(request: AttentionRequest) -> int:
    return request.B * request.T * request.N * request.Hv * request.dtype.itemsize


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def copied_operands(given: Mapping[str, Any]) -> dict[str, int]:
    """Operands that lie in memory in another order than their axes, where that can be seen: on concrete jax arrays."""
    concrete: dict[str, Any] = {name: x for name, x in given.items() if isinstance(x, jax.Array) and is_concrete(x)}
    orders = {name: x.format.layout.major_to_minor for name, x in concrete.items()}
    return {name: concrete[name].nbytes for name, order in orders.items() if order != tuple(range(len(order)))}


def _row(name: str, one: Pass) -> tuple[str, ...]:
    config = " ".join(f"{key}={value}" for key, value in one.config.items()) or "-"
    config += f" ({one.source})" if one.source else ""
    seconds = one.lower_bound_seconds
    time = "unknown device" if seconds is None else f"{seconds * 1e6:.3g} us"
    return name, one.implementation, config, f"{one.flops:.4g}", f"{one.bytes:,}", time
