"""dK and dV on sm_90 at head sizes whose two sums do not fit the registers of one warpgroup.

A thread block has 64 keys. One of its warpgroups sums dV and the other dK, for which both compute P^T: five products
where four would do, but nothing has to be exchanged.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_backward_keys import KeyBlocks
from pallas_kernels.gpu.hopper.attention_backward_tile import KeyTile, meet
from pallas_kernels.gpu.hopper.attention_tile import TILE


class WideKeyBlocks(KeyBlocks):
    """The program of one launch: as `KeyBlocks` without dQ, but for what a compute warpgroup does."""

    def _compute(self, program: Any, w: int) -> None:
        """A compute warpgroup: dV, or dK."""
        plgpu.set_max_registers(self.config.compute_registers, action="increase")
        block = self._block(program)
        plgpu.barrier_wait(self.chip.kv_full)
        step, smem, output, scale = (
            (self._value_step, self.chip.v_smem, self.dv, 1.0),
            (self._key_step, self.chip.k_smem, self.dk, self.scores.scale),
        )[w]

        def total(acc: Any) -> Any:
            self._each(block, functools.partial(step, block, acc))
            return acc[...]

        result = pl.run_scoped(total, plgpu.ACC(smem.shape, jnp.float32))
        meet()  # Both multiply by K, and one by V.
        smem[...] = (result * scale).astype(smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, output.at[block.batch, pl.ds(block.k_start, TILE), block.kv_head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _value_step(self, block: KeyTile, dv: Any, head: Any, q_start: Any, masked: bool, i: Any) -> None:
        """dV += P^T dO."""
        slot = lax.rem(i, self.config.stages)

        def weights(s: Any) -> Any:
            plgpu.barrier_wait(self.chip.q_full.at[slot])
            plgpu.wgmma(s, self.chip.k_smem, self.chip.q_smem.at[slot].transpose((1, 0)))
            return self._weights(block, s[...], block.k_start, slot, q_start, masked)[0].astype(self.chip.k_smem.dtype)

        p = pl.run_scoped(weights, plgpu.ACC((TILE, self.config.block_q), jnp.float32))
        plgpu.barrier_arrive(self.chip.q_free.at[slot])
        plgpu.barrier_wait(self.chip.do_full.at[slot])
        plgpu.wgmma(dv, p, self.chip.do_smem.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.chip.do_free.at[slot])

    def _key_step(self, block: KeyTile, dk: Any, head: Any, q_start: Any, masked: bool, i: Any) -> None:
        """dK += dS^T Q."""
        slot = lax.rem(i, self.config.stages)
        _, ds = self._tile(block, 0, slot, q_start, masked)
        plgpu.barrier_arrive(self.chip.do_free.at[slot])
        plgpu.wgmma(dk, ds, self.chip.q_smem.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.chip.q_free.at[slot])
