"""Attention backward on mma in Pallas Mosaic GPU: dQ, dK and dV from the saved log-normaliser (eq. 33.6 to 33.8).

By default one kernel over blocks of keys computes all three, dQ by additions in device memory. The deterministic form
has two kernels, whose sums run in a fixed order: it recomputes scores and their gradient once more, and its results are
bit-equal from run to run.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.ampere.attention_backward_config import BackwardConfig
from pallas_kernels.gpu.ampere.attention_backward_halves import HalfQueryBlocks
from pallas_kernels.gpu.ampere.attention_backward_keys import KeyBlocks
from pallas_kernels.gpu.ampere.attention_backward_queries import QueryBlocks
from pallas_kernels.gpu.ampere.attention_tile import compiler_params, flat, whole
from pallas_kernels.gpu.hopper.attention_backward_config import BackwardShape
from pallas_kernels.gpu.hopper.attention_backward_tile import Scores
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, SegmentIds, segment_ranges
from pallas_kernels.gpu.hopper.attention_tile import LOG2E

MOST = 2**31  # bytes: the caller has asked the config for the device's shared memory


def attention_backward(
    query: Array,
    key: Array,
    value: Array,
    output_gradient: Array,
    lse: Array,
    delta: Array,
    bounds: Array | None = None,
    segments: SegmentIds | None = None,
    *,
    mask: AttentionMask,
    scale: float,
    soft_cap: float | None = None,
    deterministic: bool = False,
    config: BackwardConfig,
) -> tuple[Array, Array, Array]:
    """Gradients of attention: dV = P^T dO, dS = P (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q (eq. 33.7-33.8).

    Rows of queries that see no key, and of keys that no query sees, must be finite; their gradients are 0.

    Args:
      query: [B, T, N, H] bfloat16 or float16; T and S are multiples of the config's blocks.
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      output_gradient: [B, T, N, Hv].
      lse: float32 [B, N, T], the natural log-normaliser; -inf where a query sees no key.
      delta: float32 [B, N, T], the sum over Hv of output times its gradient, less the gradient of the log-normaliser.
      bounds: int32 [B, 4], unless `mask.bounds` has them.
      segments: where `mask.segments`.
      mask: the structure of the mask.
      scale: factor of the scores.
      soft_cap: c of c tanh(score / c).
      deterministic: whether the result has to be bit-equal from run to run.
      config: the launch settings.

    Returns:
      dQ, dK, dV in the shapes and the dtype of query, key and value.

    Raises:
      ValueError: sizes or settings that the kernels do not take.
    """
    shape = BackwardShape.of(query, key, value)
    reasons = config.refusals(shape, MOST, deterministic=deterministic)
    if reasons:
        raise ValueError("; ".join(reasons))
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)  # +inf makes every weight of a row 0 without a mask
    operands = _Operands(flat(query), flat(key), flat(value), flat(output_gradient), lse, delta, bounds)
    if segments is not None:
        q_ids, kv_ids = whole(segments.q, shape.T), whole(segments.kv, shape.S)
        operands = operands._replace(
            q_ids=q_ids,
            kv_ids=kv_ids,
            q_ranges=segment_ranges(q_ids, kv_ids, config.tile_q) if deterministic else None,
            kv_ranges=segment_ranges(kv_ids, q_ids, config.keys),
        )
    facts, keys = Scores(shape, mask, scale, soft_cap), HalfQueryBlocks if config.halves else KeyBlocks
    if deterministic:
        (dq,) = _launch(QueryBlocks(facts, config), operands, operands.q)
        dk, dv = _launch(keys(facts, config), operands, operands.k, operands.v)
    else:
        total = jax.new_ref(jnp.zeros(operands.q.shape, jnp.float32))
        dk, dv = _launch(keys(facts, config, total), operands, operands.k, operands.v)
        dq = (jax.freeze(total) * scale).astype(query.dtype)
    return dq.reshape(query.shape), dk.reshape(key.shape), dv.reshape(value.shape)


class _Operands(NamedTuple):
    """Arrays, or references to them in a kernel; None where a call has none.

    Args:
      q, k, v, do: heads and head size in one axis.
      lse, delta: float32 [B, N, T]: log2 of the normaliser, +inf where a query sees no key, and the mean of dP under P.
      bounds: int32 [B, 4], unless the mask has them.
      q_ids, kv_ids: int32 [B, T], [B, S]: segment ids.
      q_ranges, kv_ranges: of blocks of queries and of keys, by `segment_ranges`.
      ranges: whichever of them a kernel reads.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    bounds: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    q_ranges: Any = None
    kv_ranges: Any = None
    ranges: Any = None


def _launch(kernel: KeyBlocks | QueryBlocks, operands: _Operands, *like: Array) -> tuple[Array, ...]:
    """Run a kernel whose outputs are like the given arrays."""
    names = tuple(name for name, operand in operands._asdict().items() if operand is not None)
    scratch = kernel.scratch(operands.q.dtype)
    in_order, structure = jax.tree.flatten(scratch, is_leaf=lambda x: x is None)

    def body(*refs: Any) -> None:
        inputs = _Operands(**dict(zip(names, refs, strict=False)))
        outputs, memory = refs[len(names) : len(names) + len(like)], refs[len(names) + len(like) :]
        kernel.body(inputs, outputs, jax.tree.unflatten(structure, memory))

    run = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        scratch_types=in_order,
        grid=(kernel.programs,),
        grid_names=("program",),
        num_threads=kernel.threads,
        thread_name="warpgroup",
        kernel_name=f"flashspec_ampere_attention_backward_{type(kernel).__name__}",
        compiler_params=compiler_params(),
    )
    with jax.enable_x64(False):  # numbers in a kernel are of 32 bits, whatever the caller's are
        return tuple(run(*(x for x in operands if x is not None)))
