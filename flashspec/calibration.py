"""Rates of the device at hand, measured in a second or two, and the work that a compiled program does."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flashspec.checks import at_least
from flashspec.costs import Rates
from flashspec.measure import HOST, compile_call, time_call

# Large enough that neither launches nor caches decide, small enough to take a moment: (matrix rows, copied elements).
SIZES = {"cpu": (768, 2**24), "gpu": (8192, 2**28), "tpu": (8192, 2**28)}


@dataclasses.dataclass(frozen=True)
class Work:
    """What a program does, by the compiler's own count.

    Attributes:
      flops: operations.
      bytes_moved: bytes that its instructions read and write.
    """

    flops: float
    bytes_moved: float


def program_work(executable: jax.stages.Compiled) -> Work:
    """The work of a compiled program, for `flashspec.costs.roofline`.

    The compiler sees into its own instructions. Library and kernel calls are opaque to it: it counts their operands but
    not their operations, so that a program with such calls is bound by a formula instead.

    Args:
      executable: compiled ahead of time.

    Returns:
      Its operations and bytes.

    Raises:
      NotImplementedError: the platform does not say.
    """
    analysis: Any = executable.cost_analysis()
    if not analysis or "bytes accessed" not in analysis:
        raise NotImplementedError(f"{jax.default_backend()} does not count the work of a compiled program")
    return Work(float(analysis.get("flops", 0.0)), float(analysis["bytes accessed"]))


def calibrate(dtype: Any = jnp.float32, *, repeats: int = 5) -> Rates:
    """Measure what this device does in a second: a square product, a copy, and a program that does nothing.

    Args:
      dtype: of the product.
      repeats: of each program; medians count.

    Returns:
      Rates that say how they were measured; on a GPU product and copy are timed on the device, the launch by the host.

    Raises:
      ValueError: `repeats` is below 1.
    """
    at_least("repeats", repeats, 1)
    rows, elements = SIZES[jax.default_backend()]
    precision = "highest" if jnp.dtype(dtype).itemsize > 2 else None
    matrix, vector = jnp.ones((rows, rows), dtype), jnp.ones(elements, jnp.float32)
    one = jnp.ones((), jnp.float32)
    square = compile_call(lambda a: jnp.matmul(a, a, precision=precision), matrix)
    product, copy = (time_call(call, repeats=repeats) for call in (square, compile_call(lambda x: x + one, vector)))
    nothing = time_call(compile_call(lambda x: x + one, one), repeats=10 * repeats, clock=HOST)
    return Rates(
        flops=2 * rows**3 / product.steady_s,
        bandwidth=2 * vector.nbytes / copy.steady_s,
        launch_s=nothing.steady_s,
        source=f"measured on {jax.devices()[0].device_kind}: a {rows} x {rows} {jnp.dtype(dtype).name} product and a "
        f"copy of {vector.nbytes} bytes by {product.clock}, an empty program by {HOST}",
    )
