"""Mosaic GPU kernels where there is no GPU: JAX's interpreter, taught six things that attention needs.

They are a product whose left factor is in registers, an accumulator that is set, a copy to device memory that adds, the
barrier at which two warpgroups of the backward meet, the sums of dQ that they add to, and what the programs of a
cluster do with each other in decoding.
This reaches into private modules of JAX, whose names both supported versions share.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import primitives as state_primitives
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_backward_tile import MEETING, WARPGROUPS
from tests.pallas_kernels.hopper import warpgroup_threads

ADDING = threading.Lock()
DETECTIONS: list[Any] = []  # of the kernels that were interpreted last, in order
PATIENCE = 100  # seconds that a thread of a cluster waits for the others
BLOCK = 2  # where the key of a buffer has the number of its thread block
# jax 0.12 raises where it finds a race, unless it is told not to; 0.11 only says so.
ON_RACE: dict[str, Any] = {"on_race": "warn"} if hasattr(plgpu.InterpretGPUParams, "on_race") else {}


@contextlib.contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[None]:
    """Within it, kernels of Mosaic GPU that are compiled run on the CPU; `races_found` says what a detection found."""
    interpreter, detection = jaxpr_interpret.JaxprInterpreter, gpu_callbacks.GPURaceDetectionState
    DETECTIONS.clear()

    def detect(*args: Any, **kwargs: Any) -> Any:
        DETECTIONS.append(detection(*args, **kwargs))
        return DETECTIONS[-1]

    with (
        mock.patch.object(interpreter, "_interpret_wgmma_ref_p", _wgmma),
        mock.patch.object(interpreter, "_interpret_inline_mgpu_p", _inline),
        mock.patch.object(primitives, "wgmma_accumulator_store", _set),
        mock.patch.object(gpu_callbacks, "GPURaceDetectionState", detect),
        mock.patch.object(gpu_callbacks, "copy_smem_to_gmem", _copy_or_add(gpu_callbacks.copy_smem_to_gmem)),
        mock.patch.object(shared_memory.Barrier, "deallocate", _deallocate(shared_memory.Barrier.deallocate)),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races, **ON_RACE)),
    ):
        yield


def races_found() -> bool:
    """Whether accesses of two warpgroups in no order, one of them a write, were found in what was interpreted last."""
    return any(detection.races_found for detection in DETECTIONS)


def _reader(key: Any, transforms: Any) -> tuple[Any, Any]:
    """A buffer's key, and the access that index transforms make to it."""
    indices = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    return key, gpu_callbacks._get_shared_memory().access(key, indices)


def _set(accumulator: Any, value: Any) -> None:
    state_primitives.ref_set(accumulator, (), value)


def _inline(self: Any, eqn: Any, token: Any, get_invals: Any) -> tuple[Any, list[Any]]:
    """Functions in the machine's own code: the others that there are have no interpretation here."""
    function = eqn.params["mgpu_fn"]
    if function.__name__ == "meet":
        return _meet(self, token), []
    if function.__name__ in ("meet_cluster", "leave_cluster"):
        meet = functools.partial(_meet_cluster, self.mesh.num_threads * int(np.prod(self.mesh.cluster)))
        return callback.io_callback(meet, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, ordered=False), []
    count, invals = eqn.params["pytree_args"].num_leaves, get_invals()
    transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], invals[count:])
    refs = [_resolved(*ref) for ref in zip(eqn.invars[:count], invals[:count], transforms, strict=True)]
    if function.__name__ in ("add_fragments", "load_fragments"):
        fragments = functools.partial(_fragments, function)
        results = (gpu_callbacks.TOKEN_SHAPE_DTYPE, *(variable.aval for variable in eqn.outvars))
        token, *tiles = callback.io_callback(fragments, results, token, self.thread, *refs, ordered=False)
        return token, tiles
    place = {"mesh_location": self.mesh_location, "thread": self.thread, "source_info": eqn.source_info}
    if function.__name__ == "peek":
        ((key, index),) = refs
        there = key.at[BLOCK].set(inspect.getclosurevars(inspect.unwrap(function)).nonlocals["part"])
        shape = eqn.outvars[0].aval
        given = {"result_shape_and_dtype": shape, "allocation_key_as_array": there, "transforms": index}
        token, value = gpu_callbacks.call_get(token=token, **given, **place)
        return token, [value]
    assert function.__name__ == "keep", function
    for (key, index), value in zip(refs[: count // 2], refs[count // 2 :], strict=True):
        given = {"result_shape_and_dtype": value, "allocation_key_as_array": key, "transforms": index}
        token, _ = gpu_callbacks.call_swap(token=token, val=value, mask=None, **given, **place)
    return token, []


def _meet(self: Any, token: Any) -> Any:
    commit = functools.partial(callback.io_callback, gpu_callbacks.commit_smem, gpu_callbacks.TOKEN_SHAPE_DTYPE)
    token = commit(token=token, mesh_location=self.mesh_location, thread=self.thread)
    place, threads = (token, self.mesh_location, self.thread, MEETING), 128 * WARPGROUPS
    return gpu_callbacks.call_named_barrier(*place, num_threads=threads, sync=True)


@gpu_callbacks.fail_on_exception
def _fragments(function: Any, token: Any, thread: Any, ref: Any, *tile: Any) -> tuple[Any, ...]:
    """Load a tile from device memory, or add one to it. Additions are in no order, so that they are in no race."""
    memory, place = gpu_callbacks._get_shared_memory(), _reader(*ref)
    with ADDING:
        numbers = np.array(memory.get_buffer_content(*place, thread, logging_info=None)[0])
        flat = numbers.reshape(-1)
        found = warpgroup_threads.run(function, flat, *tile)
        if found is not None:
            return token, found
        memory.store_buffer_content(*place, numbers, thread, logging_info=None)
    return (token,)


@functools.cache
def _barrier_of(threads: int) -> threading.Barrier:
    return threading.Barrier(threads)


def _meet_cluster(threads: int, token: Any) -> Any:
    """One cluster runs at a time, so that one barrier serves all."""
    _barrier_of(threads).wait(PATIENCE)
    return token


def _wgmma(self: Any, eqn: Any, token: Any, get_invals: Any) -> Any:
    acc, a, b, *leaves = get_invals()
    trees = (eqn.params[f"{name}_transforms_tree"] or jax.tree.structure([]) for name in ("acc", "a", "b"))
    transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(tuple(trees)), leaves)
    refs = zip(eqn.invars, (acc, a, b), transforms, strict=False)
    operands = dict(zip(("acc", "a", "b"), (_resolved(*ref) for ref in refs), strict=True))
    multiply = functools.partial(_multiply, source_info=eqn.source_info)
    operands |= {"token": token, "thread": self.thread}
    return callback.io_callback(multiply, gpu_callbacks.TOKEN_SHAPE_DTYPE, **operands), []


def _resolved(variable: Any, value: Any, transforms: Any) -> Any:
    """What an operand is read by, if it is in memory; it is itself in registers."""
    in_memory = isinstance(variable.aval, state_types.AbstractRef)
    return jaxpr_interpret.resolve_ref(variable.aval, value, transforms) if in_memory else value


@gpu_callbacks.fail_on_exception
def _multiply(*, token: Any, thread: Any, acc: Any, a: Any, b: Any, source_info: Any) -> Any:
    memory = gpu_callbacks._get_shared_memory()

    def content(operand: Any) -> Any:
        if not isinstance(operand, tuple):
            return np.asarray(operand)
        reader = _reader(*operand)
        found, _, clock = memory.get_buffer_content(*reader, thread, logging_info=None)
        if memory.detect_races:
            # The matrix units see what was committed; a later write has to come after what the warpgroup has done.
            for seen in (clock.async_smem_clock, clock.generic_clock):
                gpu_callbacks.get_races().check_read(thread, seen, *reader, source_info=source_info)
        return found

    target = _reader(*acc)
    total, _, _ = memory.get_buffer_content(*target, thread, logging_info=None)
    product = np.matmul(content(a), content(b), dtype=total.dtype)
    memory.store_buffer_content(*target, total + product, thread, logging_info=None)
    return token


def _copy_or_add(original: Any) -> Any:
    @gpu_callbacks.fail_on_exception
    def copy(*, reduction_op: str | None, **kwargs: Any) -> Any:
        if reduction_op is None:
            return original(reduction_op=None, **kwargs)
        assert reduction_op == "add"
        memory, thread = gpu_callbacks._get_shared_memory(), kwargs["thread"]
        source = _reader(kwargs["src_allocation_key_as_array"], kwargs["src_transforms"])
        key, access = _reader(kwargs["dst_allocation_key_as_array"], kwargs["dst_transforms"])
        whole = (key, memory.access(key, ()))
        with ADDING:
            part, _, _ = memory.get_buffer_content(*source, thread, logging_info=None)
            total, _, _ = memory.get_buffer_content(*whole, thread, logging_info=None)
            total = np.array(total)
            kept = [
                min(r.stop, n) - r.start for r, n in zip(access.range, total.shape, strict=True) if isinstance(r, slice)
            ]
            if min(kept) > 0:  # what lies outside is cut off
                total[access.range] += np.asarray(part)[tuple(slice(size) for size in kept)]
            memory.store_buffer_content(*whole, total, thread, logging_info=None)
        return kwargs["token"]

    return copy


def _deallocate(original: Any) -> Any:
    def deallocate(self: Any) -> None:
        """Barriers may end in a phase that nobody has waited for, as they may on a GPU."""
        with self.cv:
            if self.ref_count == 1:
                for thread in list(self.last_observed_phase_by_thread):
                    self.last_observed_phase_by_thread[thread] = self.phase
        original(self)

    return deallocate
