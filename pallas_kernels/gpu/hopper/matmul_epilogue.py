"""A matmul with its tail for sm_90 in Pallas Mosaic GPU: the sums stay in registers until the tail has acted on them.

    phi(x W + b), or phi(x W_g + b_g) * (x W + b); + residual                              (section 33.4)

One warp of a thread block copies blocks of x and w into a ring of stages; two warpgroups multiply, 64 rows each, and
share the columns. A thread block works on one tile after another, and its copies run ahead into the next tile. While
one computing warpgroup finishes a tile, the other has the matrix units for itself as long as the ring lasts: that is
why the tail is kept short, and biases are made ready for it while products run. Tiles that would leave most thread
blocks without work at the end are cut into narrow ones.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.matmul_epilogue_activations import ACTIVATIONS, Activation
from pallas_kernels.gpu.hopper.matmul_epilogue_config import (
    BLOCK_M,
    LANES,
    OUT_SLOTS,
    REGISTERS,
    TILE,
    WARPGROUPS,
    MatmulEpilogueConfig,
    MatmulShape,
    weights_and_columns,
)

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
      w: [K, N] in the dtype of x; or [K, 2, N], of which the first is W_g and the second W, and no `gate`.
      bias: [N] in any floating dtype.
      activation: phi, a name out of `ACTIVATIONS`; None for the identity.
      gate: W_g [K, N]; gate_bias: b_g [N].
      residual: [M, N], of 16 or 32 bits.
      config: launch configuration.

    Returns:
      [M, N] in the dtype of x, rounded once; activations are as exact as `matmul_epilogue_activations` says.

    Raises:
      ValueError: sizes or settings that the kernel does not take.
    """
    (M, K), N, paired = x.shape, w.shape[-1], w.ndim == 3
    itemsize = 0 if residual is None else residual.dtype.itemsize
    shape = MatmulShape(M, N, K, 2 if paired or gate is not None else 1, itemsize)
    reasons = config.refusals(shape)
    if reasons:
        raise ValueError("; ".join(reasons))
    bias, gate_bias = (_whole_tiles(b, config.block_n) for b in (bias, gate_bias))
    operands = _Operands(x, w.reshape(K, -1), bias, gate, gate_bias, residual)
    names = tuple(name for name, operand in operands._asdict().items() if operand is not None)
    kernel = _Kernel(shape, config, activation)
    run = plgpu.kernel(
        functools.partial(kernel.body, names),
        out_type=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_types=kernel.scratch(operands),
        grid=(kernel.deal.programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
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

    @property
    def biases(self) -> tuple[Any, Any]:
        return self.bias, self.gate_bias


class _Memory(NamedTuple):
    """Shared memory, and its barriers: full when copies have arrived, free when all their readers are done."""

    x: Any  # [stages, 128, 64]
    w: Any  # [stages, 64, block_n], and where tiles are cut the same as [stages, cut, 64, width]
    gate: Any
    out: Any  # [warpgroups, slots, 64, 64]
    residual: Any  # [warpgroups, 64, 64]
    bias: Any  # [warpgroups, block_n], in float32
    gate_bias: Any
    full: Any
    free: Any
    residual_full: Any


class _Tile(NamedTuple):
    """A tile of the result."""

    row: Any
    column: Any
    width: int  # columns


class _Kernel:
    """The program of a thread block."""

    def __init__(self, shape: MatmulShape, config: MatmulEpilogueConfig, activation: str | None) -> None:
        self.shape, self.config = shape, config
        self.activate: Activation | None = None if activation is None else ACTIVATIONS[activation]
        self.steps = shape.K // LANES
        self.deal = config.deal(shape)

    def scratch(self, operands: "_Operands") -> list[Any]:
        """Shared memory and barriers of a thread block, in the order of `_Memory`."""
        c, dtype, residual = self.config, operands.x.dtype, operands.residual
        w: Any = _tiled((c.stages, LANES, c.block_n), dtype)
        if self.deal.cut > 1:
            w = plgpu.RefUnion(w, _tiled((c.stages, self.deal.cut, LANES, c.block_n // self.deal.cut), dtype))
        biases = [b if b is None else plgpu.SMEM((WARPGROUPS, c.block_n), jnp.float32) for b in operands.biases]
        return [
            _tiled((c.stages, BLOCK_M, LANES), dtype),
            w,
            w if self.shape.products == 2 else None,
            _tiled((WARPGROUPS, OUT_SLOTS, TILE, LANES), dtype),
            None if residual is None else _tiled((WARPGROUPS, TILE, LANES), residual.dtype),
            *biases,
            plgpu.Barrier(num_barriers=c.stages, num_arrivals=1 + self.shape.products),
            plgpu.Barrier(num_barriers=c.stages, num_arrivals=WARPGROUPS),
            None if residual is None else plgpu.Barrier(num_barriers=WARPGROUPS),
        ]

    def body(self, names: tuple[str, ...], *refs: Any) -> None:
        """The kernel: operands of these names, the result, then scratch."""
        inputs = _Operands(**dict(zip(names, refs, strict=False)))
        result, memory = refs[len(names)], _Memory(*refs[-len(_Memory._fields) :])
        warpgroup = lax.axis_index("warpgroup")
        computing, copying = REGISTERS

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(computing, action="increase")
            self._compute(inputs, result, memory, warpgroup)

        @pl.when(warpgroup == WARPGROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(copying, action="decrease")
            # Of one warp: the other three would wait and arrive at every barrier of the ring for nothing.
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: self._copy(inputs, memory)))

    def _each_tile(self, step: Any, carry: Any) -> Any:
        """carry = step(tile, carry) for each tile of this thread block."""
        program, deal = lax.axis_index("program"), self.deal
        whole = deal.whole if deal.cut > 1 else deal.whole + (program < deal.rest).astype(jnp.int32)
        carry = lax.fori_loop(0, whole, lambda i, carry: step(self._tile(program + i * deal.programs), carry), carry)
        if deal.cut == 1:
            return carry

        def narrow(_: Any, carry: Any) -> Any:
            tile = self._tile(deal.whole * deal.programs + lax.div(program, deal.cut))
            width = tile.width // deal.cut
            return step(_Tile(tile.row, tile.column + lax.rem(program, deal.cut) * width, width), carry)

        return lax.fori_loop(0, (program < deal.rest * deal.cut).astype(jnp.int32), narrow, carry)

    def _tile(self, index: Any) -> _Tile:
        """The tile at a place of the order: `group` tiles along the rows, then the next column."""
        c, (rows, columns) = self.config, self.config.tiles(self.shape)
        group = min(c.group, rows)
        number, rest = lax.div(index, group * columns), lax.rem(index, group * columns)
        height: Any = group
        if rows % group:
            height = jnp.minimum(group, rows - number * group)
        row, column = number * group + lax.rem(rest, height), lax.div(rest, height)
        return _Tile(row * BLOCK_M, column * c.block_n, c.block_n)

    def _copy(self, inputs: _Operands, memory: _Memory) -> None:
        """The copying warp: blocks of x and w as stages become free."""
        stages = self.config.stages
        sources = weights_and_columns(inputs.w, inputs.gate, self.shape)

        def tile_step(tile: _Tile, count: Any) -> Any:
            rows = pl.ds(tile.row, BLOCK_M)

            def step(k: Any, count: Any) -> Any:
                slot, inner = lax.rem(count, stages), pl.ds(k * LANES, LANES)
                full = memory.full.at[slot]
                _wait_when(count >= stages, memory.free.at[slot])
                plgpu.copy_gmem_to_smem(inputs.x.at[rows, inner], memory.x.at[slot], full)
                for (weights, first), block in zip(sources, self._blocks(memory, tile, slot), strict=True):
                    columns = pl.ds(first + tile.column, tile.width)
                    plgpu.copy_gmem_to_smem(weights.at[inner, columns], block, full)
                return count + 1

            return lax.fori_loop(0, self.steps, step, count)

        count = self._each_tile(tile_step, jnp.int32(0))
        # Nobody may still read, or tell this thread block so, when it ends.
        lax.fori_loop(
            jnp.maximum(count - stages, 0),
            count,
            lambda i, _: plgpu.barrier_wait(memory.free.at[lax.rem(i, stages)]),
            None,
        )

    def _blocks(self, memory: _Memory, tile: _Tile, slot: Any) -> list[Any]:
        """Where the blocks of w and of the gate lie in a stage."""
        stages = (memory.w, memory.gate)[: self.shape.products]
        if self.deal.cut == 1:
            return [stage.at[slot] for stage in stages]
        wide, narrow = ([stage[i] for stage in stages] for i in range(2))
        if tile.width == self.config.block_n:
            return [stage.at[slot] for stage in wide]
        return [stage.at[slot, 0] for stage in narrow]

    def _compute(self, inputs: _Operands, result: Any, memory: _Memory, w: Any) -> None:
        """A computing warpgroup: 64 rows of each tile."""

        def tile_step(tile: _Tile, slot: Any) -> Any:
            tile = tile._replace(row=tile.row + w * TILE)
            self._copy_residual(inputs, memory, tile, w, 0)
            biases = self._load_biases(inputs, tile)
            sums, slot = self._multiply(memory, w, tile, slot, lambda: self._keep_biases(memory, tile, w, biases))
            self._finish(inputs, result, memory, tile, w, sums)
            return slot

        self._each_tile(tile_step, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _multiply(
        self, memory: _Memory, w: Any, tile: _Tile, slot: Any, meanwhile: Any
    ) -> tuple[tuple[Array, ...], Any]:
        """The sums of a tile, one for each product; the contraction starts at stage `slot`.

        `meanwhile` is done when the first products are on their way.
        """
        c, products = self.config, self.shape.products
        rows = pl.ds(w * TILE, TILE)

        def sums(*accumulators: Any) -> Any:
            def multiply(slot: Any) -> Any:
                plgpu.barrier_wait(memory.full.at[slot])
                for accumulator, weights in zip(accumulators, self._blocks(memory, tile, slot), strict=True):
                    plgpu.wgmma(accumulator, memory.x.at[slot, rows], weights)
                return jnp.where(slot == c.stages - 1, 0, slot + 1)

            def step(_: Any, slot: Any) -> Any:
                following = multiply(slot)
                plgpu.wgmma_wait(products)
                plgpu.barrier_arrive(memory.free.at[_before(slot, c.stages)])
                return following

            second = multiply(slot)
            meanwhile()
            slot_now = lax.fori_loop(1, self.steps, step, second)
            values = tuple(accumulator[...] for accumulator in accumulators)
            plgpu.barrier_arrive(memory.free.at[_before(slot_now, c.stages)])
            return values, slot_now

        return pl.run_scoped(sums, *[plgpu.ACC((TILE, tile.width), jnp.float32)] * products)

    def _finish(
        self, inputs: _Operands, result: Any, memory: _Memory, tile: _Tile, w: Any, sums: tuple[Array, ...]
    ) -> None:
        """The tail, piece by piece, so that a piece is on its way to memory while the next one is computed."""
        spans = [slice(start, start + LANES) for start in range(0, tile.width, LANES)]
        # Two at a time meet half as many barriers; but the last ones are not to be all there is.
        together = 2 if inputs.residual is None and len(spans) == 4 else 1
        for i in range(0, len(spans), together):
            ys = [self._tail(memory, w, sums, span) for span in spans[i : i + together]]
            if inputs.residual is not None:
                plgpu.barrier_wait(memory.residual_full.at[w])
                ys = [y + plgpu.load(memory.residual.at[w], layout=MATRIX).astype(jnp.float32) for y in ys]
            places = [memory.out.at[w, j % OUT_SLOTS] for j in range(i, i + together)]
            plgpu.wait_smem_to_gmem(min(i, OUT_SLOTS - together), wait_read_only=True)
            for place, y in zip(places, ys, strict=True):
                place[...] = y.astype(place.dtype)
            plgpu.commit_smem()
            for j, place in enumerate(places, i):
                columns = pl.ds(tile.column + j * LANES, LANES)
                plgpu.copy_smem_to_gmem(place, result.at[pl.ds(tile.row, TILE), columns])
            if i + together < len(spans):
                self._copy_residual(inputs, memory, tile, w, i + together)

    def _tail(self, memory: _Memory, w: Any, sums: tuple[Array, ...], span: slice) -> Array:
        """Biases, activation and gate of a piece; the activation takes half of the last of the sums."""
        zs = [
            _biased(total[:, span], biases, w, span, self._factor(i))
            for i, (total, biases) in enumerate(zip(sums, (memory.bias, memory.gate_bias), strict=False))
        ]
        last = zs[-1] if self.activate is None else self.activate(zs[-1])
        return last if len(zs) == 1 else last * zs[0]

    def _factor(self, product: int) -> float:
        """What the sums of a product are multiplied by: an activation acts on half of the last ones."""
        return 0.5 if self.activate and product == self.shape.products - 1 else 1.0

    def _load_biases(self, inputs: _Operands, tile: _Tile) -> list[Array | None]:
        """The biases of a tile, on their way to registers."""
        per_thread = tile.width // 128
        layout = plgpu.Layout.WG_STRIDED((tile.width,), vec_size=per_thread) if tile.width % 128 == 0 else COLUMN
        columns = pl.ds(tile.column, tile.width)
        return [
            None if bias is None else plgpu.load(bias.at[columns], layout=layout, optimized=False)
            for bias in inputs.biases
        ]

    def _keep_biases(self, memory: _Memory, tile: _Tile, w: Any, biases: list[Array | None]) -> None:
        """Put the biases where the tail finds them: in float32, and times the factor of their sums."""
        for i, (bias, place) in enumerate(zip(biases, (memory.bias, memory.gate_bias), strict=True)):
            if bias is not None:
                place[w, : tile.width] = self._factor(i) * bias.astype(jnp.float32)
        if any(bias is not None for bias in biases):
            plgpu.commit_smem()

    def _copy_residual(self, inputs: _Operands, memory: _Memory, tile: _Tile, w: Any, i: int) -> None:
        """Start the copy of piece i of the residual."""
        if inputs.residual is not None:
            source = inputs.residual.at[pl.ds(tile.row, TILE), pl.ds(tile.column + i * LANES, LANES)]
            plgpu.copy_gmem_to_smem(source, memory.residual.at[w], memory.residual_full.at[w])


def _biased(total: Array, biases: Any, w: Any, span: slice, factor: float) -> Array:
    """factor (total + the bias of its columns), where a factor of 1/2 costs no rounding."""
    z = total if factor == 1 else factor * total
    if biases is None:
        return z
    bias = plgpu.load(biases.at[w, span], layout=COLUMN, optimized=False)
    return z + lax.broadcast_in_dim(bias, z.shape, (1,))


def _whole_tiles(bias: Array | None, block_n: int) -> Array | None:
    """A bias as long as the tiles, which are not cut off where it is loaded."""
    return bias if bias is None or bias.size % block_n == 0 else jnp.pad(bias, (0, -bias.size % block_n))


def _before(slot: Any, stages: int) -> Any:
    return jnp.where(slot == 0, stages - 1, slot - 1)


def _wait_when(condition: Any, barrier: Any) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that wgmma and the copy engine share: rows of 128 bytes, swizzled."""
    columns = 2 * LANES // jnp.dtype(dtype).itemsize
    transforms: tuple[Any, ...] = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * LANES))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)
