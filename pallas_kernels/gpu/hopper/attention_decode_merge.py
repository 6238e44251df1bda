"""The merge of Hopper decoding: the statistics of a pair's parts become outputs (eq. 33.4, 33.5 and 33.2).

A second kernel reads them from device memory, or the programs of a cluster read each other's
(`attention_decode_cluster`). Either way a warpgroup takes a few query rows of one pair. It reads several parts at once,
since each alone is a few hundred bytes that take as long to come as many would; and always in the same order.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.attention_decode_config import LANES, DecodeCall, DecodeShape
from pallas_kernels.gpu.hopper.attention_decode_work import div, rem
from pallas_kernels.launch import cdiv

LOG2E = math.log2(math.e)


@runtime_checkable
class Parts(Protocol):
    """The statistics of a pair's parts, in base 2; rows are packed ones."""

    @property
    def first(self) -> Any:
        """The first part."""

    @property
    def end(self) -> Any:
        """The last part + 1."""

    def statistics(self, part: Any, row: Array) -> tuple[Array, Array]:
        """m and l of a row."""

    def sums(self, part: Any, row: Array, size: int) -> Array:
        """u of a row and those that follow, `size` numbers."""


class _Stored(NamedTuple):
    """Parts in device memory: m, l [parts, rows], u [parts, rows * H]."""

    m: Any
    l: Any
    u: Any
    first: Any
    end: Any
    H: int

    def statistics(self, part: Any, row: Array) -> tuple[Array, Array]:
        return self.m[part, row], self.l[part, row]

    def sums(self, part: Any, row: Array, size: int) -> Array:
        return self.u[part, pl.ds(row * self.H, size)]


def merge_parts(
    call: DecodeCall,
    parts: Sequence[Array],
    finished: Sequence[Array],
    real: Array | None,
    sinks: Array | None,
    dtype: Any,
) -> tuple[Array, ...]:
    """Merge, and finalise unless the call is for statistics.

    Args:
      call: what is static.
      parts: m, l [parts, rows], u [parts, rows, H]; first and last + 1 part [B * K] of every pair.
      finished: output [B, T, N, H] and lse [B * K, rows], right where a pair has no parts; empty where all have some.
      real: [B] int32, tokens that are real; None for all.
      sinks: [N] float32, or None.
      dtype: of the output.

    Returns:
      As `attention_decode.decode`.
    """
    shape = call.shape
    m, l, u, first, end = parts
    given = {"m": m, "l": l, "u": u.reshape(u.shape[0], -1), "first": first, "end": end, "real": real, "sinks": sinks}
    given = {name: x for name, x in given.items() if x is not None}
    per_vector, vectors, _ = _sizes(call)
    rows = shape.rows if per_vector > 1 else shape.T * shape.G
    packed = shape.B * shape.K, shape.rows * shape.H
    number = jax.ShapeDtypeStruct((shape.B * shape.K, m.shape[1]), jnp.float32)
    values = jax.ShapeDtypeStruct(
        packed if per_vector > 1 else (shape.B, shape.T, shape.N, shape.H), jnp.float32 if call.statistics else dtype
    )
    targets = [jax.new_ref(x) for x in finished]
    merged = plgpu.kernel(
        functools.partial(_kernel, call, tuple(given), targets),
        out_type=() if targets else (values, *[number] * (2 if call.statistics else 1)),
        grid=(shape.B * shape.K, cdiv(rows, per_vector * vectors)),
        grid_names=("pair", "rows"),
        num_threads=1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*given.values())
    return unpacked(call, [jax.freeze(target) for target in targets] if targets else merged)


def unpacked(call: DecodeCall, results: Sequence[Array]) -> tuple[Array, ...]:
    """What `merge_rows` wrote, in the shapes and the order of `attention_decode.decode`."""
    shape, (output, *numbers) = call.shape, results
    output = _unpack(shape, output, shape.H) if shape.H < LANES else output
    numbers = [_unpack(shape, x[:, : shape.rows], 1)[..., 0] for x in numbers]
    return (*numbers, output) if call.statistics else (output, *numbers)


def _sizes(call: DecodeCall) -> tuple[int, int, int]:
    """Rows in a vector, vectors of a program, parts read at once: many programs, each with enough to wait for."""
    shape, config = call.shape, call.config
    per_vector = max(1, LANES // shape.H)
    pairs = shape.B * shape.K
    at_once = min(config.merge_loads, max(1, config.programs // pairs))
    programs = pairs * shape.T * shape.G // per_vector
    vectors = 1
    while 2 * vectors * at_once <= config.merge_loads // 2 and programs // (2 * vectors) >= 4 * config.programs:
        vectors *= 2
    return per_vector, vectors, at_once


def _kernel(call: DecodeCall, names: tuple[str, ...], targets: Sequence[Any], *refs: Any) -> None:
    given, outputs = dict(zip(names, refs, strict=False)), targets or refs[len(names) :]
    pair = lax.axis_index("pair")

    @pl.when(given["first"][pair] < given["end"][pair])
    def _() -> None:
        b, k = div(pair, call.shape.K), rem(pair, call.shape.K)
        per_vector, vectors, at_once = _sizes(call)
        count = per_vector * vectors
        index = [lax.axis_index("rows") * count + i for i in range(count)]
        first, end = given["first"][pair], given["end"][pair]
        parts = _Stored(given["m"], given["l"], given["u"], first, end, call.shape.H)
        merge_rows(call, parts, given, outputs, (b, k), index, at_once)


def merge_rows(
    call: DecodeCall,
    parts: Parts,
    given: dict[str, Any],
    outputs: Sequence[Any],
    pair: tuple[Array, Array],
    index: Sequence[Array],
    at_once: int,
) -> None:
    """Write what some rows of a pair come to.

    Args:
      call: what is static.
      parts: of the pair; at least one.
      given: references to `real` and `sinks`, where there are any.
      outputs: references to the output, and to lse or else m and l, as `merge_parts` has them.
      pair: batch row and key/value head.
      index: numbers of the rows among all packed ones where H < LANES, else among those that are no padding.
      at_once: parts that are read together; all are where their numbers are known.
    """
    shape, (b, k) = call.shape, pair
    per_vector = max(1, LANES // shape.H)
    vectors = len(index) // per_vector
    places = [_token_and_head(shape, i, packed=per_vector > 1) for i in index]
    rows = [_packed_row(shape, t, g) for t, g in places]
    m, l, u = _fold(call, parts, rows, at_once)

    real = jnp.int32(shape.T) if "real" not in given else given["real"][b]
    factors = []
    for row, row_m, row_l, (t, g) in zip(rows, m, l, places, strict=True):
        inside = (t < shape.T) & (g < shape.G)
        head = k * shape.G + jnp.minimum(g, shape.G - 1)
        seen = (t < real) & (row_l != 0)  # true for NaN, which is to be seen
        sink = given["sinks"][head] * LOG2E if "sinks" in given else None
        factor, numbers = _statistics(row_m, row_l, seen) if call.statistics else finish(row_m, row_l, seen, sink)
        factors.append(factor)

        @pl.when(inside)
        def _(row: Array = row, numbers: tuple[Array, ...] = numbers) -> None:
            for ref, number in zip(outputs[1:], numbers, strict=True):
                ref[b * shape.K + k, row] = number

    for v in range(vectors):
        mine = _spread(call, factors[v * per_vector : (v + 1) * per_vector])
        value = jnp.where(mine != 0, u[v] * mine, 0.0).astype(outputs[0].dtype)
        if per_vector > 1:
            outputs[0].at[b * shape.K + k, pl.ds(rows[v * per_vector] * shape.H, LANES)][...] = value
            continue
        t, g = places[v]

        @pl.when((t < shape.T) & (g < shape.G))
        def _(t: Array = t, g: Array = g, value: Array = value) -> None:
            outputs[0].at[b, t, k * shape.G + g][...] = value


def _token_and_head(shape: DecodeShape, index: Array, *, packed: bool) -> tuple[Array, Array]:
    """Token and head of a row: of all packed ones, or of those alone that are no padding."""
    inner_size = shape.stride if packed else shape.G if shape.heads_inside else shape.T
    outer, inner = div(index, inner_size), rem(index, inner_size)
    return (outer, inner) if shape.heads_inside else (inner, outer)


def _packed_row(shape: DecodeShape, t: Array, g: Array) -> Array:
    row = t * shape.stride + g if shape.heads_inside else g * shape.stride + t
    return jnp.minimum(row, shape.rows - 1)


def row_layout(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=size // LANES)


def _spread(call: DecodeCall, numbers: Sequence[Array]) -> Array:
    """One number for each row of a vector."""
    size = max(LANES, call.shape.H)
    lane = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=row_layout(size))
    x = jnp.broadcast_to(numbers[0], (size,))
    for i, number in enumerate(numbers[1:], 1):
        x = jnp.where(lane >= i * call.shape.H, jnp.broadcast_to(number, (size,)), x)
    return x


def _fold(call: DecodeCall, parts: Parts, rows: Sequence[Array], at_once: int) -> Any:
    """m, l of each row and u of each vector over all parts of a pair."""
    per_vector, size = max(1, LANES // call.shape.H), max(LANES, call.shape.H)
    vectors, first, end = len(rows) // per_vector, parts.first, parts.end

    def scale(u: Sequence[Array], factors: Sequence[Array]) -> list[Array]:
        return [x * _spread(call, factors[v * per_vector : (v + 1) * per_vector]) for v, x in enumerate(u)]

    def some(group: Array, carry: Any) -> Any:
        number = [first + group * at_once + i for i in range(at_once)]
        there = [jnp.minimum(part, end - 1) for part in number]  # the last one again, with weight 0, past the end
        return add(carry, there, [part < end for part in number])

    def add(carry: Any, there: Sequence[Any], counts: Sequence[Any]) -> Any:
        m, l, u = carry
        values = [[parts.sums(part, rows[v * per_vector], size) for v in range(vectors)] for part in there]
        read = [[parts.statistics(part, row) for row in rows] for part in there]
        tops = [[jnp.where(one, top, -jnp.inf) for top, _ in row] for one, row in zip(counts, read, strict=True)]
        sums = [[total for _, total in row] for row in read]
        new_m = [functools.reduce(jnp.maximum, column, old) for old, *column in zip(m, *tops, strict=True)]
        shift = [_finite(x) for x in new_m]
        decay = [jnp.exp2(old - x) for old, x in zip(m, shift, strict=True)]
        l, u = [x * d for x, d in zip(l, decay, strict=True)], scale(u, decay)
        for top, total, value in zip(tops, sums, values, strict=True):
            weights = [jnp.exp2(x - y) for x, y in zip(top, shift, strict=True)]
            l = [x + w * y for x, w, y in zip(l, weights, total, strict=True)]
            u = [x + y for x, y in zip(u, scale(value, weights), strict=True)]
        return tuple(new_m), tuple(l), tuple(u)

    number = functools.partial(jnp.full, (), dtype=jnp.float32)
    zeros = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), row_layout(size))
    start = (number(-jnp.inf),) * len(rows), (number(0),) * len(rows), (zeros,) * vectors
    if isinstance(end, int):
        return add(start, range(first, end), [jnp.bool_(True)] * (end - first))
    return lax.fori_loop(jnp.int32(0), div(end - first + (at_once - 1), at_once), some, start)


def _finite(m: Array) -> Array:
    """m, with 0 in place of -inf: any finite shift serves an empty row."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def _statistics(m: Array, l: Array, seen: Array) -> tuple[Array, tuple[Array, ...]]:
    """What u is multiplied by, and m and l."""
    return jnp.where(seen, 1.0, 0.0), (jnp.where(seen, m / LOG2E, -jnp.inf), jnp.where(seen, l, 0.0))


def finish(m: Array, l: Array, seen: Array, sink: Array | None) -> tuple[Array, tuple[Array, ...]]:
    """What u is multiplied by, and the log-normaliser; a sink (base 2) is one more key whose value is 0."""
    shift = top = _finite(m)
    total, some = jnp.where(seen, l, 0.0), seen
    if sink is not None:
        top = _finite(jnp.maximum(jnp.where(seen, m, -jnp.inf), sink))
        total = jnp.where(seen, l * jnp.exp2(shift - top), 0.0) + jnp.exp2(sink - top)
        some = total != 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, (top + jnp.log2(total)) / LOG2E, -jnp.inf)
    return jnp.where(seen, jnp.exp2(shift - top) / total, 0.0), (lse,)


def _unpack(shape: DecodeShape, packed: Array, size: int) -> Array:
    """Packed rows [B * K, rows * size] as [B, T, N, size]."""
    rows = packed.reshape(shape.B, shape.K, shape.groups, shape.stride, size)
    if shape.heads_inside:
        rows = jnp.moveaxis(rows[:, :, :, : shape.G], 1, 2)
    else:
        rows = jnp.transpose(rows[:, :, :, : shape.T], (0, 3, 1, 2, 4))
    return rows.reshape(shape.B, shape.T, shape.N, size)
