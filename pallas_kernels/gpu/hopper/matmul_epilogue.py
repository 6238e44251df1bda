"""A matmul with its tail for sm_90 in Pallas Mosaic GPU: the sums stay in registers until the tail has acted on them.

    phi(x W + b), or phi(x W_g + b_g) * (x W + b); + residual                              (section 33.4)

One warpgroup of a thread block copies blocks of x and w into a ring of stages; the others multiply, 64 rows each, and
share the columns. A thread block works on one tile after another, and its copies run ahead into the next tile. The
first computing warpgroup is some steps ahead of the second: when it finishes a tile, the second one has the matrix
units for itself, and the other way round.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.matmul_epilogue_activations import ACTIVATIONS
from pallas_kernels.gpu.hopper.matmul_epilogue_config import OUT_SLOTS, TILE, MatmulEpilogueConfig, MatmulShape

MATRIX, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)


def matmul_epilogue(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    gate: Array | None = None,
    gate_bias: Array | None = None,
    residual: Array | None = None,
    config: MatmulEpilogueConfig,
) -> Array:
    """phi(x W + b), or phi(x W_g + b_g) * (x W + b) with a gate; + residual.

    Args:
      x: [M, K], bfloat16 or float16.
      w: [K, N] in the dtype of x.
      bias: [N] in any floating dtype.
      activation: phi, a name out of `ACTIVATIONS`; None for the identity.
      gate: W_g [K, N]; gate_bias: b_g [N].
      residual: [M, N], of 16 or 32 bits.
      config: launch configuration.

    Returns:
      [M, N] in the dtype of x, rounded once.

    Raises:
      ValueError: sizes or settings that the kernel does not take.
    """
    (M, K), N = x.shape, w.shape[1]
    itemsize = 0 if residual is None else residual.dtype.itemsize
    shape = MatmulShape(M, N, K, 1 if gate is None else 2, itemsize)
    reasons = config.refusals(shape)
    if reasons:
        raise ValueError("; ".join(reasons))
    whole = -N % config.block_n
    bias, gate_bias = (b if b is None or not whole else jnp.pad(b, (0, whole)) for b in (bias, gate_bias))
    operands = _Operands(x, w, bias, gate, gate_bias, residual)
    names = tuple(name for name, operand in operands._asdict().items() if operand is not None)
    kernel = _Kernel(shape, config, activation)
    clusters = {"cluster": (config.cluster_m, config.cluster_n), "cluster_names": ("m", "n")}
    run = plgpu.kernel(
        functools.partial(kernel.body, names),
        out_type=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_types=kernel.scratch(x.dtype, None if residual is None else residual.dtype),
        grid=(kernel.programs,),
        grid_names=("program",),
        **(clusters if config.cluster > 1 else {}),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="flashspec_hopper_matmul_epilogue",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    with jax.enable_x64(False):  # numbers in a kernel are of 32 bits, whatever the caller's are
        return run(*(operand for operand in operands if operand is not None))


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

    x: Any  # [stages, block_m, block_k]
    w: Any  # [stages, block_k, block_n]
    gate: Any
    out: Any  # [warpgroups, slots, 64, lanes]
    residual: Any  # [warpgroups, 64, lanes]
    full: Any
    free: Any
    residual_full: Any
    start: Any  # of the second warpgroup


class _Tile(NamedTuple):
    """A tile of the result."""

    row: Any
    column: Any


class _Kernel:
    """The program of a thread block."""

    def __init__(self, shape: MatmulShape, config: MatmulEpilogueConfig, activation: str | None) -> None:
        self.shape, self.config = shape, config
        self.activate = ACTIVATIONS[activation] if activation is not None else lambda z: z
        self.steps = -(-shape.K // config.block_k)
        self.rows, self.columns = config.tiles(shape)
        self.programs = min(config.programs // config.cluster, self.rows * self.columns)
        self.lead = min(config.lead, self.steps - 1) if config.warpgroups == 2 else 0

    def scratch(self, dtype: Any, residual_dtype: Any) -> list[Any]:
        """Shared memory and barriers of a thread block, in the order of `_Memory`."""
        c = self.config
        stage = functools.partial(_tiled, row_bytes=2 * c.lanes)
        w = stage((c.stages, c.block_k, c.block_n), dtype)
        free: Any = {"num_barriers": c.stages, "num_arrivals": c.warpgroups}
        axes = tuple(name for name, size in (("m", c.cluster_m), ("n", c.cluster_n)) if size > 1)
        has_residual = residual_dtype is not None
        return [
            stage((c.stages, c.block_m, c.block_k), dtype),
            w,
            w if self.shape.products == 2 else None,
            stage((c.warpgroups, OUT_SLOTS, TILE, c.lanes), dtype),
            _tiled((c.warpgroups, TILE, c.lanes), residual_dtype, 2 * c.lanes) if has_residual else None,
            plgpu.Barrier(num_barriers=c.stages, num_arrivals=1 + self.shape.products),
            plgpu.ClusterBarrier(collective_axes=axes, **free) if axes else plgpu.Barrier(**free),
            plgpu.Barrier(num_barriers=c.warpgroups) if has_residual else None,
            plgpu.Barrier() if self.lead else None,
        ]

    def body(self, names: tuple[str, ...], *refs: Any) -> None:
        """The kernel: operands of these names, the result, then scratch."""
        inputs = _Operands(**dict(zip(names, refs, strict=False)))
        result, memory = refs[len(names)], _Memory(*refs[-len(_Memory._fields) :])
        warpgroup = lax.axis_index("warpgroup")
        computing, copying = self.config.registers

        @pl.when(warpgroup < self.config.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(computing, action="increase")
            self._compute(inputs, result, memory, warpgroup)

        @pl.when(warpgroup == self.config.warpgroups)
        def _copy() -> None:
            plgpu.set_max_registers(copying, action="decrease")
            self._copy(inputs, memory)

    def _each_tile(self, step: Any, carry: Any) -> Any:
        """carry = step(first, tile, carry) for each tile of this thread block."""
        program = lax.axis_index("program")
        count = lax.div(self.rows * self.columns - 1 - program, self.programs) + 1
        return lax.fori_loop(
            0, count, lambda i, carry: step(i == 0, self._tile(program + i * self.programs), carry), carry
        )

    def _tile(self, index: Any) -> _Tile:
        """The tile at a place of the order: `group` tiles along the rows, then the next column."""
        c = self.config
        group = min(max(1, c.group // c.cluster_m), self.rows)
        number, rest = lax.div(index, group * self.columns), lax.rem(index, group * self.columns)
        width: Any = group
        if self.rows % group:
            width = jnp.minimum(group, self.rows - number * group)
        row, column = number * group + lax.rem(rest, width), lax.div(rest, width)
        if c.cluster_m > 1:
            row = row * c.cluster_m + lax.axis_index("m")
        if c.cluster_n > 1:
            column = column * c.cluster_n + lax.axis_index("n")
        return _Tile(row * c.block_m, column * c.block_n)

    def _copy(self, inputs: _Operands, memory: _Memory) -> None:
        """The copying warpgroup: blocks of x and w as stages become free."""
        c = self.config
        along_m, along_n = ("m" if c.cluster_m > 1 else None), ("n" if c.cluster_n > 1 else None)

        def tile_step(_: Any, tile: _Tile, count: Any) -> Any:
            rows, columns = pl.ds(tile.row, c.block_m), pl.ds(tile.column, c.block_n)

            def step(k: Any, count: Any) -> Any:
                slot, inner = lax.rem(count, c.stages), pl.ds(k * c.block_k, c.block_k)
                full = memory.full.at[slot]
                _wait_when(count >= c.stages, memory.free.at[slot])
                plgpu.copy_gmem_to_smem(inputs.x.at[rows, inner], memory.x.at[slot], full, collective_axes=along_n)
                plgpu.copy_gmem_to_smem(inputs.w.at[inner, columns], memory.w.at[slot], full, collective_axes=along_m)
                if inputs.gate is not None:
                    gate = inputs.gate.at[inner, columns]
                    plgpu.copy_gmem_to_smem(gate, memory.gate.at[slot], full, collective_axes=along_m)
                return count + 1

            return lax.fori_loop(0, self.steps, step, count)

        count = self._each_tile(tile_step, jnp.int32(0))
        # Nobody may still read, or tell this thread block so, when it ends.
        lax.fori_loop(
            jnp.maximum(count - c.stages, 0),
            count,
            lambda i, _: plgpu.barrier_wait(memory.free.at[lax.rem(i, c.stages)]),
            None,
        )

    def _compute(self, inputs: _Operands, result: Any, memory: _Memory, w: Any) -> None:
        """A computing warpgroup: 64 rows of each tile."""

        def tile_step(first: Any, tile: _Tile, slot: Any) -> Any:
            tile = tile._replace(row=tile.row + w * TILE)
            self._copy_residual(inputs, memory, tile, w, 0)
            biases = self._biases(inputs, tile, 0)
            if self.lead:
                _wait_when(first & (w == 1), memory.start)
            sums, slot = self._multiply(memory, w, first, slot)
            self._finish(inputs, result, memory, tile, w, sums, biases)
            return slot

        self._each_tile(tile_step, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _multiply(self, memory: _Memory, w: Any, first: Any, slot: Any) -> tuple[tuple[Array, ...], Any]:
        """The sums of a tile, one for each product; the contraction starts at stage `slot`."""
        c, products = self.config, self.shape.products
        rows = pl.ds(w * TILE, TILE)

        def sums(*accumulators: Any) -> Any:
            def multiply(slot: Any) -> Any:
                plgpu.barrier_wait(memory.full.at[slot])
                for accumulator, weights in zip(accumulators, (memory.w, memory.gate), strict=False):
                    plgpu.wgmma(accumulator, memory.x.at[slot, rows], weights.at[slot])
                return jnp.where(slot == c.stages - 1, 0, slot + 1)

            def step(k: Any, slot: Any) -> Any:
                if self.lead:
                    pl.when(first & (w == 0) & (k == self.lead))(lambda: plgpu.barrier_arrive(memory.start))
                following = multiply(slot)
                plgpu.wgmma_wait(products)
                plgpu.barrier_arrive(memory.free.at[_before(slot, c.stages)])
                return following

            slot_now = lax.fori_loop(1, self.steps, step, multiply(slot))
            values = tuple(accumulator[...] for accumulator in accumulators)
            plgpu.barrier_arrive(memory.free.at[_before(slot_now, c.stages)])
            return values, slot_now

        return pl.run_scoped(sums, *[plgpu.ACC((TILE, c.block_n), jnp.float32)] * products)

    def _finish(
        self,
        inputs: _Operands,
        result: Any,
        memory: _Memory,
        tile: _Tile,
        w: Any,
        sums: tuple[Array, ...],
        biases: tuple[Any, ...],
    ) -> None:
        """The tail, piece by piece, so that a piece is on its way to memory while the next one is computed."""
        lanes = self.config.lanes
        pieces = self.config.block_n // lanes
        for i in range(pieces):
            span = slice(i * lanes, (i + 1) * lanes)
            z, *gates = (_add(total[:, span], bias) for total, bias in zip(sums, biases, strict=True))
            y = self.activate(gates[0]) * z if gates else self.activate(z)
            if inputs.residual is not None:
                plgpu.barrier_wait(memory.residual_full.at[w])
                y = y + plgpu.load(memory.residual.at[w], layout=MATRIX).astype(jnp.float32)
            if i + 1 < pieces:
                biases = self._biases(inputs, tile, i + 1)
            out = memory.out.at[w, i % OUT_SLOTS]
            plgpu.wait_smem_to_gmem(min(i, OUT_SLOTS - 1), wait_read_only=True)
            out[...] = y.astype(out.dtype)
            plgpu.commit_smem()
            columns = pl.ds(tile.column + i * lanes, lanes)
            plgpu.copy_smem_to_gmem(out, result.at[pl.ds(tile.row, TILE), columns])
            if i + 1 < pieces:
                self._copy_residual(inputs, memory, tile, w, i + 1)

    def _biases(self, inputs: _Operands, tile: _Tile, i: int) -> tuple[Any, ...]:
        """The biases of piece i, read ahead of their use; None where there is none."""
        span = pl.ds(tile.column + i * self.config.lanes, self.config.lanes)
        refs = (inputs.bias, inputs.gate_bias)[: self.shape.products]
        return tuple(None if ref is None else plgpu.load(ref.at[span], layout=COLUMN, optimized=False) for ref in refs)

    def _copy_residual(self, inputs: _Operands, memory: _Memory, tile: _Tile, w: Any, i: int) -> None:
        """Start the copy of piece i of the residual."""
        if inputs.residual is not None:
            lanes = self.config.lanes
            source = inputs.residual.at[pl.ds(tile.row, TILE), pl.ds(tile.column + i * lanes, lanes)]
            plgpu.copy_gmem_to_smem(source, memory.residual.at[w], memory.residual_full.at[w])


def _add(z: Array, bias: Any) -> Array:
    """z plus its columns' bias."""
    return z if bias is None else z + lax.broadcast_in_dim(bias.astype(jnp.float32), z.shape, (1,))


def _before(slot: Any, stages: int) -> Any:
    return jnp.where(slot == 0, stages - 1, slot - 1)


def _wait_when(condition: Any, barrier: Any) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def _tiled(shape: tuple[int, ...], dtype: Any, row_bytes: int) -> Any:
    """Shared memory in the layout that wgmma and the copy engine share: rows of `row_bytes`, swizzled."""
    columns = row_bytes // jnp.dtype(dtype).itemsize
    transforms: tuple[Any, ...] = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(row_bytes))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)
