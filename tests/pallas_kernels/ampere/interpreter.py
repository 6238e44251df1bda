"""The portable kernels where there is no GPU: JAX's interpreter, told what mma is and where threads have nothing to do.

Registers, layouts and `cp.async` are not interpreted: copies are those of the copy engine, `bulk`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.ampere import attention_backward_keys, attention_queries, attention_tile
from tests.pallas_kernels.hopper import interpreter


def _mma(total: Any, x: Any, y: Any) -> Any:
    return total + jnp.dot(x, y, preferred_element_type=jnp.float32)


def _left_parts(x: Any) -> tuple[Any, ...]:
    depth = attention_tile.DEPTH
    return tuple(x[:, i : i + depth] for i in range(0, x.shape[1], depth))


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it, kernels of Mosaic GPU that are compiled run on the CPU; a warpgroup is one thread."""
    with (
        mock.patch.object(plgpu, "mma", _mma),
        mock.patch.object(attention_tile, "left_parts", _left_parts),
        mock.patch.object(attention_queries, "sync"),
        mock.patch.object(attention_backward_keys, "sync"),
        interpreter.interpreted(),
    ):
        yield
