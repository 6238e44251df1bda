"""All of a decoder step between two attentions on Hopper, or several layers with their attention, in one kernel.

Weights are copied ahead of what they are multiplied with. A layer is a row of phases, most of them products with
something small behind each:

    qkv        bias, norms of queries and keys, rotation, and the write of keys and values into the cache in place
    attend     parts of attention over a dense cache, then `merge`, where a step has attention within
    out        residual + product, times the scale of the norm that follows, and sums of squares
    gate_up    activation(gate) * up
    down       as `out`

A call with attention takes some layers, in a loop; one without takes some of the products, from `out` to the `qkv` of
the next layer.

Each program, one on every multiprocessor, has an equal share of the blocks of every phase. One of its warpgroups
copies these blocks ahead, those of all products in one line, and waits for nothing but free memory (and for the keys of
the step itself); so memory is read while others compute. It asks for a few at a time: what is asked for is a queue, and
numbers that programs send each other would come behind it. Another warpgroup copies the rows that are multiplied, each
128 columns of them once they are there. The other two multiply, and send their part of every tile of outputs
(`decode_block_letters`). Four rows of a set of tiles belong to one warpgroup of one program, in all layers: it waits
for the parts, adds them up in the order of the programs, does the small work, and says by a word that they are there
(`decode_block_grid`). Programs never meet.

That no program waits for ever rests on two things. All programs are on the chip at once, as each has a multiprocessor
of its own. And the work can be put in a line, phase by phase, in which everything waits for earlier work alone: a run
of a product for the small work of the phase before; small work for all runs of its product; queries, keys and values
for the small work of theirs; the merge for the parts of attention; and free memory for units of the same program that
come earlier in its line.

Memory that one layer leaves is taken by the next without a question. Whoever comes to a phase again has, in three
phases before it at most, waited for something that is made of everything the phase had left: a tile adds up all rows of
the product before. What has been read by then cannot change by what is written afterwards. And what a set's small work
reads besides letters, its residual, the same threads have written.

Both warpgroups that copy have something to copy for every block, that of the rows the values of a block of the cache. A
barrier tells one phase of it from the next, no more: who only waited for it could miss two.

The factor of a norm, 1 / sqrt(mean(x^2) + eps), is a number for each row. It is left out of what is multiplied, and
applied to the product: nobody has to wait for the mean.
"""

import functools
from collections.abc import Callable
from typing import Any

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
    REGISTERS,
    ROWS_MULTIPLE,
    BlockOperands,
    BlockPlan,
    beginning,
    unit_keys,
)
from pallas_kernels.gpu.hopper.decode_block_phases import finish
from pallas_kernels.gpu.hopper.decode_block_program import Buffers, Only, Program, Run, Scratch
from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS, GROUPS
from pallas_kernels.gpu.hopper.decode_block_stream import copy_rows, copy_weights, multiply


def decode_block(plan: BlockPlan, operands: BlockOperands, only: Only | None = None, into: Any = None) -> Buffers:
    """The phases of a plan, with the small work behind each product.

        x' = x + a W_out,   x'' = x' + (phi(g) * u) W_down   with   [g, u] = norm(x') W_gate_up,   norm(x'') W_qkv

    Args:
      plan: what is static; `decode_block_config.refusals` has nothing against its shape and settings.
      operands: its arrays; a call writes to its references `begin`, `caches`, `counts` and `letters`.
      only: what to do; everything by default. For interpreters, where programs run one after the other, so that whoever
        waits would wait for one that has not begun.
      into: references in the place of what it would write, which such launches hand to each other.

    Returns:
      What it wrote. `residual` is that after its last sum, and `query` has positions applied.
    """
    config, rows = plan.config, plan.shape.rows
    (dtype,) = {x.dtype for x in jax.tree.leaves(operands.weights)}
    if operands.x is not None and rows > ROWS_MULTIPLE and rows % ROWS_MULTIPLE:
        # Copies cut off rows of the only group of eight.
        operands = operands._replace(x=jnp.pad(operands.x, ((0, plan.padded - rows), (0, 0))))
    names = "begin", "caches", "counts", "letters"
    held = {name: getattr(operands, name) for name in names}
    given, tree = jax.tree.flatten(operands._replace(begin=None, caches=(), counts=None, letters=None))
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
    padded, shape = plan.padded, plan.shape
    attends, names = plan.attention is not None, plan.phases
    rows = {
        before: jax.ShapeDtypeStruct((padded, shape.matrix(name)[0]), dtype)
        for name, before in BEFORE.items()
        if name in PRODUCTS and name in names and before in names
    }
    residual = query = None
    if attends:
        del rows["down"]
    elif set(ADDING) & set(names):
        residual = beginning(plan, dtype).residual
    if "qkv" in names:
        query = jax.ShapeDtypeStruct(plan.query, dtype)
    return Buffers(rows, residual, query)


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
    computing, copying = REGISTERS

    @pl.when(p.group < GROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(computing, action="increase")
        if p.plan.attention is not None:
            plgpu.barrier_arrive(p.scratch.query_free)  # it is free before the first queries come

        def one(run: Run) -> None:
            name = p.plan.phases[run.number]
            if name in PRODUCTS:
                multiply(p, run, functools.partial(finish, p, run))
            elif p.copies:
                {"attend": attend, "merge": merge}[name](p, run)

        p.each(one)

    for group, copy in ((GROUPS, copy_weights), (GROUPS + 1, copy_rows)) if p.copies else ():

        @pl.when(p.group == group)
        def _copy(copy: Callable[[Program], None] = copy) -> None:
            plgpu.set_max_registers(copying, action="decrease")
            copy(p)
