"""Executables by key: compiled once however many threads ask, in the foreground or behind it, and not too many kept."""

import contextlib
import dataclasses
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

# What a program depends on besides its operands, and what puts it back in another thread.
_SETTINGS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_device": jax.default_device,
}
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_loads = threading.local()


def _count_loads(event: str, **_: Any) -> None:
    if event == _CACHE_HIT:
        _loads.count = getattr(_loads, "count", 0) + 1


jax.monitoring.register_event_listener(_count_loads)


@dataclasses.dataclass
class Executable:
    """A compiled program.

    Attributes:
      program: takes the padded operands.
      compile_s: seconds of tracing, lowering and compiling.
      loaded: whether the persistent cache had it.
      memory_bytes: temporaries, results and code; 0 where the platform does not say.
      calls: how often it ran; the first call is no steady one.
    """

    program: jax.stages.Compiled
    compile_s: float
    loaded: bool
    memory_bytes: int
    calls: int = 0


def use_persistent_cache(directory: str | os.PathLike[str]) -> None:
    """Keep every executable of this process in a folder, and take those that an earlier process left there.

    This is JAX's own persistent compilation cache, with its limits on size and compile time lifted; nothing in it is
    unpickled. It holds for the whole process.

    Args:
      directory: made when it does not exist; only what one trusts as much as the program itself belongs there.
    """
    jax.config.update("jax_compilation_cache_dir", os.fspath(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()


def trace_settings() -> tuple[tuple[str, Any], ...]:
    """The settings of the calling thread that change what a function traces to."""
    return tuple((name, getattr(jax.config, name)) for name in _SETTINGS)


@contextlib.contextmanager
def under(settings: tuple[tuple[str, Any], ...]) -> Iterator[None]:
    """These settings in the current thread."""
    with contextlib.ExitStack() as stack:
        for name, value in settings:
            stack.enter_context(_SETTINGS[name](value))
        yield


def compile_program(lower: Callable[[], jax.stages.Lowered], options: Mapping[str, Any]) -> Executable:
    """Lower and compile with these compiler options, timed."""
    before, start = getattr(_loads, "count", 0), time.perf_counter()
    program = lower().compile(compiler_options=dict(options))
    seconds = time.perf_counter() - start
    memory: Any = program.memory_analysis()
    parts = ("temp_size_in_bytes", "output_size_in_bytes", "generated_code_size_in_bytes")
    size = sum(getattr(memory, part) for part in parts) if memory is not None else 0
    return Executable(program, seconds, getattr(_loads, "count", 0) > before, size)


class Executables:
    """At most `most` executables; the one that was not used for longest goes first.

    Args:
      most: how many are kept; None for all.
      on_eviction: called with the key and the executable that goes.
    """

    def __init__(self, most: int | None, on_eviction: Callable[[Any, Executable], None]) -> None:
        self._most, self._on_eviction = most, on_eviction
        self._ready: OrderedDict[Hashable, Executable] = OrderedDict()
        self._pending: dict[Hashable, Future[Executable]] = {}
        self._lock = threading.Lock()

    def ready(self, key: Hashable) -> Executable | None:
        """The executable if it is there; counts as a use."""
        with self._lock:
            if key in self._ready:
                self._ready.move_to_end(key)
            return self._ready.get(key)

    def wait(self, key: Hashable, build: Callable[[], Executable]) -> Executable:
        """The executable, built in this thread unless it is there or another thread is at it."""
        future, is_new = self._claim(key)
        if is_new:
            self._build(key, build, future)
        return self._result(key, future)

    def start(self, key: Hashable, build: Callable[[], Executable]) -> None:
        """See to it that the executable is being built by some thread; never waits.

        Raises what an earlier attempt in the background raised; the next call tries again.
        """
        future, is_new = self._claim(key)
        if is_new:
            threading.Thread(target=self._build, args=(key, build, future), name="flashspec-compile").start()
        elif future.done():
            self._result(key, future)

    def _claim(self, key: Hashable) -> tuple[Future[Executable], bool]:
        with self._lock:
            if key in self._ready:
                done: Future[Executable] = Future()
                done.set_result(self._ready[key])
                return done, False
            is_new = key not in self._pending
            return self._pending.setdefault(key, Future()), is_new

    def _result(self, key: Hashable, future: Future[Executable]) -> Executable:
        if future.exception() is not None:
            with self._lock:
                if self._pending.get(key) is future:
                    del self._pending[key]
        return future.result()

    def _build(self, key: Hashable, build: Callable[[], Executable], future: Future[Executable]) -> None:
        try:
            executable = build()
        except BaseException as error:  # whoever waits for the future gets it
            future.set_exception(error)
            return
        with self._lock:
            self._ready[key] = executable
            del self._pending[key]
            excess = 0 if self._most is None else len(self._ready) - self._most
            evicted = [self._ready.popitem(last=False) for _ in range(max(excess, 0))]
        for old_key, old in evicted:
            self._on_eviction(old_key, old)
        future.set_result(executable)
