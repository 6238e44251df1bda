"""How the programs of the decoder step on Hopper meet: counts in device memory, one for each meeting.

Every computing warpgroup of every program adds one when it has done a step, and whoever needs what all of them wrote
waits for the full number. A program that waits keeps its multiprocessor, so all of them must be on the chip at once.

Counts are zeros before the first call of a step, and the calls share them. A call zeroes all but the first two after
its first meeting, when nobody is left who could wait for what the last call had counted; and the first two after its
third meeting, for the next call.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.decode_block_config import COUNTS, PRODUCTS, BlockPlan

GROUPS = 2  # computing warpgroups of a program


def arrive(plan: BlockPlan, counts: Any, step: int) -> None:
    """Say that this warpgroup has done a step, to whoever waits for it; nobody waits for the last one."""
    if step + 1 < 2 * len(plan.products):
        _signal(counts, _number(plan, step))


def wait(plan: BlockPlan, counts: Any, step: int) -> None:
    """Wait until all computing warpgroups of all programs have done a step."""
    _wait(counts, _number(plan, step), GROUPS * plan.config.programs)


def reset(plan: BlockPlan, counts: Any, number: int) -> None:
    """Zero counts that nobody waits for any more, or not yet; for one warpgroup, after the product of this number."""
    if len(plan.products) > 1 and number < 2:
        for i in (range(2, COUNTS[0]), range(2))[number]:
            counts[i, 0] = 0


def _number(plan: BlockPlan, step: int) -> int:
    """The count of a step: products have two each, whatever call they are in."""
    return 2 * PRODUCTS.index(plan.products[0]) + step


def _semaphore(counts: Any, number: int) -> Any:
    return mgpu.SemaphoreRef(mgpu.memref_ptr(mgpu.memref_slice(counts, (number, 0))))


def _signal(counts: Any, number: int) -> None:
    """Add 1 to a count, after everything that this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_: Any, counts: Any) -> None:
        # What was written by stores will be read by copies, which are ordered with stores by this fence alone.
        mgpu.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
        mgpu.warpgroup_barrier()
        _semaphore(counts, number).signal(1, memory_scope="gpu")

    add(counts)


def _wait(counts: Any, number: int, value: int) -> None:
    """Wait for a count, before anything that this warpgroup reads after it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def until(_: Any, counts: Any) -> None:
        _semaphore(counts, number).wait(value, decrement=False, memory_scope="gpu")
        mgpu.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    until(counts)
