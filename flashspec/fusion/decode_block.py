"""All of a decoder step between two attentions as one operation, and the choice of what computes it.

Between the attention of one layer and that of the next lie four products with something small behind each:

    x'  = x + a W_out
    x'' = x' + (phi(g) * u) W_down     with [g, u] = norm(x') W_gate_up
    q, k, v of norm(x'') W_qkv         with bias, norms of heads and rotary positions; k and v go into the cache

A step is a call without an MLP, which makes the first layer's queries, then one between every two attentions, then one
without heads. What one call hands to the next is a `Stream`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashspec.fusion import backends, decode_block_hopper, decode_block_xla
from flashspec.fusion.decode_block_request import (
    BlockArrays,
    BlockForm,
    BlockRequest,
    Heads,
    HeadWeights,
    MlpWeights,
    Places,
    Stream,
    make_request,
    start,
)
from flashspec.fusion.decode_block_rules import with_rules
from flashspec.selection import Implementation, Target, first_that_can, named, resolve_device, run_where_lowered
from pallas_kernels.gpu.hopper.decode_block_config import MAX_ROWS, BlockShape

__all__ = [
    "MAX_ROWS",
    "BlockForm",
    "HeadWeights",
    "Heads",
    "MlpWeights",
    "Places",
    "Stream",
    "decode_block",
    "plan_decode_block",
    "start",
]


class BlockResult(NamedTuple):
    """What a call gives.

    Args:
      stream: for the next call; its `residual` is x'', or x after a call without an MLP.
      query: [rows, N, H] with positions applied; None without heads.
      key, value: the layer's arrays with the new rows in them; None without heads.
    """

    stream: Stream
    query: Array | None
    key: Array | None
    value: Array | None


IMPLEMENTATIONS = ("hopper", "xla")
NOT_CHOSEN = "is no default: 1.03 of XLA's speed at one row on an H200, not measured for more"


def decode_block(
    stream: Stream,
    attended: Array | None,
    mlp: MlpWeights | None,
    heads: HeadWeights | None,
    places: Places | None,
    cache: tuple[Array, Array] | None,
    *,
    form: BlockForm,
    implementation: Implementation = None,
) -> BlockResult:
    """A decoder step between two attentions, for few rows.

    Written for inference: differentiable, with the gradients of the same call on XLA, and under `jax.vmap` that call.

    Args:
      stream: of `start`, or of the call before.
      attended: a [rows, N H], what attention gave; None together with `mlp`.
      mlp: weights of the layer behind that attention; None before the first.
      heads: of the next layer; None after the last, together with `places` and `cache`.
      places: of the rows.
      cache: the next layer's keys and values, [leads, slots, K, H] each. Donated, they are written in place.
      form: what all layers share.
      implementation: "hopper" (one kernel for GPUs of compute capability 9.0, bfloat16, up to 16 rows) or "xla"; or a
        sequence of them, of which the first that supports the call runs. None is "xla": the kernel has not been found
        to be faster by enough.

    Returns:
      The result.

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the implementations named cannot run this call; the message has every reason.
    """
    arrays = BlockArrays(stream, attended, mlp, heads, places, *(cache or (None, None)))
    request = make_request(arrays, form)
    here = Target(request.device_kind or "", request.platform, request.compute_capability)

    def select_for(target: Target) -> str:
        return select(request.on(target), implementation)

    return run_where_lowered(arrays, here, select_for, functools.partial(_execute, request))


class BlockPlan(NamedTuple):
    """The selection for the calls of a step.

    Args:
      name: of the implementation.
      config: its launch settings.
      rejected: every implementation that cannot run the calls, with all its reasons.
      passed_over: those that can and are no default, with the reason; empty where a name was given.
    """

    name: str
    config: Mapping[str, int]
    rejected: Mapping[str, tuple[str, ...]]
    passed_over: Mapping[str, str]


def plan_decode_block(
    rows: int,
    hidden: int,
    inner: int,
    form: BlockForm,
    *,
    dtype: Any = jnp.bfloat16,
    implementation: Implementation = None,
    device: jax.Device | str | None = None,
) -> BlockPlan:
    """What `decode_block` would run for the calls of a step, and why not something else; computes nothing.

    Args:
      rows: tokens.
      hidden: C.
      inner: F.
      form: what all layers share.
      dtype: of all arrays.
      implementation: as in `decode_block`.
      device: a device or the kind of one, such as "NVIDIA H200"; the default one if None.

    Returns:
      The plan.

    Raises:
      ValueError: an implementation or a kind of device that does not exist.
      NotImplementedError: the implementations named cannot run the calls.
    """
    shape = BlockShape(rows, hidden, inner, Heads(*form.heads))
    request = BlockRequest(shape, form, np.dtype(dtype)).on(resolve_device(device, None))
    name, refusals = select(request, implementation), _REFUSALS["hopper"](request)
    passed_over = {"hopper": NOT_CHOSEN} if implementation is None and not refusals else {}
    config = decode_block_hopper.launch_config(request) if name == "hopper" else {}
    return BlockPlan(name, config, {"hopper": refusals} if refusals else {}, passed_over)


def select(request: BlockRequest, implementation: Implementation) -> str:
    """The first implementation that supports a request, of those named.

    Raises:
      ValueError: an implementation that does not exist.
      NotImplementedError: none supports the request.
    """
    names = ("xla",) if implementation is None else named(implementation, IMPLEMENTATIONS)
    return first_that_can(names, lambda name: _REFUSALS[name](request))


_REFUSALS: dict[str, Callable[[BlockRequest], tuple[str, ...]]] = {
    "hopper": decode_block_hopper.refusals,
    "xla": lambda request: (),
}


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that eager calls are one program
def _execute(request: BlockRequest, name: str, arrays: BlockArrays) -> BlockResult:
    with jax.named_scope(f"flashspec.fusion.decode_block.{name}"):
        twin = functools.partial(decode_block_xla.decode_block, request)
        if name == "xla":
            return BlockResult(*twin(arrays))
        kernel = backends.decode_block_kernel()
        return BlockResult(
            *with_rules(functools.partial(decode_block_hopper.decode_block, kernel, request), twin)(arrays)
        )
