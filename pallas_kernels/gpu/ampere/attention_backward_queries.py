"""dQ on mma, one tile of queries to a thread block: the second kernel of the deterministic backward.

dQ += dS K (eq. 33.8) over the keys that the tile sees, with dS in registers.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.ampere.attention_backward_config import BackwardConfig
from pallas_kernels.gpu.ampere.attention_queries import QueryTiles
from pallas_kernels.gpu.ampere.attention_tile import MATRIX, ROW, add_product, full, scores, tiled
from pallas_kernels.gpu.hopper.attention_backward_tile import Scores
from pallas_kernels.gpu.memory import store


class QueryBlocks(QueryTiles):
    """The program of a thread block, from static facts."""

    threads = 1

    def __init__(self, facts: Scores, config: BackwardConfig) -> None:
        super().__init__(facts.shape, facts.mask, config, stages=2)  # keys are read again after their values
        self.facts = facts

    def scratch(self, dtype: Any) -> list[Any]:
        """Shared memory and barriers of a thread block."""
        s, rows = self.shape, self.config.tile_q
        barrier = plgpu.Barrier(num_arrivals=2) if self.config.bulk else None
        return [tiled((rows, s.H), dtype), tiled((rows, s.Hv), dtype), self.ring_scratch(dtype), barrier]

    def body(self, operands: Any, outputs: tuple[Any, ...], scratch: list[Any]) -> None:
        """The kernel; dQ is its output."""
        (dq_out,) = outputs
        q, do, self.ring, q_full = scratch
        self.gmem = operands._replace(ranges=operands.q_ranges)
        s, c = self.shape, self.config
        tile = self.tile(lax.axis_index("program"))
        self.copies.start(self.gmem.q.at[self.queries(tile, s.H)], q, q_full)
        self.copies.start(self.gmem.do.at[self.queries(tile, s.Hv)], do, q_full)
        self.start(tile)
        rows = pl.ds(tile.q_start, c.tile_q)
        lse, delta = (
            plgpu.load(x.at[tile.batch, tile.head, rows], layout=ROW, optimized=False)
            for x in (self.gmem.lse, self.gmem.delta)
        )
        if c.bulk:
            self.copies.wait(q_full)
        q_ids = self.query_ids(tile)

        def visit(dq: Any, k: Any, values: Any, k_start: Any, masked: bool) -> Any:
            p, slope = self.facts.weights(scores(q, k), lse, 0)
            if masked:
                p = jnp.where(self.visible(tile, q_ids, k_start), p, 0.0)
            p = p if slope is None else p * slope
            ds = p * (scores(do, values()) - lax.broadcast_in_dim(delta, p.shape, [0]))
            return add_product(dq, ds, k)

        dq = self.fold(tile, visit, full((c.tile_q, s.H), 0, MATRIX))
        store(dq_out.at[self.queries(tile, s.H)], (dq * self.facts.scale).astype(dq_out.dtype))
