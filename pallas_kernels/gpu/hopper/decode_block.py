"""All of a decoder step between two attentions on Hopper, in one kernel whose reading of weights never pauses.

A call is a row of products with something small behind each:

    out        residual + product, times the scale of the norm that follows, and sums of squares
    gate_up    activation(gate) * up
    down       as `out`
    qkv        bias, norms of queries and keys, rotation, and the write of keys and values into the cache in place

Each program, one on every multiprocessor, has an equal share of the blocks of every product. One of its warpgroups
copies these blocks ahead, those of all products in one line, and waits for nothing but free memory; so memory is read
while others compute. Another copies the rows that are multiplied, each 128 columns of them once they are there. The
other two multiply. Programs never meet: who stores the last part of a tile of outputs does the small work behind it,
and says so in a word of its own (`decode_block_grid`). Parts are added up in one order, whoever does it.

That no program waits for ever rests on two things. All programs are on the chip at once, as each has a multiprocessor
of its own. And the work can be put in a line, product by product, in which everything waits for earlier work alone:
rows for the small work of the product before, which is done within the other programs' runs of that product, by who
comes last and without any waiting; a run of a product, by the same argument, for the products before; and free memory
for units of the same program that come earlier in its line.

A word counts up within a call. It has to be 0 when the product comes round again, and may be set to that once nobody
will look at it: the small work of a product sets those of the second one before, all of whose rows have been used
then; and that of `out` sets those that the call before has left, of `down` and `qkv`. The words are not those of the
calls of another step, so that the last call of a step need not leave zeros.

The factor of a norm, 1 / sqrt(mean(x^2) + eps), is a number for each row. It is left out of what is multiplied, and
applied to the product: nobody has to wait for the mean.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.decode_block_config import ADDING, ROWS_MULTIPLE, TOGETHER, BlockOperands, BlockPlan
from pallas_kernels.gpu.hopper.decode_block_grid import GROUPS
from pallas_kernels.gpu.hopper.decode_block_phases import WARP, finish
from pallas_kernels.gpu.hopper.decode_block_split import BLOCK_OUTPUTS
from pallas_kernels.gpu.hopper.decode_block_stream import (
    Buffers,
    Program,
    Scratch,
    copy_rows,
    copy_weights,
    multiply,
)
from pallas_kernels.launch import round_up

SWIZZLED = 64  # elements of a row of shared memory


def decode_block(plan: BlockPlan, operands: BlockOperands, only: int | None = None, into: Any = None) -> Buffers:
    """The products of a plan and the small work behind each.

        x' = x + a W_out,   x'' = x' + (phi(g) * u) W_down   with   [g, u] = norm(x') W_gate_up,   norm(x'') W_qkv

    Args:
      plan: what is static; `decode_block_config.refusals` has nothing against its shape and settings.
      operands: its arrays; a call writes to its references `key`, `value` and `counts`.
      only: the one product to do, by its position in the plan; all of them by default. For interpreters, where programs
        run one after the other, so that whoever waits would wait for one that has not begun.
      into: references in the place of what it would write, which such launches hand to each other.

    Returns:
      What it wrote. `residual` is that after its last sum, and `query` has positions applied.
    """
    dtype, config = operands.x.dtype, plan.config
    rows = plan.shape.rows
    if rows > ROWS_MULTIPLE and rows % ROWS_MULTIPLE:  # copies cut off rows of the only group of eight
        operands = operands._replace(x=jnp.pad(operands.x, ((0, plan.padded - rows), (0, 0))))
    given, tree = jax.tree.flatten(operands._replace(key=None, value=None, counts=None))
    types, results_tree = jax.tree.flatten(buffers(plan, dtype))
    transforms = (plgpu.TilingTransform((8, SWIZZLED)), plgpu.SwizzleTransform(2 * SWIZZLED))  # type: ignore[abstract]

    def body(*refs: Any) -> None:
        inputs, refs = refs[: len(given)], refs[len(given) :]
        targets = into
        if into is None:
            targets, refs = jax.tree.unflatten(results_tree, refs[: len(types)]), refs[len(types) :]
        ops = jax.tree.unflatten(tree, inputs)._replace(key=operands.key, value=operands.value, counts=operands.counts)
        _run(Program(plan, ops, targets, Scratch(*refs), only))

    run = plgpu.kernel(
        body,
        out_type=types if into is None else (),
        scratch_types=[
            plgpu.SMEM((config.stages, config.block_inputs, BLOCK_OUTPUTS), dtype, transforms=transforms),
            plgpu.SMEM((config.stages, plan.padded, config.block_inputs), dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=1, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=plan.padded // ROWS_MULTIPLE, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=config.stages),
        ],
        grid=(config.programs,),
        grid_names=("program",),
        num_threads=GROUPS + 2,
        thread_name="group",
        kernel_name="flashspec_hopper_decode_block",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
    with jax.enable_x64(False):  # indices within a kernel are 32 bits wide, whatever the caller's numbers are
        results = run(*given)
    return into if into is not None else jax.tree.unflatten(results_tree, results)


def buffers(plan: BlockPlan, dtype: Any) -> Buffers:
    """Shapes and types of what a call writes."""
    f32, padded, shape = jnp.float32, plan.padded, plan.shape
    parts = tuple(jax.ShapeDtypeStruct((s.places, padded, BLOCK_OUTPUTS), f32) for s in plan.splits)
    rows = tuple(jax.ShapeDtypeStruct((padded, s.inputs), dtype) for s in plan.splits[1:])
    sums = jax.ShapeDtypeStruct((padded, round_up(shape.hidden // BLOCK_OUTPUTS, WARP)), f32)
    squares = (sums,) * sum(name in ADDING for name in plan.products)
    residual = query = None
    if squares:
        residual = jax.ShapeDtypeStruct((plan.row_groups * TOGETHER, shape.hidden), dtype)
    if "qkv" in plan.products:
        query = jax.ShapeDtypeStruct((shape.rows, shape.heads.K * shape.heads.G, shape.heads.H), dtype)
    return Buffers(parts, rows, squares, residual, query)


def _run(p: Program) -> None:
    """What each warpgroup of a program does."""
    pl.when(p.group == GROUPS)(lambda: copy_weights(p))
    pl.when(p.group == GROUPS + 1)(lambda: copy_rows(p))

    @pl.when(p.group < GROUPS)
    def _compute() -> None:
        for number in p.runs:
            multiply(p, number, functools.partial(finish, p, number))
