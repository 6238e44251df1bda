"""The facts of one matmul with its tail: what is static about it, and its operands checked and in one form."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashspec import checks
from flashspec.checks import fail
from flashspec.selection import Placement, Target, split_axes

type Activation = str | Callable[[jax.Array], jax.Array] | None

DTYPES = (jnp.bfloat16, np.float16, np.float32, np.float64)
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}
# jax's own functions, and its own name for the first, mean the same as ours.
_KNOWN: Mapping[Any, str] = {
    "gelu": "gelu_tanh",
    jax.nn.gelu: "gelu_tanh",
    jax.nn.silu: "silu",
    jax.nn.relu: "relu",
    jax.nn.sigmoid: "sigmoid",
    jnp.tanh: "tanh",
}


@dataclasses.dataclass(frozen=True)
class EpilogueRequest:
    """What is known of a call without looking at a value: hashable, and all that `supports` may read.

    Args:
      rows: product of the leading axes of x.
      inputs: C, the contracted axis.
      outputs: F.
      dtype: of x, w, gate and result.
      activation: a name out of `ACTIVATIONS`, a function of the caller's own, or None.
      options: names of the optional operands in use: "bias", "gate", "gate_bias", "residual".
      platform: "cpu", "cuda", "rocm" or "tpu".
      compute_capability: of a CUDA GPU, such as "9.0"; None elsewhere and where it is not known.
      device_kind: such as "NVIDIA H200", whose facts are used; None where it is not known.
      partitioned: operand axes that are split over devices, such as "x axis 1".
      placements: of x and w on a mesh of several devices; None for one device.
      wide_options: whether a bias or the residual is of 64 bits.
      paired: whether w has the gate in it.
    """

    rows: int
    inputs: int
    outputs: int
    dtype: np.dtype
    activation: Activation = None
    options: frozenset[str] = frozenset()
    platform: str = "cpu"
    compute_capability: str | None = None
    device_kind: str | None = None
    partitioned: tuple[str, ...] = ()
    placements: tuple[Placement | None, Placement | None] = (None, None)
    wide_options: bool = False
    paired: bool = False

    @property
    def work_dtype(self) -> np.dtype:
        """dtype of sums, activation and tail: float32, or float64 for float64."""
        return np.promote_types(self.dtype, np.float32)

    @property
    def products(self) -> int:
        """Matrix products: two with a gate."""
        return 2 if "gate" in self.options else 1

    def on(self, target: Target) -> "EpilogueRequest":
        """The same call on another device."""
        return dataclasses.replace(
            self,
            platform=target.platform,
            compute_capability=target.compute_capability,
            device_kind=target.kind or None,
        )

    def activate(self, z: jax.Array) -> jax.Array:
        """phi(z)."""
        if self.activation is None:
            return z
        return ACTIVATIONS[self.activation](z) if isinstance(self.activation, str) else self.activation(z)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EpilogueOperands:
    """The arrays of a call; what is not used is None."""

    x: jax.Array  # [..., C]
    w: jax.Array  # [C, F], or the gate and it as [C, 2, F]
    bias: jax.Array | None  # [F], in its own floating dtype
    gate: jax.Array | None  # [C, F]
    gate_bias: jax.Array | None  # [F]
    residual: jax.Array | None  # [..., F]

    def apart(self) -> "EpilogueOperands":
        """The same with gate and w as two arrays."""
        return self if self.w.ndim == 2 else dataclasses.replace(self, w=self.w[:, 1], gate=self.w[:, 0])


def make_request(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    activation: Activation = None,
    gate: Any = None,
    residual: Any = None,
    platform: str = "cpu",
    compute_capability: str | None = None,
    device_kind: str | None = None,
    partitioned: tuple[str, ...] = (),
    placements: tuple[Placement | None, Placement | None] = (None, None),
) -> tuple[EpilogueRequest, EpilogueOperands]:
    """Check the arguments of `matmul_epilogue` and bring them into the form that backends take.

    Raises:
      ValueError: an argument is wrong; the message names it.
    """
    gate, gate_bias = split_gate(gate)
    given = {"x": x, "w": w, "bias": bias, "gate": gate, "gate_bias": gate_bias, "residual": residual}
    arrays: dict[str, Any] = {n: None if value is None else checks.array(n, value) for n, value in given.items()}
    _check_dtypes(given, arrays)
    if arrays["x"].ndim < 1:
        raise fail("x", "rank 1 or more, shape [..., C]", "shape []")
    leading = arrays["x"].shape[:-1]
    paired = arrays["w"].ndim == 3
    if paired and arrays["gate"] is not None:
        raise fail("gate", "None where w has the gate, [C, 2, F]", f"shape {list(arrays['gate'].shape)}")
    sizes = checks.shape("w", arrays["w"], "C 2 F" if paired else "C F", {"C": arrays["x"].shape[-1]})
    for name, dims in (("gate", "C F"), ("bias", "F"), ("gate_bias", "F")):
        if arrays[name] is not None:
            checks.shape(name, arrays[name], dims, sizes)
    if residual is not None and arrays["residual"].shape != (*leading, sizes["F"]):
        raise fail("residual", f"shape {[*leading, sizes['F']]}, the result's", f"shape {list(np.shape(residual))}")
    request = EpilogueRequest(
        rows=math.prod(leading),
        inputs=sizes["C"],
        outputs=sizes["F"],
        dtype=arrays["x"].dtype,
        activation=activation_name(activation),
        options=frozenset(
            {name for name, array in arrays.items() if array is not None} | ({"gate"} if paired else set())
        )
        - {"x", "w"},
        platform=platform,
        compute_capability=compute_capability,
        device_kind=device_kind,
        partitioned=partitioned,
        placements=placements,
        wide_options=any(array is not None and array.dtype.itemsize > 4 for array in arrays.values()),
        paired=paired,
    )
    return request, EpilogueOperands(**arrays)


def split_gate(gate: Any) -> tuple[Any, Any]:
    """A gate's weights and its bias; a pair has both."""
    if not isinstance(gate, tuple | list):
        return gate, None
    if len(gate) != 2 or np.ndim(gate[0]) != 2:
        raise fail("gate", "weights [C, F], or a pair of weights [C, F] and bias [F]", f"{len(gate)} items")
    return gate[0], gate[1]


def activation_name(activation: Activation) -> Activation:
    """The activation by our own name where it has one."""
    if activation is None or (isinstance(activation, str) and activation in ACTIVATIONS):
        return activation
    if isinstance(activation, str) or callable(activation):
        known = _KNOWN.get(activation)
        if known is not None or callable(activation):
            return known or activation
    raise fail("activation", f"one of {', '.join(ACTIVATIONS)}, a function, or None", repr(activation))


def _check_dtypes(given: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """x, w and gate share one dtype; bias and residual have any floating one."""
    for name, array in arrays.items():
        if array is None:
            continue
        dtype = np.dtype(getattr(given[name], "dtype", array.dtype))
        if dtype not in DTYPES:
            raise fail(name, "dtype " + ", ".join(np.dtype(known).name for known in DTYPES), dtype)
        if dtype == np.float64 and array.dtype != dtype:
            raise fail(name, "float32 or narrower unless jax_enable_x64 is set", dtype)
        if name in ("w", "gate") and dtype != arrays["x"].dtype:
            raise fail(name, f"the dtype of x, {arrays['x'].dtype}", dtype)


def partitioned_axes(x: Any, w: Any, gate: Any = None, residual: Any = None, **_: Any) -> tuple[str, ...]:
    """Axes of the matrices that are split over devices, as far as they show it: "w axis 0"."""
    operands = {"x": x, "w": w, "gate": split_gate(gate)[0], "residual": residual}
    return tuple(f"{name} axis {axis}" for name, operand in operands.items() for axis in split_axes(operand))
