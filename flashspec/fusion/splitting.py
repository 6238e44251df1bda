"""A matmul kernel as a function that `jit`, `vmap` and operands split over devices reach together.

A raw kernel takes row-major matrices of one device. Rows that `jax.vmap` adds are rows like all others. Devices may
split rows and outputs; a split contraction is summed before the tail, which no kernel that holds the tail can do.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flashspec.fusion.request import EpilogueOperands
from flashspec.selection import axis_names
from flashspec.vmap_rules import one_by_one

AXES: Mapping[str, str] = {
    "x": "rows inputs",
    "w": "inputs outputs",
    "bias": "outputs",
    "gate": "inputs outputs",
    "gate_bias": "outputs",
    "residual": "rows outputs",
}
PAIRED = "inputs pair outputs"  # w with the gate in it
RESULT = "rows outputs"


def lift(
    kernel: Callable[[EpilogueOperands], Array], summed: Callable[..., Array]
) -> Callable[[EpilogueOperands], Array]:
    """The kernel with rules for `vmap` and for operands that are split over devices.

    Args:
      kernel: takes matrices of one device.
      summed: (operands, total) -> result, with `total` applied to each product before its tail.

    Returns:
      A function of the same operands.
    """

    def flat(operands: EpilogueOperands) -> Array:
        names = tuple(name for name in AXES if getattr(operands, name) is not None)
        axes = tuple(PAIRED if name == "w" and operands.w.ndim == 3 else AXES[name] for name in names)
        return _call(kernel, summed, names, axes)(*(getattr(operands, name) for name in names))

    return flat


def _call(
    kernel: Callable[..., Array], summed: Callable[..., Array], names: Sequence[str], axes: Sequence[str]
) -> Callable[..., Array]:
    """The lifted kernel over arrays of these names, with these axes."""
    split = _partitioned(kernel, summed, names, axes)

    @custom_vmap
    def call(*arrays: Array) -> Array:
        return split(*arrays)

    @call.def_vmap
    def _fold(size: int, batched: Sequence[bool], *arrays: Array) -> tuple[Array, bool]:
        rows = [sides.startswith("rows") for sides in axes]
        if any(is_batched and not has_rows for is_batched, has_rows in zip(batched, rows, strict=True)):
            return one_by_one(call, batched, arrays), True  # each has weights of its own

        def fold(x: Array, is_batched: bool) -> Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, x.shape[-1])

        triples = zip(arrays, batched, rows, strict=True)
        folded = call(*(fold(x, is_batched) if has_rows else x for x, is_batched, has_rows in triples))
        return folded.reshape(size, -1, folded.shape[-1]), True

    return call


def _operands(names: Sequence[str], arrays: Sequence[Array]) -> EpilogueOperands:
    absent = {field.name: None for field in dataclasses.fields(EpilogueOperands)}
    return EpilogueOperands(**absent | dict(zip(names, arrays, strict=True)))  # type: ignore[arg-type]


def _partitioned(
    kernel: Callable[..., Array], summed: Callable[..., Array], names: Sequence[str], axes: Sequence[str]
) -> Callable[..., Array]:
    def whole(*arrays: Array) -> Array:
        return kernel(_operands(names, arrays))

    split = custom_partitioning(jax.jit(whole))

    def partition(mesh: Mesh, arguments: Sequence[Any], result: Any) -> Any:
        del result
        (rows, inputs), (w_inputs, *_, outputs) = _spec(arguments[0]), _spec(arguments[1])
        taken, over = set(axis_names(rows)), {"rows": rows}
        # Parts of w stay where they are: x, which costs less, is brought to them.
        for side, axis in (("inputs", inputs or w_inputs), ("outputs", outputs)):
            over[side] = tuple(name for name in axis_names(axis) if name not in taken) or None
            taken |= set(axis_names(over[side]))

        def sharding(sides: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(over.get(side) for side in sides.split())))

        def sum_first(*arrays: Array) -> Array:
            return summed(_operands(names, arrays), functools.partial(lax.psum, axis_name=over["inputs"]))

        local = sum_first if over["inputs"] else whole
        return mesh, local, sharding(RESULT), tuple(map(sharding, axes))

    split.def_partition(partition=partition, sharding_rule=f"{', '.join(axes)} -> {RESULT}")
    return split


def _spec(argument: Any) -> tuple[Any, ...]:
    return (*argument.sharding.spec, *[None] * len(argument.shape))[: len(argument.shape)]
