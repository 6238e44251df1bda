"""What the programs of the decoder step tell each other, interpreted: words that count, and rows written one by one.

Programs run one after the other here, so that a look at a word that says no would wait for ever: it is an error.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

from pallas_kernels.gpu.hopper.decode_block_grid import DONE, LOOKS
from tests.pallas_kernels.hopper.interpreter import _reader, _resolved, interpreted

ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def words_interpreted() -> Iterator[None]:
    """`interpreted`, with what this kernel needs besides."""
    with interpreted(), mock.patch.object(jaxpr_interpret.JaxprInterpreter, "_interpret_inline_mgpu_p", _inline):
        yield


class _Buffer:
    """What a reference stands for, in the interpreter's memory."""

    def __init__(self, ref: tuple[Any, Any], thread: Any) -> None:
        self.memory, self.thread = gpu_callbacks._get_shared_memory(), thread
        self.key, self.access = _reader(*ref)

    def read(self) -> np.ndarray:
        return np.array(self.memory.get_buffer_content(self.key, self.access, self.thread, logging_info=None)[0])

    def write(self, value: Any) -> None:
        self.memory.store_buffer_content(self.key, self.access, np.asarray(value), self.thread, logging_info=None)


def _inline(self: Any, eqn: Any, token: Any, get_invals: Any) -> tuple[Any, list[Any]]:
    function, count, invals = eqn.params["mgpu_fn"], eqn.params["pytree_args"].num_leaves, get_invals()
    transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], invals[count:])
    operands = [_resolved(*each) for each in zip(eqn.invars[:count], invals[:count], transforms, strict=True)]
    run = functools.partial(_run, function, len(eqn.outvars))
    results = (gpu_callbacks.TOKEN_SHAPE_DTYPE, *[jax.ShapeDtypeStruct((), jnp.int32)] * len(eqn.outvars))
    token, *found = callback.io_callback(run, results, token, self.thread, operands, ordered=False)
    return token, found


@gpu_callbacks.fail_on_exception
def _run(function: Any, results: int, token: Any, thread: Any, operands: list[Any]) -> tuple[Any, ...]:
    ref, *values = operands
    known: dict[str, Any] = {
        "arrive_at": _arrive,
        "tell_all": _tell,
        "look_at": _look,
        "wait_for_parts": _wait_for_parts,
        "scatter_rows": _scatter,
        "store_first": _store_first,
    }
    interpretation = known[function.__name__]
    needed = inspect.signature(interpretation).parameters.values()
    around = inspect.getclosurevars(inspect.unwrap(function)).nonlocals
    static = {each.name: around[each.name] for each in needed if each.kind is each.KEYWORD_ONLY}
    with ONE_AT_A_TIME:
        found = interpretation(_Buffer(ref, thread), *map(np.asarray, values), **static)
    return token, *(np.int32(found) for _ in range(results))


def _arrive(word: _Buffer, halves: Any) -> bool:
    count = word.read() + 1
    word.write(count)
    return bool(count == halves)


def _tell(word: _Buffer) -> None:
    word.write(word.read() + DONE)


def _look(words: _Buffer, block: Any, most: Any, done: Any, *, split: Any, columns: int) -> int:
    ahead = (block + np.arange(LOOKS)) % split.blocks
    there = words.read()[ahead * split.block_inputs // columns] >= done
    assert there[0], "rows are looked for that never come"
    return min(int(np.argmin([*there, False])), int(most))


def _wait_for_parts(word: _Buffer, count: Any) -> None:
    assert word.read() == count, "parts are waited for that never come, or come too soon"


def _scatter(ref: _Buffer, x: Any, *numbers: Any, column: Any) -> None:
    whole, start = ref.read(), np.zeros(len(x), int)
    if column is not None:
        *index, start = numbers
    else:
        index = list(numbers)
    for row, begin, place in zip(x, start, zip(*index, strict=True), strict=True):
        if all(0 <= i < size for i, size in zip(place, whole.shape, strict=False)):
            whole[tuple(place)][begin : begin + row.size] = row
    ref.write(whole)


def _store_first(ref: _Buffer, x: Any, *, rows: int) -> None:
    whole = ref.read()
    whole[:rows] = x[:rows]
    ref.write(whole)
