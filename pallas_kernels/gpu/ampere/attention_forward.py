"""Attention forward in Pallas Mosaic GPU on mma: blocks of keys folded into (m, l, u) by online softmax.

A thread block of four warps owns a tile of queries. Its scores and sums stay in registers; weights become the left
operand of the second product where they are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.ampere.attention_forward_config import AttentionShape, ForwardConfig
from pallas_kernels.gpu.ampere.attention_queries import QueryTiles, Tile
from pallas_kernels.gpu.ampere.attention_tile import (
    MATRIX,
    ROW,
    add_product,
    compiler_params,
    flat,
    full,
    scores,
    tiled,
    whole,
)
from pallas_kernels.gpu.hopper.attention_forward_warpgroups import Operands
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask, SegmentIds, segment_ranges
from pallas_kernels.gpu.hopper.attention_tile import LOG2E, index_of, tanh
from pallas_kernels.gpu.memory import store

LN2 = 1 / LOG2E


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
      query: [B, T, N, H] bfloat16 or float16; T is a multiple of `config.tile_q`.
      key: [B, S, K, H]; query head n reads key head n // (N / K); S is a multiple of `config.block_kv`.
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
      output [B, T, N, Hv] in the query's dtype and lse float32 [B, N, T]; or, for statistics, u float32 [B, T, N, Hv],
      m and l float32 [B, N, T]. Rows without a key are 0, with lse and m = -inf.

    Raises:
      ValueError: sizes or settings that the kernel does not take.
    """
    shape = AttentionShape.of(query, key, value)
    reasons = config.refusals(shape, config.shared_memory(shape))
    if reasons:
        raise ValueError("; ".join(reasons))
    kernel = _Forward(shape, mask, scale, soft_cap, statistics, config)
    operands = Operands(flat(query), flat(key), flat(value), bounds, sinks)
    if segments is not None:
        ids = SegmentIds(whole(segments.q, shape.T), whole(segments.kv, shape.S))
        operands = operands._replace(q_ids=ids.q, kv_ids=ids.kv, ranges=segment_ranges(*ids, config.tile_q))
    rows = jax.ShapeDtypeStruct((shape.B, shape.N, shape.T), jnp.float32)
    output = jax.ShapeDtypeStruct((shape.B, shape.T, shape.N * shape.Hv), jnp.float32 if statistics else query.dtype)
    names = tuple(name for name, operand in operands._asdict().items() if operand is not None)
    run = plgpu.kernel(
        functools.partial(kernel.body, names),
        out_type=[output, rows, rows] if statistics else [output, rows],
        scratch_types=kernel.scratch(query.dtype),
        grid=(kernel.programs,),
        grid_names=("program",),
        kernel_name="flashspec_ampere_attention_forward",
        compiler_params=compiler_params(),
    )
    with jax.enable_x64(False):  # numbers in a kernel are of 32 bits, whatever the caller's are
        u, *statistics_or_lse = run(*(operand for operand in operands if operand is not None))
    return u.reshape(shape.B, shape.T, shape.N, shape.Hv), *statistics_or_lse


class _Forward(QueryTiles):
    """The program of a thread block, from static facts."""

    def __init__(
        self,
        shape: AttentionShape,
        mask: AttentionMask,
        scale: float,
        soft_cap: float | None,
        statistics: bool,
        config: ForwardConfig,
    ) -> None:
        super().__init__(shape, mask, config, config.stages)
        self.scale, self.soft_cap, self.statistics = scale, soft_cap, statistics

    def scratch(self, dtype: Any) -> list[Any]:
        """Shared memory and barriers of a thread block."""
        return [
            tiled((self.config.tile_q, self.shape.H), dtype),
            self.ring_scratch(dtype),
            plgpu.Barrier() if self.config.bulk else None,
        ]

    def body(self, names: tuple[str, ...], *refs: Any) -> None:
        """The kernel: operands of these names, outputs, then scratch."""
        self.gmem = Operands(**dict(zip(names, refs, strict=False)))
        *outputs, q, self.ring, q_full = refs[len(names) :]
        tile = self.tile(lax.axis_index("program"))
        self.copies.start(self.gmem.q.at[self.queries(tile, self.shape.H)], q, q_full)
        self.start(tile)
        if self.config.bulk:
            self.copies.wait(q_full)
        q_ids = self.query_ids(tile)

        def visit(carry: tuple[Any, Any, Any], k: Any, values: Any, k_start: Any, masked: bool) -> Any:
            m, l, u = carry
            visible = self.visible(tile, q_ids, k_start) if masked else None
            m, l, alpha, weights = self._softmax(scores(q, k), visible, m, l)
            v = values()
            return m, l, add_product(u * lax.broadcast_in_dim(alpha, u.shape, [0]), weights, v)

        rows = (self.config.tile_q,)
        empty = (full(rows, -jnp.inf, ROW), full(rows, 0, ROW), full((*rows, self.shape.Hv), 0, MATRIX))
        self._store(tile, outputs, *self.fold(tile, visit, empty))

    def _softmax(self, raw: Any, visible: Any, m: Any, l: Any) -> tuple[Any, Any, Any, Any]:
        """New m and l, the factor for what was summed before, and the weights (eq. 33.3 and 33.4, in base 2)."""
        scale = self.scale * LOG2E
        if self.soft_cap is not None:
            raw, scale = tanh(raw * (self.scale / self.soft_cap)), self.soft_cap * LOG2E
        if scale < 0:  # the maximum of the products is not that of the scores
            raw, scale = raw * scale, 1.0
        if visible is not None:
            raw = jnp.where(visible, raw, -jnp.inf)
        highest = jnp.maximum(m, raw.max(axis=1) * scale)
        shift = highest if visible is None else jnp.where(highest == -jnp.inf, 0.0, highest)
        weights = jnp.exp2(raw * scale - lax.broadcast_in_dim(shift, raw.shape, [0]))
        alpha = jnp.exp2(m - shift)
        return highest, l * alpha + weights.sum(axis=1), alpha, weights

    def _store(self, tile: Tile, outputs: Any, m: Any, l: Any, u: Any) -> None:
        """Finalise the rows and write them."""
        c, s = self.config, self.shape
        if self.mask.bounds is None or self.mask.bounds.q_length < s.T:
            real = index_of(tile.q_start, c.tile_q, ROW) < tile.row.q_length
            m, l = jnp.where(real, m, -jnp.inf), jnp.where(real, l, 0.0)
            u = jnp.where(lax.broadcast_in_dim(real, u.shape, [0]), u, 0.0)
        if self.gmem.sinks is not None:
            sink = self.gmem.sinks[tile.batch, tile.head] * LOG2E
            total = jnp.maximum(m, sink)
            alpha = jnp.exp2(m - total)
            m, l, u = total, l * alpha + jnp.exp2(sink - total), u * lax.broadcast_in_dim(alpha, u.shape, [0])
        rows = [m * LN2, l]
        if not self.statistics:
            rows = [m * LN2 + jnp.log2(l) * LN2]
            u = u * lax.broadcast_in_dim(1 / jnp.where(l == 0, 1.0, l), u.shape, [0])
        output, *row_outputs = outputs
        store(output.at[self.queries(tile, s.Hv)], u.astype(output.dtype))
        for ref, row in zip(row_outputs, rows, strict=True):
            store(ref.at[tile.batch, tile.head, pl.ds(tile.q_start, c.tile_q)], row)
