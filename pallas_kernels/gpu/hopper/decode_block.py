"""All of a decoder step between two attentions on Hopper, in one kernel whose reading of weights never pauses.

A call is a row of products with something small behind each:

    out        residual + product, times the scale of the norm that follows, and sums of squares
    gate_up    activation(gate) * up
    down       as `out`
    qkv        bias, norms of queries and keys, rotation, and the write of keys and values into the cache in place

Each program, one on every multiprocessor, has an equal share of the blocks of every product. One of its warpgroups
copies these blocks ahead, those of all products in one line, and waits for nothing but free memory; so memory is read
while others compute, and while programs wait for each other. Another copies the rows that are multiplied, once they are
there. The other two multiply, and do the small work. Between the two halves of each product's work all programs meet.

The factor of a norm, 1 / sqrt(mean(x^2) + eps), is a number for each row. It is left out of what is multiplied, and
applied to the product: nobody has to wait for the mean.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.decode_block_config import ADDING, ROWS_MULTIPLE, TOGETHER, BlockOperands, BlockPlan
from pallas_kernels.gpu.hopper.decode_block_grid import GROUPS
from pallas_kernels.gpu.hopper.decode_block_phases import WARP, small_work
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


def decode_block(
    plan: BlockPlan, operands: BlockOperands, steps: tuple[int, int] | None = None, into: Any = None
) -> Buffers:
    """The products of a plan and the small work behind each.

        x' = x + a W_out,   x'' = x' + (phi(g) * u) W_down   with   [g, u] = norm(x') W_gate_up,   norm(x'') W_qkv

    Args:
      plan: what is static; `decode_block_config.refusals` has nothing against its shape and settings.
      operands: its arrays; a call writes to its references `key`, `value` and `counts`.
      steps: of the 2 * products halves, the first and the last + 1 to do; all of them by default. For interpreters:
        programs meet only where all are done, so that each half must be a launch of its own.
      into: references in the place of what it would write, which halves hand to each other.

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
        _run(Program(plan, ops, targets, Scratch(*refs), None if steps is None else range(*steps)))

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
    pl.when(p.group < GROUPS)(lambda: _compute(p))


def _compute(p: Program) -> None:
    for number in range(len(p.plan.products)):
        if 2 * number in p.steps:
            multiply(p, number)
            p.arrive(2 * number)
        if 2 * number + 1 in p.steps:
            small_work(p, number)
            p.arrive(2 * number + 1)
