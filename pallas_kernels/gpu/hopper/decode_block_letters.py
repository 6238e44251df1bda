"""Letters of the fused decoder step on Hopper: numbers that programs send each other, each with the turn it belongs to.

A float32 number and a turn are one word of eight bytes, which is written at once and read at once: whoever finds the
turn that he waits for has the number too. So a number is on its way for one write and one read. Numbers that a counter
tells of take a fence of whoever writes and one of whoever reads besides, and an addition between them.

Letters are all 0 at first, and turns count from 1. A word is written again a turn later, without a question. That takes
nothing from anyone: who does it goes on from numbers that were made, step by step, of what all readers of the turn
before have found (`decode_block`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.gpu.hopper.decode_block_grid import SCALAR
from pallas_kernels.gpu.hopper.decode_block_letters_config import Box

BYTES = 8


def send(ref: Any, box: Box, place: Sequence[Any], axes: Sequence[int], x: Array, layout: Any, turn: Any) -> None:
    """Send numbers, as far as there is room in the box.

    Args:
      ref: int32 [letters, 2].
      box: that they go to.
      place: of the first of them in the box.
      axes: of the box, for every axis of the numbers.
      x: float32, in `layout`.
      turn: that they belong to.
    """
    steps = [box.step(axis) for axis in axes]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, SCALAR, [SCALAR] * len(axes), SCALAR))
    def send_letters(_: Any, ref: Any, x: Any, first: Any, room: list[Any], turn: Any) -> None:
        base, size = mgpu.memref_ptr(ref), x.layout.vector_length
        together = _together(size, steps)
        for numbers, at in zip(x.registers.flat, x.layout.thread_idxs(x.shape), strict=True):
            *outer, inner = map(_i32, at)
            for i in range(0, size, together):
                index = [*outer, _plus(inner, i)]
                mgpu.inline_ptx(
                    _writing(together),
                    base,
                    _letter(first, index, steps),
                    arith.extui(_integer(32), _inside(index, room)),
                    turn.registers.item(),
                    *(arith.bitcast(_integer(32), vector.extract(numbers, [], [n])) for n in range(i, i + together)),
                    has_side_effects=True,
                )

    send_letters(ref, x, jnp.int32(box.letter(place)), box.room(place, axes), jnp.int32(turn))


class Wanted(NamedTuple):
    """An array of letters, in parts of one shape.

    Args:
      box: that it is in.
      place: of the first letter of the first part.
      axes: of the box, for every axis of the array.
      shape: of a part; what of it would lie past the end of the box is 0.
      layout: of a part.
      parts: a number whose bit i says whether there is part i; one that there is not is 0.
      most: bits of that number.
      apart: along which axis of the box one part follows the other, and at what distance.
    """

    box: Box
    place: Sequence[Any]
    axes: Sequence[int]
    shape: tuple[int, ...]
    layout: Any
    parts: Any = 1
    most: int = 1
    apart: tuple[int, int] = (0, 1)

    def steps(self) -> list[int]:
        """From one letter to the next, along each axis of the array."""
        return [self.box.step(axis) for axis in self.axes]

    def offsets(self) -> list[int]:
        """From the first part to each, in letters."""
        axis, distance = self.apart
        return [i * distance * self.box.step(axis) for i in range(self.most)]

    def there(self, index: Sequence[Any], room: Sequence[Any], parts: Any) -> Any:
        """Which parts have a number at an index, as bits."""
        axis, distance = self.apart
        for i in range(self.most if axis in self.axes else 1):
            moved = [_plus(at, i * distance * (each == axis)) for at, each in zip(index, self.axes, strict=True)]
            without = arith.andi(parts, mgpu.c(~(1 << i) if axis in self.axes else 0, parts.type))
            parts = arith.select(_inside(moved, room), parts, without)
        return parts


def receive(ref: Any, wanted: Sequence[Wanted], turn: Any) -> list[list[Array]]:
    """Wait for the letters of a turn, all together, and read them.

    Args:
      ref: int32 [letters, 2].
      wanted: some arrays.
      turn: that is waited for.

    Returns:
      For every array its parts, float32.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), [(SCALAR, [SCALAR] * len(each.axes), SCALAR) for each in wanted], SCALAR),
        return_type=[
            [plgpu.ShapeDtypeStruct(each.shape, jnp.float32, layout=each.layout)] * each.most for each in wanted
        ],
    )
    def receive_letters(_: Any, ref: Any, known: list[Any], turn: Any) -> Any:
        reads, inputs = [], []
        for each, (first, room, parts) in zip(wanted, known, strict=True):
            layout = each.layout.to_mgpu()
            size = layout.vector_length
            for at in layout.thread_idxs(each.shape):
                index = list(map(_i32, at))
                inputs += [_letter(first, index, each.steps()), each.there(index, room, parts.registers.item())]
                reads.append(_Read(size, _together(size, each.steps()), each.offsets()))
        types = [ir.F32Type.get()] * sum(each.size * len(each.offsets) for each in reads)
        base = mgpu.memref_ptr(ref)
        found = mgpu.inline_ptx(
            _reading(reads), base, turn.registers.item(), *inputs, result_types=types, has_side_effects=True
        )
        numbers = iter(found)
        return [_parts(each, numbers) for each in wanted]

    known = [
        (jnp.int32(each.box.letter(each.place)), each.box.room(each.place, each.axes), jnp.int32(each.parts))
        for each in wanted
    ]
    return receive_letters(ref, known, jnp.int32(turn))


def _parts(wanted: Wanted, numbers: Iterator[Any]) -> list[Any]:
    """The parts of an array, of numbers that come register by register, and in each part by part."""
    layout = wanted.layout.to_mgpu()
    size, shape = layout.vector_length, layout.registers_shape(wanted.shape)
    whole = np.empty((wanted.most, *shape), object)
    for register in np.ndindex(*shape):
        for i in range(wanted.most):
            some = [next(numbers) for _ in range(size)]
            whole[i][register] = vector.from_elements(ir.VectorType.get((size,), ir.F32Type.get()), some)
    return [FragmentedArray(_registers=each, _layout=layout, _is_signed=None) for each in whole]


# Instructions. The letters of a program are read and written past its own cache: `relaxed` says so.


def _writing(together: int) -> str:
    """Of so many neighbours: operands are the address of all letters, which is the first, whether to, turn, numbers."""
    letters = [f"letter{n}" for n in range(together)]
    return f"""{{
    .reg .pred inside;
    .reg .b64 address, letter<{together}>;
    setp.ne.u32 inside, $2, 0;
    mad.wide.u32 address, $1, {BYTES}, $0;
    {" ".join(f"mov.b64 {letter}, {{${4 + n}, $3}};" for n, letter in enumerate(letters))}
    @inside st.relaxed.gpu.global{_several(letters, "[address], {};")}
    }}"""


class _Read(NamedTuple):
    """What a thread reads for one register: so many neighbours, some together, of parts that lie apart in letters."""

    size: int
    together: int
    offsets: list[int]


def _reading(reads: Sequence[_Read]) -> str:
    """Reads until all letters are of the turn, each time those that are late.

    Results are the numbers. Operands are the address of all letters, the turn, and for each read its first letter and
    which parts there are.
    """
    count = sum(each.size * len(each.offsets) for each in reads)
    base, turn, letter = f"${count}", f"${count + 1}", 0
    setup, again, check = [], [], []
    for at, each in enumerate(reads):
        first, parts = f"${count + 2 + 2 * at}", f"${count + 3 + 2 * at}"
        setup.append(f"mad.wide.u32 address{at}, {first}, {BYTES}, {base};")
        for i, offset in enumerate(each.offsets):
            setup += [f"and.b32 bit, {parts}, {1 << i};", "setp.ne.u32 there, bit, 0;"]
            for step in range(0, each.size, each.together):
                letters = [f"letter{letter + n}" for n in range(each.together)]
                letter += each.together
                setup += [f"selp.b64 {one}, due, none, there;" for one in letters]
                again += _lateness(letters, turn)
                source = f"{{}}, [address{at} + {(offset + step) * BYTES}];"
                again.append(f"@there ld.relaxed.gpu.global{_several(letters, source)}")
                check += [*_lateness(letters, turn), "or.pred more, more, there;"]
    return "\n".join(
        [
            "{",
            ".reg .b32 bit, number, flag<2>;",
            f".reg .b64 none, due, letter<{count}>, address<{len(reads)}>;",
            ".reg .pred there, more;",
            "mov.b32 number, 0;",
            f"not.b32 bit, {turn};",
            f"mov.b64 none, {{number, {turn}}};",
            "mov.b64 due, {number, bit};",
            *setup,
            "AGAIN:",
            *again,
            "setp.ne.u32 more, bit, bit;",
            *check,
            "@more bra AGAIN;",
            *(f"mov.b64 {{${n}, bit}}, letter{n};" for n in range(count)),
            "}",
        ]
    )


def _lateness(letters: Sequence[str], turn: str) -> list[str]:
    """`there`: whether any of one letter or two is not yet of the turn."""
    flags = [f"flag{n}" for n in range(len(letters))]
    lines = [f"mov.b64 {{number, {flag}}}, {letter};" for flag, letter in zip(flags, letters, strict=True)]
    lines += [f"xor.b32 {flag}, {flag}, {turn};" for flag in flags]
    return [*lines, *(f"or.b32 flag0, flag0, {flag};" for flag in flags[1:]), "setp.ne.u32 there, flag0, 0;"]


def _several(letters: Sequence[str], form: str) -> str:
    """One instruction for one letter, or for two."""
    listed = ", ".join(letters)
    return ".b64 " + form.format(listed) if len(letters) == 1 else ".v2.b64 " + form.format(f"{{{listed}}}")


def _together(size: int, steps: Sequence[int]) -> int:
    """How many neighbours an instruction reads or writes, of so many in a register."""
    return 2 if size % 2 == 0 and steps[-1] == 1 else 1


def _letter(first: Any, index: Sequence[Any], steps: Sequence[int]) -> Any:
    """The number of the letter at an index, of an array whose first is known."""
    letter = first.registers.item()
    for i, step in zip(index, steps, strict=True):
        letter = arith.addi(letter, arith.muli(i, mgpu.c(step, i.type)))
    return letter


def _inside(index: Sequence[Any], room: Sequence[Any]) -> Any:
    """Whether there is room for an index along every axis."""
    inside = mgpu.c(1, _integer(1))
    for i, size in zip(index, room, strict=True):
        inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ult, i, size.registers.item()))
    return inside


def _plus(x: Any, more: int) -> Any:
    return arith.addi(x, mgpu.c(more, x.type))


def _i32(index: Any) -> Any:
    return arith.index_cast(_integer(32), index)


def _integer(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)
