"""All of a decoder step between two attentions on Hopper, or several layers with their attention, in one kernel.

Its reading of weights never pauses. A layer is a row of phases, most of them products with something small behind each:

    qkv        bias, norms of queries and keys, rotation, and the write of keys and values into the cache in place
    attend     parts of attention over a dense cache, then `merge`, where a step has attention within
    out        residual + product, times the scale of the norm that follows, and sums of squares
    gate_up    activation(gate) * up
    down       as `out`

A call with attention takes some layers, in a loop; one without takes some of the products, from `out` to the `qkv` of
the next layer.

Each program, one on every multiprocessor, has an equal share of the blocks of every phase. One of its warpgroups
copies these blocks ahead, those of all products in one line, and waits for nothing but free memory (and for the keys of
the step itself); so memory is read while others compute. Another copies the rows that are multiplied, each 128 columns
of them once they are there. The other two multiply. Programs never meet: who stores the last part of a tile of outputs
does the small work behind it, and says so in a word of its own (`decode_block_grid`). Parts are added up in one order,
whoever does it.

That no program waits for ever rests on two things. All programs are on the chip at once, as each has a multiprocessor
of its own. And the work can be put in a line, phase by phase, in which everything waits for earlier work alone: rows
for the small work of the product before, which is done within the other programs' runs of that product, by who comes
last and without any waiting; a run of a product, by the same argument, for the products before; queries, keys and
values for the small work of theirs; the merge for the parts of attention; and free memory for units of the same program
that come earlier in its line.

Memory that one layer leaves is taken by the next without a question. Whoever comes to a phase again has, in three
phases before it at most, waited for something that is whole only when every set of that phase has been told of and
used: a tile adds up all rows of the product before.

A word counts up within a call, through all layers. Between calls without attention, which share their words, it has to
be 0 again, and may be set to that once nobody will look at it: the small work of a product sets those of phases before
the one before, all of whose rows have been used then; and that of `out` sets those that the call before has left, of
`down` and `qkv` (`decode_block_phases`). The words are not those of the calls of another step, so that the last call of
a step need not leave zeros.

Both warpgroups that copy have something to copy for every block, that of the rows the values of a block of the cache. A
barrier tells one phase of it from the next, no more: who only waited for it could miss two.

The factor of a norm, 1 / sqrt(mean(x^2) + eps), is a number for each row. It is left out of what is multiplied, and
applied to the product: nobody has to wait for the mean.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_tile import tiled
from pallas_kernels.gpu.hopper.decode_block_attention import attend, merge
from pallas_kernels.gpu.hopper.decode_block_config import (
    ADDING,
    BEFORE,
    PRODUCTS,
    QUERY_TILE,
    ROWS_MULTIPLE,
    TOGETHER,
    BlockOperands,
    BlockPlan,
    beginning,
    unit_keys,
)
from pallas_kernels.gpu.hopper.decode_block_grid import GROUPS
from pallas_kernels.gpu.hopper.decode_block_line import places
from pallas_kernels.gpu.hopper.decode_block_phases import finish
from pallas_kernels.gpu.hopper.decode_block_program import Buffers, Program, Run, Scratch
from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS
from pallas_kernels.gpu.hopper.decode_block_stream import copy_rows, copy_weights, multiply
from pallas_kernels.launch import round_up


def decode_block(
    plan: BlockPlan, operands: BlockOperands, only: tuple[int, int] | None = None, into: Any = None
) -> Buffers:
    """The phases of a plan, with the small work behind each product.

        x' = x + a W_out,   x'' = x' + (phi(g) * u) W_down   with   [g, u] = norm(x') W_gate_up,   norm(x'') W_qkv

    Args:
      plan: what is static; `decode_block_config.refusals` has nothing against its shape and settings.
      operands: its arrays; a call writes to its references `begin`, `caches` and `counts`.
      only: the layer and the one phase to do, by their positions; all of them by default. For interpreters, where
        programs run one after the other, so that whoever waits would wait for one that has not begun.
      into: references in the place of what it would write, which such launches hand to each other.

    Returns:
      What it wrote. `residual` is that after its last sum, and `query` has positions applied.
    """
    config, rows = plan.config, plan.shape.rows
    (dtype,) = {x.dtype for x in jax.tree.leaves(operands.weights)}
    if operands.x is not None and rows > ROWS_MULTIPLE and rows % ROWS_MULTIPLE:
        # Copies cut off rows of the only group of eight.
        operands = operands._replace(x=jnp.pad(operands.x, ((0, plan.padded - rows), (0, 0))))
    held: dict[str, Any] = {"begin": operands.begin, "caches": operands.caches, "counts": operands.counts}
    given, tree = jax.tree.flatten(operands._replace(begin=None, caches=(), counts=None))
    types, results_tree = jax.tree.flatten(buffers(plan, dtype))
    kept, kept_tree = jax.tree.flatten(_scratch(plan, dtype), is_leaf=lambda x: not isinstance(x, Scratch | None))

    def body(*refs: Any) -> None:
        inputs, refs = refs[: len(given)], refs[len(given) :]
        targets = into
        if into is None:
            targets, refs = jax.tree.unflatten(results_tree, refs[: len(types)]), refs[len(types) :]
        ops = jax.tree.unflatten(tree, inputs)._replace(**held)
        if ops.begin is not None:
            targets = targets.going_on(ops.begin)
        scratch = jax.tree.unflatten(kept_tree, refs)
        if plan.attention is not None:
            weights, keys = scratch.weights
            scratch = scratch._replace(weights=weights, keys=keys)
        _run(Program(plan, ops, targets, scratch, only))

    run = plgpu.kernel(
        body,
        out_type=types if into is None else (),
        scratch_types=kept,
        grid=(config.programs,),
        grid_names=("program",),
        num_threads=GROUPS + 2,
        thread_name="group",
        kernel_name="flashspec_hopper_decode_block",
        # To infer the layouts of so much code takes longer than all else, so that they are written down instead.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    with jax.enable_x64(False):  # indices within a kernel are 32 bits wide, whatever the caller's numbers are
        results = run(*given)
    return into if into is not None else jax.tree.unflatten(results_tree, results)


def buffers(plan: BlockPlan, dtype: Any) -> Buffers:
    """Shapes and types of what a call writes, but for where it begins."""
    f32, padded, shape = jnp.float32, plan.padded, plan.shape
    B, K, packed, H = plan.query
    attends, names = plan.attention is not None, plan.phases
    splits = {name: plan.split(name) for name in PRODUCTS if name in names}
    parts = {name: jax.ShapeDtypeStruct((s.places, padded, BLOCK_OUTPUTS), f32) for name, s in splits.items()}
    rows = {
        before: jax.ShapeDtypeStruct((padded, shape.matrix(name)[0]), dtype)
        for name, before in BEFORE.items()
        if name in PRODUCTS and name in names and before in names
    }
    residual, _, sums = beginning(plan, dtype)
    squares = {name: sums for name in ADDING if name in names}
    normalisers = query = None
    if attends:
        normalisers = jax.ShapeDtypeStruct((places(plan), QUERY_TILE), f32)
        parts["attend"] = jax.ShapeDtypeStruct((places(plan), round_up(packed, TOGETHER), H), f32)
        del rows["down"], squares["down"]
    if "qkv" in names:
        query = jax.ShapeDtypeStruct((B, K, packed, H), dtype)
    return Buffers(parts, rows, squares, normalisers, residual if squares and not attends else None, query)


def _scratch(plan: BlockPlan, dtype: Any) -> Scratch:
    """What a program keeps in shared memory. Blocks of the cache take the places of those of weights."""
    config, H = plan.config, plan.shape.heads.H
    stages = config.stages
    weights = tiled((stages, config.block_inputs, BLOCK_OUTPUTS), dtype)
    query = query_ready = query_free = None
    if plan.attention is not None:
        weights = plgpu.RefUnion(weights, tiled((stages, 2, unit_keys(plan.shape, config), H), dtype))
        query = tiled((QUERY_TILE, H), dtype)
        query_ready, query_free = plgpu.Barrier(), plgpu.Barrier(num_arrivals=GROUPS)
    return Scratch(
        weights,
        None,
        tiled((stages, plan.padded, config.block_inputs), dtype),
        query,
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=plan.padded // ROWS_MULTIPLE, num_barriers=stages),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        query_ready,
        query_free,
    )


def _run(p: Program) -> None:
    """What each warpgroup of a program does."""
    computing, copying = p.plan.registers

    def registers(count: int | None, action: Literal["increase", "decrease"]) -> None:
        if count is not None:
            plgpu.set_max_registers(count, action=action)

    @pl.when(p.group < GROUPS)
    def _compute() -> None:
        registers(computing, "increase")
        if p.plan.attention is not None:
            plgpu.barrier_arrive(p.scratch.query_free)  # it is free before the first queries come

        def one(run: Run) -> None:
            name = p.plan.phases[run.number]
            if name in PRODUCTS:
                multiply(p, run, functools.partial(finish, p, run))
            else:
                {"attend": attend, "merge": merge}[name](p, run)

        p.each(one)

    for group, copy in ((GROUPS, copy_weights), (GROUPS + 1, copy_rows)):

        @pl.when(p.group == group)
        def _copy(copy: Callable[[Program], None] = copy) -> None:
            registers(copying, "decrease")
            copy(p)
