"""How the attention kernels are launched: operands padded to whole blocks, block specs from the axes' roles.

The grid is (batch, query head, step). A step's word says which block of queries and which block of keys it takes; where
consecutive steps take the same block, it is copied once. The kernel's body gets its references by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.launch import varying_alike
from pallas_kernels.tpu import attention_schedule
from pallas_kernels.tpu.attention_config import HIGHEST, LOWEST, AttentionStructure
from pallas_kernels.tpu.attention_tile import Refs

QUERY, KEY, VECTOR = (
    ("batch", "head", "query", None),
    ("batch", "kv_head", "key", None),
    ("batch", "head", None, "query"),
)
PAIRS = ("batch", "head", "query", "key")
# VMEM that the compiler may use, above what is budgeted for blocks: it holds intermediate scores as well.
VMEM_LIMIT = 60 * 2**20


class Operand(NamedTuple):
    """An array of a launch, or the shape of a result, with the role of each axis.

    "batch", "head", "kv_head", "query" and "key" axes are cut up; None is taken whole. One entry of a "batch" or "head"
    axis serves all, and so does one of a "query" or "key" axis where the operand `broadcasts`. `fill` fills up the last
    block of an axis.
    """

    array: Any
    axes: tuple[str | None, ...]
    broadcasts: bool = False
    fill: float = 0

    @property
    def cut(self) -> list[bool]:
        """Which axes are cut up."""
        rows = ("query", "key")
        return [
            role is not None and (size > 1 or (role in rows and not self.broadcasts))
            for role, size in zip(self.axes, self.array.shape, strict=True)
        ]


class Grid(NamedTuple):
    """The grid of a launch.

    Args:
      batch, heads: its two outer sizes.
      groups: query heads that share a key/value head.
      blocks: queries and keys of a block.
      words: int32 [B|1, steps], from `attention_schedule`.
      query_outside: whether the outer block of a step is that of the queries.
    """

    batch: int
    heads: int
    groups: int
    blocks: tuple[int, int]
    words: Array
    query_outside: bool

    def spec(self, operand: Operand) -> pl.BlockSpec:
        """The block of an operand at each step."""
        sizes = {"query": self.blocks[0], "key": self.blocks[1], "batch": 1, "head": 1, "kv_head": 1}
        shape, cut = operand.array.shape, operand.cut
        block = tuple(sizes[role or ""] if c else n for role, c, n in zip(operand.axes, cut, shape, strict=True))

        def index(b: Any, n: Any, t: Any, words: Any, *_: Any) -> tuple[Any, ...]:
            word = words[b if words.shape[0] > 1 else 0, t]
            outer, inner = attention_schedule.outer_block(word), attention_schedule.inner_block(word)
            query, key = (outer, inner) if self.query_outside else (inner, outer)
            kv_head = n if self.groups == 1 else lax.div(n, jnp.int32(self.groups))
            at = {"batch": b, "head": n, "kv_head": kv_head, "query": query, "key": key}
            return tuple(at[role or ""] if c else 0 for role, c in zip(operand.axes, cut, strict=True))

        return pl.BlockSpec(block, index)

    def padded(self, operand: Operand) -> Operand:
        """The operand filled up to whole blocks."""
        block = {"query": self.blocks[0], "key": self.blocks[1]}
        missing = [
            -size % block[role or ""] if cut and role in block else 0
            for role, cut, size in zip(operand.axes, operand.cut, operand.array.shape, strict=True)
        ]
        if not any(missing):
            return operand
        return operand._replace(
            array=jnp.pad(operand.array, [(0, more) for more in missing], constant_values=operand.fill)
        )


def structure_operands(structure: AttentionStructure, blocks: tuple[int, int], key_axis: int) -> dict[str, Operand]:
    """The structure's arrays as operands, vectors along the axis that a tile has them on; no bias, mask or rule if
    there is none."""
    operands = {}
    if structure.queries is not None and structure.keys is not None:
        rules = {"queries": (structure.queries, "query", blocks[0], [HIGHEST, LOWEST, 0])}
        rules["keys"] = (structure.keys, "key", blocks[1], [LOWEST, 0])
        for name, (array, role, block, hidden) in rules.items():
            filler = jnp.broadcast_to(
                jnp.asarray(hidden, jnp.int32), (array.shape[0], -array.shape[1] % block, len(hidden))
            )
            array = jnp.concatenate([array, filler], axis=1)
            if (role == "key") == (key_axis == 1):  # along the lanes
                operands[name] = Operand(array.swapaxes(1, 2), ("batch", None, role))
            else:
                operands[name] = Operand(array, ("batch", role, None))
    if structure.mask is not None:
        operands["mask"] = Operand(structure.mask.astype(jnp.int8), PAIRS, broadcasts=True)
    if structure.bias is not None:
        # Queries that only fill up a block see nothing: they may not pass for somebody who sees a hidden key.
        operands["bias"] = Operand(structure.bias, PAIRS, broadcasts=True, fill=-jnp.inf)
    return operands


def structure_scalars(structure: AttentionStructure) -> dict[str, Array]:
    """The structure's scalars, which are prefetched."""
    scalars = {
        "sinks": structure.sinks,
        "dropout_words": None if structure.dropout_words is None else _as_int32(structure.dropout_words),
        "dropout_offsets": structure.dropout_offsets,
    }
    return {name: array for name, array in scalars.items() if array is not None}


def launch(
    body: Callable[[Refs], None],
    grid: Grid,
    *,
    scalars: Mapping[str, Array],
    operands: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    scratch: Mapping[str, Any],
    aliases: Mapping[str, str] | None = None,
    name: str,
    interpret: Any,
) -> dict[str, Array]:
    """Run a kernel.

    Args:
      body: the kernel, taking its references by name: "words", scalars, operands, outputs and scratch.
      grid: the grid.
      scalars: prefetched arrays.
      operands, outputs: by name; outputs carry `jax.ShapeDtypeStruct`s of whole blocks.
      scratch: memory of the kernel.
      aliases: outputs that begin as an operand of this name.
      name: what the kernel is called in a profile.
      interpret: as in `pl.pallas_call`.

    Returns:
      The outputs by name, whole blocks still.
    """
    scalars = {"words": grid.words, **scalars}
    operands = {name: grid.padded(operand) for name, operand in operands.items()}
    arrays = varying_alike([*scalars.values(), *(operand.array for operand in operands.values())])
    varying = jax.typeof(arrays[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(x.array.shape, x.array.dtype, manual_axis_type=varying) for x in outputs.values()]
    names = [*scalars, *operands, *outputs, *scratch]
    inputs = [*scalars, *operands]
    call = pl.pallas_call(
        lambda *refs: body(dict(zip(names, refs, strict=True))),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(grid.batch, grid.heads, grid.words.shape[1]),
            in_specs=[grid.spec(operand) for operand in operands.values()],
            out_specs=[grid.spec(operand) for operand in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=shapes,
        input_output_aliases={inputs.index(a): list(outputs).index(b) for b, a in (aliases or {}).items()},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,  # blocks come from `attention_schedule`, and every operand holds them whole
        ),
        name=name,
        interpret=interpret,
    )
    return dict(zip(outputs, call(*arrays), strict=True))


def where(refs: Refs) -> tuple[Array, Array, attention_schedule.Step]:
    """Batch row, query head and step of the grid, inside a kernel."""
    batch, head, step = (pl.program_id(axis) for axis in range(3))
    words = refs["words"]
    return batch, head, attention_schedule.unpack(words[batch if words.shape[0] > 1 else 0, step])


def _as_int32(words: Array) -> Array:
    return lax.bitcast_convert_type(words, jnp.int32)
