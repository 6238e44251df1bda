"""What every choice among implementations shares: names, refusals, platforms, and how operands are split."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import backend as jax_backend
from jax.sharding import NamedSharding

from flashspec.checks import fail, is_concrete, one_of

type Implementation = str | Sequence[str] | None

_KINDS = {"NVIDIA": "cuda", "TPU": "tpu", "AMD": "rocm", "cpu": "cpu"}


def named(implementation: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names that a caller gave, one or more; ValueError for one that does not exist."""
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not names:
        raise fail("implementation", "a name, a sequence of names, or None", repr(implementation))
    for name in names:
        one_of("implementation", name, known)
    return tuple(names)


def first_that_can(names: Sequence[str], refusals: Callable[[str], tuple[str, ...]]) -> str:
    """The first of `names` without refusals; NotImplementedError with all of them where each has some."""
    refused = {}
    for name in names:
        refused[name] = refusals(name)
        if not refused[name]:
            return name
    lines = [f"  {name}: {reason}" for name, reasons in refused.items() for reason in reasons]
    raise NotImplementedError("no implementation supports this call:\n" + "\n".join(lines))


def run_where_lowered(
    operands: Any, platform: str, select: Callable[[str], str], execute: Callable[[str, Any], Any]
) -> Any:
    """`execute(select(platform), operands)`, for the platform that the call will be lowered for.

    Concrete operands say where they are. While tracing, the platform is known to XLA alone, so where the platforms of
    this process would select differently, each one's selection is traced and the lowering keeps its own.

    Args:
      operands: of the call.
      platform: where they lie, or the default one.
      select: platform -> name; raises NotImplementedError where nothing can run the call.
      execute: (name, operands) -> result.

    Returns:
      The result.
    """
    default = select(platform)
    others: dict[str, str] = {}
    if not all(map(is_concrete, jax.tree.leaves(operands))):
        for other in platforms():
            try:
                others[other] = select(other)
            except NotImplementedError:
                continue  # a named kernel of one platform has nothing to run on another: `default` reports it there
    if all(name == default for name in others.values()):
        return execute(default, operands)
    branches: Mapping[str, Any] = {other: functools.partial(execute, name) for other, name in others.items()}
    return lax.platform_dependent(operands, default=functools.partial(execute, default), **branches)


def platforms() -> tuple[str, ...]:
    """Platforms of this process, by the names under which XLA lowers for them."""
    return tuple(sorted({platform_of(client.devices()[0]) for client in jax_backend.backends().values()}))


def platform_of(device: jax.Device) -> str:
    """The name under which XLA lowers for a device: "cpu", "cuda", "rocm" or "tpu"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def resolve_device(device: jax.Device | str | None, operand: Any) -> tuple[str, str]:
    """Kind and platform of the device to plan for: the one given, else where the operand lies, else the default one."""
    if isinstance(device, str):
        platform = next((value for start, value in _KINDS.items() if device.startswith(start)), None)
        if platform is None:
            raise fail("device", f"a jax.Device or a kind beginning with one of {tuple(_KINDS)}", repr(device))
        return device, platform
    if device is not None and not isinstance(device, jax.Device):
        raise fail("device", "a jax.Device, the kind of one, or None", repr(device))
    if device is not None:
        return device.device_kind, platform_of(device)
    placed = isinstance(operand, jax.Array) and is_concrete(operand)
    here: jax.Device = next(iter(operand.devices())) if placed else default_device()
    return here.device_kind, platform_of(here)


def default_device() -> jax.Device:
    """Where jax puts an array that nothing else places."""
    default: Any = jax.config.jax_default_device
    return jax.devices(default)[0] if default is None or isinstance(default, str) else default


def split_axes(operand: Any) -> tuple[int, ...]:
    """Axes of an operand that are split over devices.

    Sharding is seen on concrete arrays, on `ShapeDtypeStruct`s that carry one, and on tracers of meshes in explicit
    mode; inside a `jit` in automatic mode no operand has one.
    """
    traced = isinstance(operand, jax.core.Tracer)
    sharding = jax.typeof(operand).sharding if traced else getattr(operand, "sharding", None)
    if sharding is None:
        return ()
    if not isinstance(sharding, NamedSharding):
        return tuple(a for a, size in enumerate(sharding.shard_shape(operand.shape)) if size != operand.shape[a])
    names = [(entry,) if isinstance(entry, str) else entry for entry in sharding.spec]
    return tuple(
        axis for axis, entry in enumerate(names) if math.prod(sharding.mesh.shape[name] for name in entry or ()) > 1
    )
