"""What the programs of the decoder step tell each other, interpreted: words, letters, and rows written one by one.

Programs run one after the other, each phase in a launch of its own: a look at a word that says no would wait for ever,
and is an error. Or all run side by side, as a cluster does in the interpreter, and wait for each other as on a GPU.
"""

import contextlib
import functools
import inspect
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.hopper.decode_block_grid import LOOKS
from tests.pallas_kernels.hopper.interpreter import _reader, _resolved, interpreted

ONE_AT_A_TIME = threading.Lock()
PATIENCE = 0.0  # seconds that a warpgroup waits for a word


class Waiting(NamedTuple):
    """What a warpgroup goes on waiting for."""

    what: str


@contextlib.contextmanager
def words_interpreted(patience: float | None = None) -> Iterator[None]:
    """`interpreted`, with what this kernel needs besides.

    Args:
      patience: None for programs one after the other; for all side by side, how many seconds one waits for a word.
        Each takes four threads, of which there are some twelve.
    """
    interpreter = jaxpr_interpret.JaxprInterpreter
    with (
        interpreted(),
        mock.patch.object(interpreter, "_interpret_inline_mgpu_p", _inline),
        mock.patch.object(sys.modules[__name__], "PATIENCE", patience or 0.0),
        mock.patch.object(plgpu, "kernel", plgpu.kernel if patience is None else _as_a_cluster(plgpu.kernel)),
    ):
        yield


def _as_a_cluster(kernel: Any) -> Any:
    def of_a_cluster(body: Any, *, grid: tuple[int, ...], grid_names: tuple[str, ...], **options: Any) -> Any:
        return kernel(body, cluster=grid, cluster_names=grid_names, **options)

    return of_a_cluster


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
    run = functools.partial(_run, function)
    avals = (variable.aval for variable in eqn.outvars)
    results = (gpu_callbacks.TOKEN_SHAPE_DTYPE, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in avals))
    token, *found = callback.io_callback(run, results, token, self.thread, operands, ordered=False)
    return token, found


@gpu_callbacks.fail_on_exception
def _run(function: Any, token: Any, thread: Any, operands: list[Any]) -> tuple[Any, ...]:
    ref, *values = operands
    known: dict[str, Any] = {
        "tell_all": _tell,
        "look_at": _look,
        "send_letters": _send,
        "receive_letters": _receive,
        "scatter_rows": _scatter,
    }
    interpretation = known[function.__name__]
    needed = inspect.signature(interpretation).parameters.values()
    around = inspect.getclosurevars(inspect.unwrap(function)).nonlocals
    static = {each.name: around[each.name] for each in needed if each.kind is each.KEYWORD_ONLY}
    until = time.monotonic() + PATIENCE
    while True:
        with ONE_AT_A_TIME:
            found = interpretation(_Buffer(ref, thread), *map(np.asarray, values), **static)
        if not isinstance(found, Waiting):
            return token, *found
        assert time.monotonic() < until, found.what
        time.sleep(0.01)


def _tell(word: _Buffer) -> tuple[()]:
    word.write(word.read() + 1)
    return ()


def _look(words: _Buffer, block: Any, most: Any, done: Any, *, split: Any, columns: int) -> Any:
    ahead = (block + np.arange(LOOKS)) % split.blocks
    there = words.read()[ahead * split.block_inputs // columns] >= done
    if not there[0]:
        return Waiting("rows are looked for that never come")
    return (np.int32(min(int(np.argmin([*there, False])), int(most))),)


def _numbered(first: Any, shape: tuple[int, ...], steps: list[int], room: Any) -> tuple[np.ndarray, np.ndarray]:
    """The letter of every number of an array, and whether there is one."""
    index = np.indices(shape)
    letter = first + sum(i * step for i, step in zip(index, steps, strict=True))
    return letter, np.all([i < size for i, size in zip(index, room, strict=True)], axis=0)


def _send(letters: _Buffer, x: Any, first: Any, *more: Any, steps: list[int]) -> tuple[()]:
    *room, turn = more
    whole, (at, inside) = letters.read(), _numbered(first, x.shape, steps, room)
    assert len(np.unique(at[inside])) == inside.sum(), "two numbers in one letter"
    whole[at[inside], 0], whole[at[inside], 1] = x.view(np.int32)[inside], turn
    letters.write(whole)
    return ()


def _receive(letters: _Buffer, *more: Any, wanted: Any) -> Any:
    *known, turn = more
    whole, found, known = letters.read(), [], iter(known)
    for each in wanted:
        first, room = next(known), [next(known) for _ in each.axes]
        parts, (axis, distance) = next(known), each.apart
        for i in range(each.most):
            less = [size - i * distance * (own == axis) for size, own in zip(room, each.axes, strict=True)]
            at, inside = _numbered(first + each.offsets()[i], each.shape, each.steps(), less)
            inside &= bool(parts >> i & 1)
            if not (whole[at[inside], 1] == turn).all():
                return Waiting("letters are waited for that never come")
            part = np.zeros(each.shape, np.int32)
            part[inside] = whole[at[inside], 0]
            found.append(part.view(np.float32))
    return tuple(found)


def _scatter(ref: _Buffer, x: Any, *numbers: Any, column: Any) -> tuple[()]:
    whole, start = ref.read(), np.zeros(len(x), int)
    if column is not None:
        *index, start = numbers
    else:
        index = list(numbers)
    for row, begin, place in zip(x, start, zip(*index, strict=True), strict=True):
        if all(0 <= i < size for i, size in zip(place, whole.shape, strict=False)):
            whole[tuple(place)][begin : begin + row.size] = row
    ref.write(whole)
    return ()
