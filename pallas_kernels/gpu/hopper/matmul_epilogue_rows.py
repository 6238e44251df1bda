"""The matmul with its tail for few rows on sm_90: the weights are read once, at the speed of memory.

Weights are the 64-row side of the matrix unit's products and the rows of x its narrow side: so x takes little shared
memory, and nearly all of that holds weights on their way. One warpgroup copies blocks ahead of their use, each of the
others multiplies 64 outputs, and a thread block has its outputs to itself.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.matmul_epilogue_activations import ACTIVATIONS
from pallas_kernels.gpu.hopper.matmul_epilogue_config import (
    LANES,
    TILE,
    FewRowsConfig,
    MatmulShape,
    weights_and_columns,
)
from pallas_kernels.gpu.memory import store
from pallas_kernels.launch import round_up

TURNED, OUTPUTS = plgpu.Layout.WGMMA_TRANSPOSED, plgpu.Layout.WGMMA.reduce(1)


def matmul_epilogue_rows(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    gate: Array | None = None,
    gate_bias: Array | None = None,
    residual: Array | None = None,
    config: FewRowsConfig,
) -> Array:
    """phi(x W + b), or phi(x W_g + b_g) * (x W + b) with a gate; + residual, for up to 64 rows.

    Args and result are those of `matmul_epilogue`.

    Raises:
      ValueError: sizes or settings that the kernel does not take.
    """
    (M, K), N, paired = x.shape, w.shape[-1], w.ndim == 3
    products, itemsize = 2 if paired or gate is not None else 1, 0 if residual is None else residual.dtype.itemsize
    shape = MatmulShape(M, N, K, products, itemsize)
    reasons = config.refusals(shape)
    if reasons:
        raise ValueError("; ".join(reasons))
    rows = round_up(M, 8)
    if rows > M and residual is not None:
        residual = jnp.pad(residual, ((0, rows - M), (0, 0)))
    operands = {"x": x, "w": w.reshape(K, -1), "bias": bias, "gate": gate, "gate_bias": gate_bias, "residual": residual}
    given = {name: operand for name, operand in operands.items() if operand is not None}
    activate = None if activation is None else ACTIVATIONS[activation]

    def body(*refs: Any) -> None:
        inputs = _Operands(**dict(zip(given, refs, strict=False)))
        _Program(shape, config, activate, inputs, refs[len(given)], _Memory(*refs[len(given) + 1 :])).run()

    stage = functools.partial(_tiled, dtype=x.dtype)
    weights = stage((config.stages, LANES, config.block_n))
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, N), x.dtype),
        scratch_types=[
            stage((config.stages, rows, LANES)),
            weights,
            weights if products == 2 else None,
            plgpu.Barrier(num_barriers=config.stages, num_arrivals=1 + shape.products),
            plgpu.Barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
        ],
        grid=(N // config.block_n,),
        grid_names=("program",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="flashspec_hopper_matmul_epilogue_rows",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    with jax.enable_x64(False):  # numbers in a kernel are of 32 bits, whatever the caller's are
        return run(*given.values())[:M]


class _Operands(NamedTuple):
    """Arrays in device memory; those that a call does not have are None."""

    x: Any
    w: Any
    bias: Any = None
    gate: Any = None
    gate_bias: Any = None
    residual: Any = None


class _Memory(NamedTuple):
    """Shared memory, and its barriers: full when copies have arrived, free when all their readers are done."""

    x: Any  # [stages, padded rows, 64]
    w: Any  # [stages, 64, block_n]
    gate: Any
    full: Any
    free: Any


class _Program:
    """The program of a thread block."""

    def __init__(
        self, shape: MatmulShape, config: FewRowsConfig, activate: Any, inputs: _Operands, result: Any, memory: _Memory
    ) -> None:
        self.shape, self.config, self.activate = shape, config, activate
        self.inputs, self.result, self.memory = inputs, result, memory
        self.steps = shape.K // LANES
        self.rows = round_up(shape.M, 8)
        self.column = lax.axis_index("program") * config.block_n

    def run(self) -> None:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == self.config.warpgroups)(self._copy)
        pl.when(warpgroup < self.config.warpgroups)(lambda: self._multiply(warpgroup))

    def _copy(self) -> None:
        """The copying warpgroup: blocks of the weights and of x as stages become free."""
        c, inputs, memory = self.config, self.inputs, self.memory
        sources = weights_and_columns(inputs.w, inputs.gate, self.shape)
        rows = pl.ds(self.column * 0, self.rows)  # past the last one come zeros; jax refuses that of a start it knows

        @pl.loop(0, self.steps)
        def _step(k: Array) -> None:
            slot, inner = lax.rem(k, c.stages), pl.ds(k * LANES, LANES)
            full = memory.full.at[slot]
            pl.when(k >= c.stages)(lambda: plgpu.barrier_wait(memory.free.at[slot]))
            for (source, first), stages in zip(sources, (memory.w, memory.gate), strict=False):
                columns = pl.ds(pl.multiple_of(first + self.column, c.block_n), c.block_n)
                plgpu.copy_gmem_to_smem(source.at[inner, columns], stages.at[slot], full)
            plgpu.copy_gmem_to_smem(inputs.x.at[rows, inner], memory.x.at[slot], full)

        @pl.loop(max(self.steps - c.stages, 0), self.steps)
        def _drain(k: Array) -> None:
            plgpu.barrier_wait(memory.free.at[lax.rem(k, c.stages)])

    def _multiply(self, warpgroup: Array) -> None:
        """A computing warpgroup: 64 outputs of all rows."""
        c, memory, products = self.config, self.memory, self.shape.products
        mine = pl.ds(pl.multiple_of(warpgroup * TILE, TILE), TILE)
        outputs = pl.ds(pl.multiple_of(self.column + warpgroup * TILE, TILE), TILE)
        biases = [
            None if bias is None else plgpu.load(bias.at[outputs], layout=OUTPUTS, optimized=False)
            for bias in (self.inputs.bias, self.inputs.gate_bias)[:products]
        ]

        def sums(*accumulators: Any) -> tuple[Array, ...]:
            @pl.loop(0, self.steps)
            def _step(k: Array) -> None:
                slot = lax.rem(k, c.stages)
                plgpu.barrier_wait(memory.full.at[slot])
                for accumulator, weights in zip(accumulators, (memory.w, memory.gate), strict=False):
                    block = weights.at[slot, :, mine]
                    plgpu.wgmma(accumulator, block.transpose((1, 0)), memory.x.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(products)
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(memory.free.at[lax.rem(k - 1, c.stages)]))

            return tuple(accumulator[...] for accumulator in accumulators)

        totals = pl.run_scoped(sums, *[plgpu.ACC((TILE, self.rows), jnp.float32)] * products)
        plgpu.barrier_arrive(memory.free.at[(self.steps - 1) % c.stages])
        self._finish(totals, biases, outputs)

    def _finish(self, totals: tuple[Array, ...], biases: list[Any], outputs: Any) -> None:
        """The tail of 64 outputs; the activation takes half of the last of the sums."""

        def biased(total: Array, bias: Any, factor: float) -> Array:
            z = total if factor == 1 else factor * total
            return z if bias is None else z + lax.broadcast_in_dim(factor * bias.astype(jnp.float32), z.shape, (0,))

        zs = [
            biased(total, bias, 0.5 if self.activate and total is totals[-1] else 1.0)
            for total, bias in zip(totals, biases, strict=True)
        ]
        y = zs[-1] if self.activate is None else self.activate(zs[-1])
        y = y if len(zs) == 1 else y * zs[0]
        y = plgpu.layout_cast(y, TURNED)
        if self.inputs.residual is not None:
            source = self.inputs.residual.at[:, outputs].transpose((1, 0))
            y = y + plgpu.load(source, layout=TURNED, optimized=False).astype(jnp.float32)
        store(self.result.at[:, outputs].transpose((1, 0)), y.astype(self.result.dtype))


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that wgmma and the copy engine share: rows of 128 bytes, swizzled."""
    transforms: tuple[Any, ...] = (plgpu.TilingTransform((8, LANES)), plgpu.SwizzleTransform(2 * LANES))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)
