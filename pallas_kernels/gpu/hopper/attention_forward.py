"""Attention forward for sm_90 in Pallas Mosaic GPU: blocks of keys folded into (m, l, u) by online softmax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_forward_config import AttentionShape, ForwardConfig
from pallas_kernels.gpu.hopper.attention_forward_tiles import Tiles
from pallas_kernels.gpu.hopper.attention_forward_warpgroups import Operands, Softmax, Warpgroups
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, SegmentIds, segment_ranges


def attention_forward(
    query: Array,
    key: Array,
    value: Array,
    bounds: Array | None = None,
    segments: SegmentIds | None = None,
    sinks: Array | None = None,
    *,
    mask: AttentionMask,
    scale: float,
    soft_cap: float | None = None,
    statistics: bool = False,
    config: ForwardConfig,
) -> tuple[Array, ...]:
    """Attention of every query over the keys that the mask shows it (eq. 33.2, by eq. 33.3 and 33.4).

    A key or a value that no query of its row sees must be finite: a weight of 0 does not hide its NaN.

    Args:
      query: [B, T, N, H] bfloat16 or float16.
      key: [B, S, K, H]; query head n reads key head n // (N / K).
      value: [B, S, K, Hv].
      bounds: int32 [B, 4], unless `mask.bounds` has them.
      segments: where `mask.segments`.
      sinks: float32 [B, N], natural-log logits of one more key with value 0.
      mask: the structure of the mask.
      scale: factor of the scores.
      soft_cap: c of c tanh(score / c).
      statistics: whether to return (u, m, l) instead of (output, lse).
      config: the launch settings.

    Returns:
      output [B, T, N, Hv] in the query's dtype and lse float32 [B, N, T in whole tiles]; or, for statistics, u float32
      [B, T, N, Hv], m and l float32 [B, N, T in whole tiles]. Rows without a key are 0, with lse and m = -inf.

    Raises:
      ValueError: sizes or settings that the kernel does not take.
    """
    shape = AttentionShape.of(query, key, value)
    reasons = config.refusals(shape, statistics)
    if reasons:
        raise ValueError("; ".join(reasons))
    tiles = Tiles(shape, mask, config)
    kernel = Warpgroups(tiles, Softmax(scale, soft_cap, config.lazy_sum), statistics)
    order = None if tiles.order is None else jnp.asarray(tiles.order)
    operands = Operands(query, key, value, bounds, sinks, order=order)
    if segments is not None:
        operands = operands._replace(
            q_ids=_whole(segments.q, config.tile_q),
            kv_ids=_whole(segments.kv, config.block_kv),
            ranges=segment_ranges(segments.q, segments.kv, config.tile_q),
        )
    rows = jax.ShapeDtypeStruct((shape.B, shape.N, tiles.q_tiles * config.tile_q), jnp.float32)
    output = jax.ShapeDtypeStruct((*query.shape[:3], shape.Hv), jnp.float32 if statistics else query.dtype)
    params = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
    if config.query_buffers > 1:  # they need what Pallas sets aside for reductions over warps, of which there are none
        params = dataclasses.replace(params, reduction_scratch_bytes=0)
    names = tuple(name for name, operand in operands._asdict().items() if operand is not None)
    run = plgpu.kernel(
        functools.partial(kernel.body, names),
        out_type=[output, rows, rows] if statistics else [output, rows],
        scratch_types=kernel.scratch(query.dtype),
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="flashspec_hopper_attention_forward",
        compiler_params=params,
    )
    with jax.enable_x64(False):  # numbers in a kernel are of 32 bits, whatever the caller's are
        return tuple(run(*(operand for operand in operands if operand is not None)))


def _whole(ids: Array, size: int) -> Array:
    """[B, n] with the last id repeated up to a multiple of `size`."""
    return jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge")
