"""Mosaic GPU kernels where there is no GPU: JAX's interpreter, taught three things that attention on Hopper needs.

They are a product whose left factor is in registers, an accumulator that is set, and a copy to device memory that adds.
This reaches into private modules of JAX, whose names both supported versions share.
"""

import contextlib
import functools
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

ADDING = threading.Lock()


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it, kernels of Mosaic GPU that are compiled run on the CPU."""
    interpreter = jaxpr_interpret.JaxprInterpreter
    with (
        mock.patch.object(interpreter, "_interpret_wgmma_ref_p", _wgmma(interpreter._interpret_wgmma_ref_p)),
        mock.patch.object(primitives, "wgmma_accumulator_store", _set),
        mock.patch.object(gpu_callbacks, "copy_smem_to_gmem", _copy_or_add(gpu_callbacks.copy_smem_to_gmem)),
        mock.patch.object(shared_memory.Barrier, "deallocate", _deallocate(shared_memory.Barrier.deallocate)),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()),
    ):
        yield


def _reader(key: Any, transforms: Any) -> tuple[Any, Any]:
    """A buffer's key, and the access that index transforms make to it."""
    indices = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    return key, gpu_callbacks._get_shared_memory().access(key, indices)


def _set(accumulator: Any, value: Any) -> None:
    state_primitives.ref_set(accumulator, (), value)


def _wgmma(original: Any) -> Any:
    def interpret(self: Any, eqn: Any, token: Any, get_invals: Any) -> Any:
        if isinstance(eqn.invars[1].aval, state_types.AbstractRef):
            return original(self, eqn, token, get_invals)
        acc, a, b, *leaves = get_invals()
        trees = (eqn.params[f"{name}_transforms_tree"] or jax.tree.structure([]) for name in ("acc", "a", "b"))
        transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(tuple(trees)), leaves)
        acc, acc_transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, acc, transforms[0])
        b, b_transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, transforms[2])
        multiply = functools.partial(_multiply, thread=self.thread)
        refs = {"acc": acc, "acc_transforms": acc_transforms, "b": b, "b_transforms": b_transforms}
        token = callback.io_callback(multiply, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, a=a, **refs)
        return token, []

    return interpret


@gpu_callbacks.fail_on_exception
def _multiply(*, token: Any, thread: Any, acc: Any, acc_transforms: Any, a: Any, b: Any, b_transforms: Any) -> Any:
    memory = gpu_callbacks._get_shared_memory()
    b_content, _, _ = memory.get_buffer_content(*_reader(b, b_transforms), thread, logging_info=None)
    target = _reader(acc, acc_transforms)
    content, _, _ = memory.get_buffer_content(*target, thread, logging_info=None)
    product = np.matmul(np.asarray(a), b_content, dtype=content.dtype)
    memory.store_buffer_content(*target, content + product, thread, logging_info=None)
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
