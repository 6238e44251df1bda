"""Functions in the machine's own code where there is no machine: run on arrays, all threads of a warpgroup at once.

Only what `attention_backward_sums` uses is known. Which thread holds which number of an accumulator is stated here
anew, after the PTX manual, so that another order there is an error here.
"""

import inspect
import re
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

THREADS, TILE = 128, 64
PAIRS = TILE * TILE // THREADS // 2  # registers of two numbers that a thread has of a tile


def run(function: Any, memory: np.ndarray, tile: Any = None) -> Any:
    """Call a function of (context, reference) or (context, reference, tile).

    Args:
      function: as it was given to `inline_mgpu`.
      memory: float32 [n], what the reference refers to; changed in place.
      tile: [64, 64], or None.

    Returns:
      The tile [64, 64] that the function returns, or None.
    """
    function = inspect.unwrap(function)
    names: dict[str, Any] = dict(function.__globals__)
    names |= {
        "ir": mock.MagicMock(),
        "arith": SimpleNamespace(remui=np.remainder, muli=np.multiply),
        "vector": SimpleNamespace(extract=lambda pair, _, position: pair[position[0]], from_elements=lambda _, x: x),
        "mgpu": SimpleNamespace(
            thread_idx=lambda: np.arange(THREADS, 2 * THREADS),  # of the second warpgroup
            c=lambda number, _: number,
            memref_ptr=lambda ref: (ref, 0),
            getelementptr=lambda pointer, offsets, _: (pointer[0], pointer[1] + offsets[0]),
            inline_ptx=_instruction,
        ),
        "mosaic": SimpleNamespace(
            FragmentedArray=lambda *, _registers, _layout, _is_signed: _registers,
            WGMMA_LAYOUT=SimpleNamespace(registers_shape=lambda _: -1),
        ),
    }
    for name, own in function.__globals__.items():
        own = inspect.unwrap(own) if isinstance(own, FunctionType) else None
        if own is not None and own.__globals__ is function.__globals__:
            names[name] = FunctionType(own.__code__, names)
    given = (memory,) if tile is None else (memory, SimpleNamespace(registers=_registers(tile)))
    result = FunctionType(function.__code__, names)(None, *given)
    return None if result is None else _tile(result)


def _instruction(text: str, *operands: Any, **_: Any) -> Any:
    """What `red`, `st` and `ld` of some numbers for each thread do to memory."""
    kind, count = re.match(r"(\w+)[\w.:]*\.global[\w.:]*\.v(\d)\.f32 ", text).groups()  # type: ignore[union-attr]
    (memory, first), *numbers = operands
    places = np.asarray(first) + np.arange(int(count))[:, None]
    assert not np.any(places % int(count) - np.arange(int(count))[:, None]), "addresses that are not aligned"
    if kind == "ld":
        return memory[places]
    assert kind == "st" or (kind == "red" and ".add." in text), text
    memory[places] = np.stack(numbers) + (memory[places] if kind == "red" else 0)
    return None


def _places() -> tuple[np.ndarray, np.ndarray]:
    """Row and column of an accumulator's numbers, [pairs, 2, threads]."""
    register, number, thread = np.ogrid[:PAIRS, :2, :THREADS]
    row = 16 * (thread // 32) + 8 * (register % 2) + thread % 32 // 4
    return np.broadcast_arrays(row + 0 * number, 8 * (register // 2) + 2 * (thread % 4) + number)  # type: ignore[return-value]


def _registers(tile: Any) -> np.ndarray:
    """An array of registers, each with its two numbers of all threads."""
    registers = np.empty(PAIRS, object)
    for i, pair in enumerate(np.asarray(tile)[_places()]):
        registers[i] = tuple(pair)
    return registers


def _tile(registers: np.ndarray) -> np.ndarray:
    tile = np.full((TILE, TILE), np.nan, np.float32)
    tile[_places()] = np.stack([np.stack(pair) for pair in registers])
    return tile
