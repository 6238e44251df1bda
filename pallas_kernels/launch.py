"""Arithmetic of launch grids, in Python integers, and what `jax.shard_map` asks of operands."""

import jax
from jax import Array, lax


def cdiv(a: int, b: int) -> int:
    """The least integer of at least a / b, for b > 0: how many blocks of b cover a."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The least multiple of `multiple` (> 0) of at least a."""
    return cdiv(a, multiple) * multiple


def varying_alike[Tree](tree: Tree) -> Tree:
    """Mark every array as varying over the mesh axes, inside `jax.shard_map`, over which any of them varies.

    A kernel, or a scan for its carry, wants one type throughout; the transpose of the mark is the sum over those axes.
    """
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))

    def mark(x: Array) -> Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)
