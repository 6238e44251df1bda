"""Entry points of fusion: a matmul with its tail, and its plan."""

from typing import Any

import jax
from jax.typing import ArrayLike

from flashspec.fusion import backends
from flashspec.fusion.plan import EpiloguePlan, make_plan
from flashspec.fusion.request import Activation, EpilogueOperands, EpilogueRequest, make_request, partitioned_axes
from flashspec.selection import Implementation, Target, placement, resolve_device

type Shaped = ArrayLike | jax.ShapeDtypeStruct


def matmul_epilogue(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    gate: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    residual: ArrayLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """A matrix product with its tail, as one operation.

        y = phi(x W + b),  or with a gate  y = phi(x W_g + b_g) * (x W + b);  plus the residual       (section 33.4)

    Sums and tail are computed in float32 (float64 for float64) and rounded once, at the end; "hopper" has GELU and SiLU
    of z to within 2^-12 |z|, which is no more than rounding z to float16 would cost. Differentiable. The result is that
    of whole arrays, however they are split over devices: a split contraction is summed before bias, activation and
    residual, which are added once. Inside of `jax.shard_map` the arrays are one device's: sum the product yourself.

    Args:
      x: [..., C], bfloat16, float16, float32 or (in 64-bit mode) float64.
      w: [C, F], in the dtype of x; or [C, 2, F], of which the first is the gate's and the second those that it gates,
        as decoders store them: no kernel of "hopper" copies them apart.
      bias: [F], any of these dtypes.
      activation: phi: "gelu_tanh", "gelu_exact", "silu", "relu", "sigmoid", "tanh", jax's own function of that kind
        ("gelu" is its tanh form, as in jax), any other elementwise function, or None for none. Other functions run
        on "xla" and "reference".
      gate: W_g [C, F], or a pair of it and b_g [F]; phi then acts on the gate alone.
      residual: [..., F], any of these dtypes; added after all else.
      implementation: "hopper", "tpu", "xla" or "reference"; a sequence of them, of which the first that supports the
        call runs; None for the best one for the platform that the call is lowered for: by measurement, so a kernel
        that can run the call may be passed over.

    Returns:
      y [..., F] in the dtype of x.

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call; the message has every reason.

    Source: chapter 33.4.
    """
    arrays = {"x": x, "w": w, "bias": bias, "gate": gate, "residual": residual}
    request, operands = _prepare(arrays, activation)
    return backends.run(request, operands, implementation)


def plan_matmul_epilogue(
    x: Shaped,
    w: Shaped,
    bias: Shaped | None = None,
    *,
    activation: Activation = None,
    gate: Shaped | tuple[Shaped, Shaped] | None = None,
    residual: Shaped | None = None,
    implementation: Implementation = None,
    device: jax.Device | str | None = None,
) -> EpiloguePlan:
    """What `matmul_epilogue` would run for these arguments, and why not something else; computes nothing.

    Args:
      x: [..., C], an array or a `jax.ShapeDtypeStruct`; so are all other arrays.
      w: [C, F].
      bias: [F].
      gate: [C, F], or a pair of it and [F].
      residual: [..., F].
      device: a device or the kind of one, such as "NVIDIA H200"; where x lies by default.
      The others are those of `matmul_epilogue`.

    Returns:
      The plan; `print` shows it as lines.

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call.
    """
    arrays = {"x": x, "w": w, "bias": bias, "gate": gate, "residual": residual}
    target = resolve_device(device, x)
    facts = _facts(arrays, target)
    requests: list[EpilogueRequest] = []

    def prepare(arrays: dict[str, Any]) -> EpilogueOperands:
        request, operands = _prepare(arrays, activation, facts)
        requests.append(request)
        return operands

    jax.eval_shape(prepare, arrays)
    return make_plan(requests[0], implementation, target.kind)


def _prepare(
    arrays: dict[str, Any], activation: Activation, facts: dict[str, Any] | None = None
) -> tuple[EpilogueRequest, EpilogueOperands]:
    """The checked call, with where its operands lie."""
    if facts is None:
        facts = _facts(arrays, resolve_device(None, arrays["x"]))
    return make_request(**arrays, activation=activation, **facts)


def _facts(arrays: dict[str, Any], target: Target) -> dict[str, Any]:
    """Where the operands of a call lie."""
    return {
        "platform": target.platform,
        "compute_capability": target.compute_capability,
        "device_kind": target.kind,
        "partitioned": partitioned_axes(**arrays),
        "placements": (placement(arrays["x"]), placement(arrays["w"])),
    }
