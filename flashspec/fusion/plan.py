"""What will run for one matmul with its tail, how much it moves, and at least how long that takes."""

import dataclasses
from collections.abc import Mapping

from flashspec import costs
from flashspec.devices import find_device_facts
from flashspec.fusion.backends import BACKENDS, Implementation, select
from flashspec.fusion.request import EpilogueRequest


@dataclasses.dataclass(frozen=True)
class EpiloguePlan:
    """The selection for one call; `print` shows it as lines.

    Args:
      request: the static facts of the call.
      device: kind of the device planned for.
      forward, backward: names of the implementations.
      config: launch settings of the forward.
      rejected: every other implementation that cannot run the request, with all its reasons.
      passed_over: those that can and would be slower, where none was asked for; with the reason.
      flops: of the products.
      bytes: operands and result, each moved once.
      unfused_bytes: the same when each step of the tail writes its result and the next reads it back.
      lower_bound_seconds: max(F / R, Q / b) by the rates that the data sheet gives; None where it gives none.
    """

    request: EpilogueRequest
    device: str
    forward: str
    backward: str
    config: Mapping[str, int]
    rejected: Mapping[str, tuple[str, ...]]
    passed_over: Mapping[str, str]
    flops: int
    bytes: int
    unfused_bytes: int
    lower_bound_seconds: float | None

    def __str__(self) -> str:
        r = self.request
        tail = ", ".join(sorted(r.options)) or "no option"
        time = "unknown" if self.lower_bound_seconds is None else f"{self.lower_bound_seconds * 1e6:.3g} us"
        config = " ".join(f"{key}={value}" for key, value in self.config.items())
        lines = [
            f"matmul on {self.device}: [{r.rows}, {r.inputs}] x [{r.inputs}, {r.outputs}] {r.dtype}, {tail}, "
            f"activation {r.activation}",
            f"forward {self.forward} {config}".rstrip() + f", backward {self.backward}",
            f"{self.flops:.4g} FLOPs, {self.bytes:,} bytes ({self.unfused_bytes:,} step by step), at least {time}",
        ]
        lines += [f"passed over {name}: {why}" for name, why in self.passed_over.items()]
        return "\n".join(lines + [f"rejected {name}: {why}" for name, whys in self.rejected.items() for why in whys])


def make_plan(request: EpilogueRequest, implementation: Implementation, device: str) -> EpiloguePlan:
    """The plan of a checked call.

    Raises:
      NotImplementedError: no implementation supports the call.
    """
    backend = select(request, implementation)
    refusals = {name: other.supports(request) for name, other in BACKENDS.items()}
    slower = {} if implementation is not None else {name: other.slower(request) for name, other in BACKENDS.items()}
    flops, moved = 2 * request.rows * request.inputs * request.outputs * request.products, moved_bytes(request)
    facts = find_device_facts(device)
    return EpiloguePlan(
        request=request,
        device=device,
        forward=backend.name,
        backward=backend.backward,
        config=backend.config(request),
        rejected={name: reasons for name, reasons in refusals.items() if reasons},
        passed_over={name: reason for name, reason in slower.items() if reason and not refusals[name]},
        flops=flops,
        bytes=moved,
        unfused_bytes=moved + intermediate_bytes(request),
        lower_bound_seconds=None if facts is None else costs.sheet_bound_s(flops, moved, facts, request.dtype.itemsize),
    )


def moved_bytes(request: EpilogueRequest) -> int:
    """Bytes of operands and result, each once, all in the request's dtype."""
    wide = request.rows * request.outputs
    vectors = request.outputs * len(request.options & {"bias", "gate_bias"})
    matrices = request.rows * request.inputs + request.products * request.inputs * request.outputs
    return request.dtype.itemsize * (matrices + vectors + wide * (2 if "residual" in request.options else 1))


def intermediate_bytes(request: EpilogueRequest) -> int:
    """Extra bytes when every step is a program of its own: in proportion to rows x outputs (section 33.4).

    Each product reads x and writes its result; each bias, the activation, the gate's multiplication and the residual
    read one intermediate (the gate two) and write one; the last of all these is the result, which counts anyhow.
    """
    gated = "gate" in request.options
    steps = len(request.options) + (request.activation is not None)
    intermediates = request.products + (steps + gated) + steps - 1
    return request.dtype.itemsize * request.rows * (request.outputs * intermediates + request.inputs * gated)
