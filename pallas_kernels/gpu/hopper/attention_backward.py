"""Attention backward for sm_90 in Pallas Mosaic GPU: dQ, dK and dV from the saved log-normaliser (eq. 33.6 to 33.8).

By default one kernel over blocks of keys computes all three, dQ by additions in device memory. The deterministic form
has two kernels, whose sums run in a fixed order: it recomputes scores and their gradient once more, and its results are
bit-equal from run to run.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_backward_config import (
    BLOCK_Q,
    BackwardConfig,
    BackwardShape,
    config_refusals,
    is_fused,
    refusals,
)
from pallas_kernels.gpu.hopper.attention_backward_keys import KeyBlocks
from pallas_kernels.gpu.hopper.attention_backward_queries import QueryBlocks
from pallas_kernels.gpu.hopper.attention_backward_sums import rows_of
from pallas_kernels.gpu.hopper.attention_backward_tile import WARPGROUPS, Operands, Scores
from pallas_kernels.gpu.hopper.attention_backward_wide import WideKeyBlocks
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, SegmentIds, segment_ranges
from pallas_kernels.gpu.hopper.attention_tile import LOG2E
from pallas_kernels.launch import round_up


def attention_backward(
    query: Array,
    key: Array,
    value: Array,
    output_gradient: Array,
    lse: Array,
    delta: Array,
    bounds: Array | None = None,
    segments: SegmentIds | None = None,
    dq: Array | None = None,
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
      query: [B, T, N, H] bfloat16 or float16; T and S are multiples of 8.
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      output_gradient: [B, T, N, Hv].
      lse: float32 [B, N, T or more], the natural log-normaliser; -inf where a query sees no key.
      delta: float32 [B, N, T or more], the sum over Hv of output times its gradient, less the gradient of the
        log-normaliser.
      bounds: int32 [B, 4], unless `mask.bounds` has them.
      segments: where `mask.segments`.
      dq: zeros by `delta_and_zeros`, to which dQ is added where one kernel computes all gradients; made here if None.
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
    reasons = refusals(shape, itemsize=query.dtype.itemsize) + config_refusals(
        shape, config, deterministic=deterministic
    )
    if reasons:
        raise ValueError("; ".join(reasons))
    fused = is_fused(shape, deterministic=deterministic)
    if dq is not None and (not fused or (dq.shape, dq.dtype) != (shape.dq_tiles, jnp.float32)):
        expected = f"float32 {list(shape.dq_tiles)}" if fused else "None where dQ has a kernel of its own"
        raise ValueError(f"`dq`: expected {expected}, got {dq.dtype} {list(dq.shape)}")
    if 0 in (shape.B, shape.T, shape.S):
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    lse, delta = _padded_rows(shape, lse, delta)
    operands = Operands(query, key, value, output_gradient, lse, delta, bounds)
    if segments is not None:
        operands = operands._replace(**_segment_operands(shape, segments))
    scores = Scores(shape, mask, scale, soft_cap)
    if not fused:
        (dq,) = _launch(QueryBlocks(scores, config), operands, query)
        key_blocks = WideKeyBlocks if shape.wide else KeyBlocks
        dk, dv = _launch(key_blocks(scores, config), operands, key, value)
        return dq, dk, dv
    total = jax.new_ref(jnp.zeros(shape.dq_tiles, jnp.float32) if dq is None else dq)
    dk, dv = _launch(KeyBlocks(scores, config, total), operands, key, value)
    return rows_of(jax.freeze(total), shape.T, scale=scale, dtype=query.dtype), dk, dv


def _launch(kernel: KeyBlocks | QueryBlocks, operands: Operands, *like: Array) -> tuple[Array, ...]:
    """Run a kernel whose outputs are like the given arrays."""
    names = tuple(name for name, operand in operands._asdict().items() if operand is not None)

    def body(*refs: Any, **scratch: Any) -> None:
        inputs = Operands(**dict(zip(names, refs, strict=False)))
        kernel.body(inputs, refs[len(names) :], scratch)

    run = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        scratch_types=kernel.scratch(operands.query.dtype),
        grid=(kernel.programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=f"flashspec_hopper_attention_backward_{type(kernel).__name__}",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    with jax.enable_x64(False):  # indices within a kernel are 32 bits wide, whatever the caller's numbers are
        return tuple(run(*(x for x in operands if x is not None)))


def _padded_rows(shape: BackwardShape, lse: Array, delta: Array) -> tuple[Array, Array]:
    """lse in base 2 and delta, in whole blocks; +inf in lse makes every weight of a row 0 without a mask."""
    rows = ((0, 0), (0, 0), (0, round_up(shape.T, BLOCK_Q) - shape.T))
    lse, delta = lse[:, :, : shape.T], delta[:, :, : shape.T]
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    return jnp.pad(lse, rows, constant_values=jnp.inf), jnp.pad(delta, rows)


def _segment_operands(shape: BackwardShape, ids: SegmentIds) -> dict[str, Array]:
    """Ids in whole blocks, and what blocks of either side may visit of the other."""
    padded = {}
    for name, x, block in (("q_ids", ids.q, BLOCK_Q), ("kv_ids", ids.kv, BLOCK_Q)):
        padded[name] = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)))
    return {
        **padded,
        "q_ranges": segment_ranges(ids.q, ids.kv, BLOCK_Q),
        "kv_ranges": segment_ranges(ids.kv, ids.q, shape.block_kv),
    }
