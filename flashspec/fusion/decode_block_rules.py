"""Gradients and mapped axes of a kernel of the fused decoder step, by its twin."""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap


def with_rules(compute: Callable[[Any], Any], twin: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The call with the twin's gradients; and the twin itself where an axis is mapped, as programs must be counted."""
    mapped = custom_vmap(compute)

    @mapped.def_vmap
    def _map(size: int, batched: Any, arrays: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(arrays)
        axes = [0 if is_batched else None for is_batched in jax.tree.leaves(batched)]
        result = jax.vmap(lambda *leaves: twin(jax.tree.unflatten(tree, leaves)), axes, axis_size=size)(*leaves)
        return result, jax.tree.map(lambda _: True, result)

    @jax.custom_vjp
    def call(arrays: Any) -> Any:
        return mapped(arrays)

    def backward(arrays: Any, gradient: Any) -> Any:
        return jax.vjp(twin, arrays)[1](gradient)

    call.defvjp(lambda arrays: (call(arrays), arrays), backward)
    return call
