"""A kernel as a function that `jit`, `vmap` and operands split over devices reach together.

A raw kernel takes row-major arrays of one device. `lift` folds an axis that `jax.vmap` adds into the batch, or goes
along it one by one where an operand has no batch, and tells XLA how the kernel splits: over batch and heads, nothing
else.
Differentiation wraps the result (`jax.custom_vjp` outside, this inside).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flashspec.attention.request import AttentionRequest
from flashspec.selection import Placement
from flashspec.vmap_rules import one_by_one

type Splitter = Callable[[Callable[..., Any], Sequence[str], Sequence[str]], Callable[..., Any]]


def lift(
    kernel: Callable[..., tuple[Array, ...]],
    operands: Sequence[str],
    results: Sequence[str],
    splitter: Splitter | None = None,
) -> Callable[..., tuple[Array, ...]]:
    """The kernel with rules for `vmap` and for operands that are split over devices.

    Args:
      kernel: takes one array for each of `operands`, returns one for each of `results`.
      operands: the axes of each operand as letters with spaces: B batch, first where there is one; N query heads; K
        key/value heads; any other letter names an axis that stays whole. The first operand has B and N.
      results: the same for the results.
      splitter: makes of the kernel a function of split arrays; by default XLA asks for the rules when it knows how.

    Returns:
      A function of the same arrays.
    """
    split = (splitter or _partitioned)(kernel, operands, results)

    @custom_vmap
    def call(*arrays: Array) -> tuple[Array, ...]:
        return split(*arrays)

    @call.def_vmap
    def _fold(size: int, batched: Sequence[bool], *arrays: Array) -> tuple[Any, Any]:
        led = [axes.split()[0] == "B" for axes in operands]
        if any(is_batched and not leads for is_batched, leads in zip(batched, led, strict=True)):
            results_of_all = one_by_one(call, batched, arrays)  # such as pools of pages: no batch axis to fold into
            return results_of_all, type(results_of_all)([True] * len(results))

        def fold(x: Array, is_batched: bool) -> Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        triples = zip(arrays, batched, led, strict=True)
        folded = call(*(fold(x, is_batched) if leads else x for x, is_batched, leads in triples))
        return tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in folded), (True,) * len(results)

    return call


def uneven_groups(request: AttentionRequest) -> tuple[bool, str]:
    """Whether devices cannot split the heads of a call, and why: each takes whole groups, or all share the one head."""
    text = f"splits heads by groups: {request.K} key/value heads do not divide over {request.head_shards} devices"
    return request.K > 1 and request.K % request.head_shards != 0, text


def placed(placement: Placement | None) -> Splitter:
    """A splitter for compilers that ask for no rules (libtpu): by `jax.shard_map`, where the query is known to lie.

    Args:
      placement: of the query [B, T, N, H]; None for one device.
    """

    def splitter(kernel: Callable[..., Any], operands: Sequence[str], results: Sequence[str]) -> Callable[..., Any]:
        if placement is None or placement.spec is None:
            return kernel
        batch, _, heads, _ = placement.spec

        def call(*arrays: Array) -> Any:
            by_letter = _mesh_axes(operands, [x.shape for x in arrays], batch, heads)

            def specs(names: Sequence[str]) -> tuple[PartitionSpec, ...]:
                return tuple(PartitionSpec(*(by_letter.get(letter) for letter in axes.split())) for axes in names)

            here = jax.sharding.get_abstract_mesh()
            split = jax.shard_map(
                _local(kernel, results, by_letter),
                mesh=placement.mesh if here.empty else None,
                in_specs=specs(operands),
                out_specs=specs(results),
                check_vma=False,  # nothing differentiates through it
            )
            return split(*arrays)

        return call

    return splitter


def _mesh_axes(operands: Sequence[str], shapes: Sequence[Sequence[int]], batch: Any, heads: Any) -> dict[str, Any]:
    """The mesh axes of each letter: one key/value head is everybody's."""
    return {"B": batch, "N": heads, "K": heads if _sizes(operands, shapes).get("K", 1) > 1 else None}


def _local(kernel: Callable[..., Any], results: Sequence[str], by_letter: dict[str, Any]) -> Callable[..., Any]:
    """The kernel on the arrays of one device."""

    def local(*arrays: Array) -> Any:
        parts = kernel(*arrays)
        heads = by_letter["N"]
        if heads is None or by_letter["K"] is not None:
            return parts
        # Every device has the one key/value head and a part of its query heads: its gradient is the sum of theirs.
        pairs = zip(parts, results, strict=True)
        return tuple(lax.psum(x, heads) if "K" in axes.split() else x for x, axes in pairs)

    return local


def _partitioned(kernel: Callable[..., Any], operands: Sequence[str], results: Sequence[str]) -> Callable[..., Any]:
    # Inside `jit` a kernel may hold constant arrays, which XLA's partitioner refuses to carry.
    split = custom_partitioning(jax.jit(kernel))

    def partition(mesh: Mesh, arguments: Sequence[Any], outputs: Sequence[Any]) -> Any:
        batch, heads = _split_axes(operands[0], arguments[0])
        by_letter = _mesh_axes(operands, [x.shape for x in arguments], batch, heads)

        def shardings(names: Sequence[str]) -> tuple[NamedSharding, ...]:
            specs = (PartitionSpec(*(by_letter.get(letter) for letter in axes.split())) for axes in names)
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, _local(kernel, results, by_letter), shardings(results), shardings(operands)

    split.def_partition(
        partition=partition,
        sharding_rule=lambda mesh, arguments, _: _rule(operands, results, [x.shape for x in arguments]),
    )
    return split


def _rule(
    operands: Sequence[str], results: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[str, dict[str, Any]]:
    """How the axes correspond, in XLA's notation: query heads are (key/value head, head of its group)."""
    sizes = _sizes(operands, shapes)
    single, groups = sizes.get("K") == 1, sizes["N"] // sizes.get("K", sizes["N"])
    both = groups > 1 and not single
    names = {"B": "b", "N": "(k g)" if both else "k"} | ({} if single else {"K": "k"})
    whole = itertools.count()

    def side(arrays: Sequence[str]) -> str:
        return ", ".join(
            " ".join(names.get(letter) or f"whole{next(whole)}" for letter in axes.split()) for axes in arrays
        )

    rule = f"{side(operands)} -> {side(results)}"
    factors: dict[str, Any] = {"need_replication_factors": tuple(f"whole{i}" for i in range(next(whole)))}
    if both:
        factors["g"] = groups
    return rule, factors


def _sizes(operands: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The size of each letter's axis; letters of axes that stay whole may stand for several sizes."""
    pairs = zip(operands, shapes, strict=True)
    return {letter: size for axes, shape in pairs for letter, size in zip(axes.split(), shape, strict=True)}


def _split_axes(axes: str, argument: Any) -> tuple[Any, Any]:
    """The mesh axes over which the batch and the heads of an operand are split."""
    spec = dict(zip(axes.split(), (*argument.sharding.spec, *[None] * len(argument.shape)), strict=False))
    return spec["B"], spec["N"]
