"""Which blocks of the score matrix a kernel visits, in which order: one packed word for each step of its grid.

Blocks in which no pair is visible are left out. Where the structure is known before tracing the list is a constant and
exactly as long as needed; where it is data, the list is computed on the device, and the steps that are left over repeat
the last block, so that they neither copy nor compute.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.launch import cdiv
from pallas_kernels.tpu.attention_config import HIGHEST, LOWEST, MAX_BLOCKS, AttentionCall, AttentionStructure

# A word holds, from its lowest bit on, the inner block, four flags, and the outer block.
FIRST, LAST, COMPUTE, PARTIAL = (MAX_BLOCKS << bit for bit in range(4))
OUTER_SHIFT = (PARTIAL << 1).bit_length() - 1


class Blocks(NamedTuple):
    """Which blocks may hold a visible pair, and which hold visible pairs only: bool [B|1, query blocks, key blocks]."""

    visible: Any
    full: Any


class Step(NamedTuple):
    """One step of the grid, unpacked: traced scalars."""

    outer: jax.Array
    inner: jax.Array
    first: jax.Array  # whether it is the outer block's first step
    last: jax.Array
    full: jax.Array  # whether to compute without a mask
    partial: jax.Array  # whether to compute with one


def unpack(word: jax.Array) -> Step:
    """The step that a word describes."""
    compute, partial = word & COMPUTE != 0, word & PARTIAL != 0
    return Step(
        outer=outer_block(word),
        inner=inner_block(word),
        first=word & FIRST != 0,
        last=word & LAST != 0,
        full=compute & ~partial,
        partial=compute & partial,
    )


def outer_block(word: jax.Array) -> jax.Array:
    """Index of the outer block of a step."""
    return word >> OUTER_SHIFT


def inner_block(word: jax.Array) -> jax.Array:
    """Index of the inner block of a step."""
    return word & (MAX_BLOCKS - 1)


def steps_by_query(
    call: AttentionCall, structure: AttentionStructure, sizes: tuple[int, int], blocks: tuple[int, int]
) -> jax.Array:
    """Steps with query blocks outside and key blocks inside: int32 [B|1, steps]; arguments as `block_visibility`."""
    visibility = block_visibility(call, structure, sizes, blocks)
    return packed_steps(visibility.visible, visibility.full)


def steps_by_key(
    call: AttentionCall, structure: AttentionStructure, sizes: tuple[int, int], blocks: tuple[int, int]
) -> jax.Array:
    """Steps with key blocks outside and query blocks inside: int32 [B|1, steps]; arguments as `block_visibility`."""
    visibility = block_visibility(call, structure, sizes, blocks)
    return packed_steps(*(x.swapaxes(1, 2) for x in visibility))


def block_visibility(
    call: AttentionCall, structure: AttentionStructure, sizes: tuple[int, int], blocks: tuple[int, int]
) -> Blocks:
    """The blocks of a call; numpy arrays where its structure is static.

    Args:
      call, structure: the call.
      sizes: T and S.
      blocks: queries and keys of a block.
    """
    visible, full = _by_limits(call, sizes, blocks)
    if structure.bias is not None:
        full = np.zeros_like(full)  # a bias may hide any pair
    for part in (_by_rules(structure, blocks), _by_mask(structure, sizes, blocks)):
        if part is not None:
            visible, full = visible & part.visible, full & part.full
    return Blocks(visible, full)


def _by_limits(call: AttentionCall, sizes: tuple[int, int], blocks: tuple[int, int]) -> Blocks:
    """The blocks by `limits` and by the ends of the arrays."""
    (q_first, q_last), (k_first, k_last) = (_ends(size, block) for size, block in zip(sizes, blocks, strict=True))
    q_first, q_last = q_first[:, None], q_last[:, None]
    left, right = call.limits
    visible = np.ones((q_first.shape[0], k_first.shape[0]), bool)
    full = visible & (k_first + blocks[1] <= sizes[1])
    if right is not None:
        visible, full = visible & (k_first <= q_last + right), full & (k_last <= q_first + right)
    if left is not None:
        visible, full = visible & (k_last >= q_first - left), full & (k_first >= q_last - left)
    return Blocks(visible[None], full[None])


def _ends(size: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last index of each block."""
    first = np.arange(cdiv(size, block), dtype=np.int64) * block
    return first, np.minimum(first + block, size) - 1


def _by_rules(structure: AttentionStructure, blocks: tuple[int, int]) -> Blocks | None:
    """The blocks by positions and segments, comparing the bounds of each block; unseen entries do not count."""
    if structure.queries is None or structure.keys is None:
        return None
    queries = _in_blocks(structure.queries, 1, blocks[0], jnp.int32([HIGHEST, LOWEST, 0]))[:, :, None]
    keys = _in_blocks(structure.keys, 1, blocks[1], jnp.int32([LOWEST, 0]))[:, None]
    sees, held = queries[..., 0] <= queries[..., 1], keys[..., 0] > LOWEST
    (first, last, q_segment), (position, k_segment) = (
        [_range(x[..., i], where) for i in range(x.shape[-1])] for x, where in ((queries, sees), (keys, held))
    )
    visible = (position[1] >= first[0]) & (position[0] <= last[1])
    visible &= (k_segment[1] >= q_segment[0]) & (k_segment[0] <= q_segment[1])
    full = (position[0] >= first[1]) & (position[1] <= last[0])
    full &= (k_segment[0] == q_segment[1]) & (k_segment[1] == q_segment[0])
    some, everyone = (rule(sees, -1) & rule(held, -1) for rule in (jnp.any, jnp.all))
    return Blocks(visible & some, full & everyone)


def _range(x: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Least and largest entry along the last axis, of those in `where`."""
    return jnp.min(x, -1, where=where, initial=HIGHEST), jnp.max(x, -1, where=where, initial=LOWEST)


def _by_mask(structure: AttentionStructure, sizes: tuple[int, int], blocks: tuple[int, int]) -> Blocks | None:
    """The blocks by an explicit mask, over all heads."""
    if structure.mask is None:
        return None
    mask, split = structure.mask, structure.mask
    for axis, block in ((2, blocks[0]), (4, blocks[1])):
        split = _in_blocks(split, axis, block if split.shape[axis] > 1 else 1, jnp.bool_(False))
    shape = (mask.shape[0], *(cdiv(size, block) for size, block in zip(sizes, blocks, strict=True)))
    return Blocks(*(jnp.broadcast_to(rule(split, (1, 3, 5)), shape) for rule in (jnp.any, jnp.all)))


def _in_blocks(x: jax.Array, axis: int, block: int, padding: jax.Array) -> jax.Array:
    """`x` with one axis cut into blocks, [..., blocks, block, ...], the last one filled up with `padding`."""
    missing = -x.shape[axis] % block
    if missing:
        filler = jnp.broadcast_to(padding, (*x.shape[:axis], missing, *x.shape[axis + 1 :]))
        x = jnp.concatenate([x, filler], axis)
    return x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])


def packed_steps(visible: Any, full: Any) -> jax.Array:
    """Packed steps [B|1, steps] from bool [B|1, outer, inner]. Every outer block has a step, be it to write zeros."""
    lib: Any = np if isinstance(visible, np.ndarray) else jnp
    rows, _, inner = visible.shape
    listed = visible | (~visible.any(2, keepdims=True) & (np.arange(inner) == 0)[None, None])
    listed, visible, full = (x.reshape(rows, -1) for x in (listed, visible, lib.broadcast_to(full, visible.shape)))
    order = lib.argsort(~listed, axis=1, stable=True)
    count = listed.sum(1, keepdims=True)
    if lib is np:
        order = order[:, : int(count.max())]
    step = np.arange(order.shape[1])[None]
    # What is left over repeats the last step's blocks, with no flag set.
    order = lib.take_along_axis(order, lib.minimum(step, count - 1), axis=1)
    o, i = order // inner, order % inner
    compute, partial = (lib.take_along_axis(x, order, axis=1) for x in (visible, ~full))
    before, after = lib.roll(o, 1, axis=1), lib.roll(o, -1, axis=1)
    first, last = (step == 0) | (o != before), (step == count - 1) | (o != after)
    bits = ((FIRST, first), (LAST, last), (COMPUTE, compute), (PARTIAL, partial))
    flags = sum(lib.where((step < count) & on, bit, 0) for bit, on in bits)
    return jnp.asarray((o << OUTER_SHIFT) + i + flags, jnp.int32)
