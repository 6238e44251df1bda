"""A gate and what it gates, phi(x W_g) * (x W), as a decoder has them, computed by whoever is known to be fastest.

XLA's way is one product, rounded, that its next program activates: the caller's own, since a decoder has more to say
about its products. Our Hopper kernel takes its place where it was measured to be faster, and nowhere else. Of a call
that is differentiated all is XLA's: its backward needs the products, which the kernel does not keep.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashspec.checks import fail, one_of, shape
from flashspec.fusion import hopper
from flashspec.fusion.api import matmul_epilogue
from flashspec.fusion.backends import BACKENDS, execute
from flashspec.fusion.request import ACTIVATIONS, DTYPES, EpilogueOperands, EpilogueRequest, partitioned_axes
from flashspec.selection import Target, first_that_can, placement, resolve_device, run_where_lowered

UNFUSED, KERNEL = "unfused", "hopper"
IMPLEMENTATIONS = (UNFUSED, *BACKENDS)
type Function = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class GatedProductPlan:
    """Who computes a gate and what it gates; `print` shows it as lines.

    Args:
      request: the static facts of the call.
      device: kind of the device planned for.
      forward: "unfused", or an implementation of `matmul_epilogue`.
      backward: who computes a call that is differentiated: its forward and its gradients.
      config: launch settings of the forward.
      reasons: why no kernel of ours was chosen; empty where one was, or where somebody was asked for.
    """

    request: EpilogueRequest
    device: str
    forward: str
    backward: str
    config: Mapping[str, int]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        r = self.request
        config = " ".join(f"{key}={value}" for key, value in self.config.items())
        lines = [
            f"gated product on {self.device}: [{r.rows}, {r.inputs}] x [{r.inputs}, 2, {r.outputs}] {r.dtype}, "
            f"{r.activation}",
            f"{self.forward} {config}".rstrip() + f", where differentiated {self.backward}",
        ]
        return "\n".join(lines + [f"not {KERNEL}: {reason}" for reason in self.reasons])


def gated_product(
    x: Array, w: Array, *, activation: str, unfused: Function, implementation: str | None = None
) -> Array:
    """phi(x W_g) * (x W), with both weights in one array.

    Args:
      x: [..., C], bfloat16, float16, float32 or float64.
      w: [C, 2, F], of which the first is the gate's and the second those that it gates; another dtype than that of x
        is for `unfused` alone.
      activation: phi, a name out of `ACTIVATIONS`.
      unfused: (x, w) -> the result [..., F], in operations that XLA makes the best of.
      implementation: "unfused" for just that, or an implementation of `matmul_epilogue`, differentiated as that is.
        None for the one that was measured to be faster at such sizes on the platform that the call is lowered for:
        wherever the kernel was not, and for all of a call that is differentiated, it is `unfused`.

    Returns:
      [..., F] in the dtype of x, or of what `unfused` makes of two dtypes.

    Raises:
      ValueError: an unknown implementation or activation, or shapes or dtypes that do not fit.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    one_of("implementation", implementation, (None, *IMPLEMENTATIONS))
    _check(x, w, activation)
    if implementation == UNFUSED:
        return unfused(x, w)
    if implementation is not None:
        return matmul_epilogue(x, w, activation=activation, implementation=implementation)
    here = resolve_device(None, x)
    request = _request(x, w, activation, here)

    def compute(name: str, operands: tuple[Array, Array]) -> Array:
        if name == UNFUSED:
            return unfused(*operands)
        fused = functools.partial(_execute, request, name)
        return _differentiated_as(unfused, fused)(*operands)

    def select(target: Target) -> str:
        return UNFUSED if why_unfused(request.on(target)) else KERNEL

    return run_where_lowered((x, w), here, select, compute)


def plan_gated_product(
    x: Array | jax.ShapeDtypeStruct,
    w: Array | jax.ShapeDtypeStruct,
    *,
    activation: str,
    implementation: str | None = None,
    device: jax.Device | str | None = None,
) -> GatedProductPlan:
    """Who computes `gated_product` for these arguments, and why not the kernel; computes nothing.

    Args:
      x: [..., C], an array or a `jax.ShapeDtypeStruct`, with a sharding where devices split it; so is w.
      w: [C, 2, F].
      activation, implementation: as in `gated_product`.
      device: a device or the kind of one, such as "NVIDIA H200"; where x lies by default.

    Returns:
      The plan; `print` shows it as lines.

    Raises:
      ValueError: an unknown implementation, activation or device, or shapes or dtypes that do not fit.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    one_of("implementation", implementation, (None, *IMPLEMENTATIONS))
    _check(x, w, activation)
    target = resolve_device(device, x)
    request = _request(x, w, activation, target)
    reasons = why_unfused(request) if implementation is None else ()
    forward = implementation or (UNFUSED if reasons else KERNEL)
    if forward == UNFUSED:
        return GatedProductPlan(request, target.kind, UNFUSED, UNFUSED, {}, reasons)
    first_that_can((forward,), lambda name: BACKENDS[name].supports(request))
    backward = UNFUSED if implementation is None else BACKENDS[forward].backward
    return GatedProductPlan(request, target.kind, forward, backward, BACKENDS[forward].config(request), ())


def why_unfused(request: EpilogueRequest) -> tuple[str, ...]:
    """Why the kernel is not chosen for a call; empty where it is."""
    cannot = BACKENDS[KERNEL].supports(request)
    if request.placements != (None, None):
        cannot += ("devices hold parts of x or of the weights, which XLA multiplies where they lie",)
    if cannot:
        return cannot
    return tuple(reason for reason in (BACKENDS[KERNEL].slower(request), hopper.unmeasured(request)) if reason)


def _check(x: Any, w: Any, activation: str) -> None:
    """That whoever computes the call can: the caller's own function may not look."""
    one_of("activation", activation, tuple(ACTIVATIONS))
    for name, operand in (("x", x), ("w", w)):
        if operand.dtype not in DTYPES:
            raise fail(name, "dtype " + ", ".join(np.dtype(known).name for known in DTYPES), operand.dtype)
    if x.ndim < 1:
        raise fail("x", "rank 1 or more, shape [..., C]", "shape []")
    shape("w", w, "C 2 F", {"C": x.shape[-1]})


def _request(x: Any, w: Any, activation: str, target: Target) -> EpilogueRequest:
    """The static facts of a call."""
    request = EpilogueRequest(
        rows=math.prod(x.shape[:-1]),
        inputs=w.shape[0],
        outputs=w.shape[2],
        dtype=jnp.promote_types(x.dtype, w.dtype),
        activation=activation,
        options=frozenset({"gate"}),
        partitioned=partitioned_axes(x, w),
        placements=(placement(x), placement(w)),
        paired=True,
    )
    return request.on(target)


def _execute(request: EpilogueRequest, name: str, x: Array, w: Array) -> Array:
    return execute(request, name, EpilogueOperands(x, w, None, None, None, None))


def _differentiated_as(twin: Function, function: Function) -> Function:
    """`function`, in whose place its twin is computed where derivatives are asked for."""
    call = jax.custom_jvp(function)
    call.defjvp(lambda primals, tangents: jax.jvp(twin, primals, tangents))
    return call
