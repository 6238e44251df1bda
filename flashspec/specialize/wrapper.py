"""`specialize`: a function of any length, run by a few executables that were compiled ahead of time."""

import functools
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax
import rich.progress

from flashspec.checks import at_least, fail, one_of
from flashspec.specialize import padding
from flashspec.specialize.buckets import ShapeBuckets
from flashspec.specialize.executables import Executable, Executables, compile_program, trace_settings, under
from flashspec.specialize.ledger import Ledger
from flashspec.specialize.operands import Call, Parameters


class Specialized:
    """What `specialize` returns; call it as the function, without its length.

    Attributes:
      buckets: the lengths that are compiled for.
      ledger: what each bucket cost and saved; `print` shows it, `write_json` keeps it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        buckets: ShapeBuckets | Iterable[int],
        *,
        in_axes: padding.Axes,
        out_axes: padding.Axes,
        length_arg: str | int | None,
        background: bool = False,
        max_executables: int | None = None,
        progress: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.buckets = buckets if isinstance(buckets, ShapeBuckets) else ShapeBuckets(tuple(buckets))
        self.ledger = Ledger(self.buckets.bounds)
        self._fn = fn
        self._parameters = Parameters(fn, in_axes, length_arg)
        self._out_axes = out_axes
        self._background, self._progress = background, progress
        self._compiler_options = dict(compiler_options or {})
        most = None if max_executables is None else at_least("max_executables", max_executables, 1)
        self._most, self._executables = most, Executables(most, self._evicted)
        self._checked: set[Hashable] = set()
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, run the bucket's executable, and unpad; waits for the result, which the ledger times."""
        call = self._parameters.bind(args, kwargs)
        bound = self.buckets.bucket_of(call.length)
        executable, serving, kind = self._choose(call, bound)
        start = time.perf_counter()
        result = self._run(call, executable, serving)
        seconds = time.perf_counter() - start
        self._enter(bound, kind, executable, seconds, serving - call.length, serving)
        return result

    def warm_up(self, *args: Any, bounds: Iterable[int] | None = None, **kwargs: Any) -> Ledger:
        """Compile for chosen buckets, with a progress bar.

        Args:
          *args: the operands of a call of any length, arrays or `jax.ShapeDtypeStruct`s.
          bounds: of the buckets; None for all.
          **kwargs: its keyword operands.

        Returns:
          The ledger.

        Raises:
          ValueError: a bound that no bucket has, more bounds than executables are kept, or operands as in a call.
        """
        chosen = self.buckets.bounds if bounds is None else tuple(bounds)
        for bound in chosen:
            one_of("bounds", bound, self.buckets.bounds)
        if self._most is not None and len(set(chosen)) > self._most:
            raise fail("bounds", f"at most max_executables = {self._most} buckets", list(chosen))
        call = self._parameters.bind(args, kwargs)
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        tracked = rich.progress.track(chosen, f"compiling {name}", disable=not self._progress)
        for bound in tracked:
            self._executables.wait(call.key(bound), self._builder(call, bound))
        return self.ledger

    def check_padding(self, *args: Any, **kwargs: Any) -> None:
        """The test mode: run the call with zeros and then with poison in the padding, and compare every bit.

        The poison is NaN, infinities and the largest numbers for floats, the extreme integers and 1 for integers, True
        for booleans. All results are compared, those without a padded axis too.

        Args:
          *args: operands of a call whose length is below its bucket's bound.
          **kwargs: its keyword operands.

        Raises:
          ValueError: a result depends on what the padding holds, or there is no padding.
        """
        call = self._parameters.bind(args, kwargs)
        bound = self.buckets.bucket_of(call.length)
        if bound == call.length:
            raise fail("length", "one below its bucket's bound, so that there is padding", call.length)
        executable = self._executables.wait(call.key(bound), self._builder(call, bound))
        clean = self._run(call, executable, bound)
        for attempt in range(3):

            def poison(dtype: Any, attempt: int = attempt) -> Any:
                values = padding.poisons(dtype)
                return values[attempt % len(values)]

            poisoned = self._run(call, executable, bound, poison)
            pairs = zip(jax.tree_util.tree_leaves_with_path(clean), jax.tree.leaves(poisoned), strict=True)
            for (path, one), other in pairs:
                if padding.bits(one) != padding.bits(other):
                    where = jax.tree_util.keystr(path) or "the result"
                    raise fail("fn", "results that do not depend on the padding", f"other bits of {where}")

    def time_op_by_op(self, *args: Any, **kwargs: Any) -> float:
        """Seconds of one call without any executable, op by op and unpadded: the ledger's t_e of its bucket.

        The function runs twice, since the first time compiles each operation by itself.

        Returns:
          Seconds of the second time.
        """
        call = self._parameters.bind(args, kwargs)
        positional, keywords = call.padded(call.length)
        with jax.disable_jit():
            jax.block_until_ready(self._fn(*positional, **keywords))
            start = time.perf_counter()
            jax.block_until_ready(self._fn(*positional, **keywords))
            seconds = time.perf_counter() - start
        self.ledger.note(self.buckets.bucket_of(call.length), op_by_op_s=seconds)
        return seconds

    def export(
        self, *args: Any, bound: int, platforms: Iterable[str] | None = None, **kwargs: Any
    ) -> jax.export.Exported:
        """The program of one bucket for another process or machine.

        Args:
          *args: the operands of a call of any length, arrays or `jax.ShapeDtypeStruct`s.
          bound: of the bucket.
          platforms: to lower for, such as ("cpu", "cuda"); None for this one.
          **kwargs: its keyword operands.

        Returns:
          What `jax.export` makes: `.call` takes padded operands as `fn` does, `.serialize()` gives bytes
          (jax needs the package flatbuffers for it).

        Raises:
          ValueError: a bound that no bucket has, or operands as in a call.
        """
        one_of("bound", bound, self.buckets.bounds)
        positional, keywords = self._parameters.bind(args, kwargs).shapes(bound)
        chosen = None if platforms is None else tuple(platforms)
        return jax.export.export(self._jitted(), platforms=chosen)(*positional, **keywords)

    def _choose(self, call: Call, bound: int) -> tuple[Executable, int, str]:
        """What serves the call now: an executable, its bound, and how it came to serve."""
        key = call.key(bound)
        executable = self._executables.ready(key)
        if executable is not None:
            return executable, bound, "hits"
        if self._background:
            self._executables.start(key, self._builder(call, bound))
            for larger in (other for other in self.buckets.bounds if other > bound):
                executable = self._executables.ready(call.key(larger))
                if executable is not None:
                    return executable, larger, "borrowed"
        return self._executables.wait(key, self._builder(call, bound)), bound, "waits"

    def _builder(self, call: Call, bound: int) -> Callable[[], Executable]:
        """Compiles for the bucket, in whatever thread, under the settings of this one."""
        settings, operands = trace_settings(), call.shapes(bound)
        # A size that equals the bound by accident does not at another bound.
        other = self.buckets.bounds[-1 if bound == self.buckets.bounds[0] else 0]
        elsewhere, here, there = call.shapes(other), call.key(bound), call.key(other)

        def build() -> Executable:
            with under(settings):
                jitted = self._jitted()
                self._check_results(bound, jax.eval_shape(jitted, *operands[0], **operands[1]))
                if there not in self._checked:
                    self._check_results(other, jax.eval_shape(jitted, *elsewhere[0], **elsewhere[1]))
                self._checked |= {here, there}
                lower = functools.partial(jitted.lower, *operands[0], **operands[1])
                executable = compile_program(lower, self._compiler_options)
            amounts = {"compile_s": executable.compile_s, "memory_bytes": executable.memory_bytes}
            self.ledger.add(bound, compilations=1, loads=int(executable.loaded), **amounts)
            return executable

        return build

    def _jitted(self) -> Any:
        """The function under a jit of its own: jax keeps a program as long as the function that it came from."""
        return jax.jit(functools.wraps(self._fn)(lambda *args, **kwargs: self._fn(*args, **kwargs)))

    def _check_results(self, bound: int, result: Any) -> None:
        for (path, leaf), axis in self._results(result):
            if axis is not None and leaf.shape[axis] != bound:
                where = f"the result{jax.tree_util.keystr(path)}"
                expected = f"{where} with the padded size {bound} on axis {axis}"
                raise fail("out_axes", f"{expected}, or None for it", f"shape {list(leaf.shape)}")

    def _results(self, result: Any) -> list[tuple[tuple[Any, Any], int | None]]:
        """Each leaf of a result with its path and its padded axis."""
        flat = jax.tree_util.tree_leaves_with_path(result)
        axes = padding.axis_of_each_leaf("out_axes", self._out_axes, result)
        ranked = [
            None if axis is None else padding.from_left(f"the result{jax.tree_util.keystr(path)}", axis, leaf.shape)
            for (path, leaf), axis in zip(flat, axes, strict=True)
        ]
        return list(zip(flat, ranked, strict=True))

    def _run(self, call: Call, executable: Executable, bound: int, *fill: Callable[[Any], Any]) -> Any:
        """Pad, run, wait, unpad."""
        positional, keywords = call.padded(bound, *fill)
        result = jax.block_until_ready(executable.program(*positional, **keywords))
        leaves = [
            leaf if axis is None else padding.cut(f"the result{jax.tree_util.keystr(path)}", leaf, axis, call.length)
            for (path, leaf), axis in self._results(result)
        ]
        return jax.tree.unflatten(jax.tree.structure(result), leaves)

    def _enter(self, bound: int, kind: str, executable: Executable, seconds: float, padded: int, serving: int) -> None:
        """Put one call into the ledger."""
        state = "borrowed" if kind == "borrowed" else "steady"
        times: dict[str, float | int] = {f"{state}_s": seconds, f"{state}_calls": 1}
        if not executable.calls:
            times = {"first_calls_s": seconds}
        if kind == "borrowed":
            self.ledger.note(bound, lender=serving)
        executable.calls += 1
        self.ledger.add(bound, calls=1, padding=padded, **{kind: 1}, **times)

    def _evicted(self, key: Any, executable: Executable) -> None:
        self.ledger.add(key[0], memory_bytes=-executable.memory_bytes)


def specialize(
    fn: Callable[..., Any],
    buckets: ShapeBuckets | Iterable[int],
    *,
    in_axes: padding.Axes,
    out_axes: padding.Axes,
    length_arg: str | int | None,
    background: bool = False,
    max_executables: int | None = None,
    progress: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> Specialized:
    """A function that runs inputs of any length by executables compiled ahead of time for a few lengths.

        T -> b(T) = min {b in bounds : b >= T}                                                        (section 33.4)

    A call pads its operands with zeros to b(T), runs the bucket's executable, and cuts the results back to T. A bucket
    that is met for the first time compiles, after that no length does: not even padding and cutting, which happen on
    the host. Against the unpadded call the result is equal to rounding, and what the padding holds changes no bit,
    given that `fn` ignores it; `check_padding` tests that. With `functools.partial` this is a decorator.

    Args:
      fn: a pure function of arrays and pytrees of arrays; what is static is bound beforehand.
      buckets: the lengths to compile for, or their bounds.
      in_axes: which axis is padded, as `jax.vmap` takes it: an integer for all arguments, one entry for each (the
        length's may be left out), or a dict by name; an entry is a pytree prefix of integers and None. All padded axes
        of a call have one length.
      out_axes: the axis of the results that carries the length, as a pytree prefix; None leaves a result as it is.
      length_arg: the parameter, by name or position, that tells `fn` the true length. A call leaves it out and `fn`
        gets the length as an int32 scalar, or passes by keyword what serves it, such as one length for each row. None
        for a function without one, in which nothing depends on what follows, such as a causal one.
      background: compile a bucket in a thread while the next larger one that is ready serves. A call waits only where
        no larger one is ready, so warm up the largest first.
      max_executables: how many to keep; the one that was not used for longest goes first. None for all.
      progress: whether warming up shows a bar.
      compiler_options: of XLA, for every executable, such as `flashspec.loop_compiler_options()`.

    Returns:
      A `Specialized`: call it as `fn`; `warm_up`, `check_padding`, `time_op_by_op` and `export` take the same operands.

    Raises:
      ValueError: an argument does not fit. A call raises it for a length that is 0 or above the last bound, padded axes
        of several lengths, and a result that does not carry the padded axis.

    Source: chapter 33.4.
    """
    return Specialized(
        fn,
        buckets,
        in_axes=in_axes,
        out_axes=out_axes,
        length_arg=length_arg,
        background=background,
        max_executables=max_executables,
        progress=progress,
        compiler_options=compiler_options,
    )
