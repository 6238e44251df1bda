"""What every choice among implementations shares: names, refusals, platforms, and how operands are split."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import backend as jax_backend
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from flashspec.checks import fail, is_concrete, one_of
from flashspec.devices import find_device_facts

type Implementation = str | Sequence[str] | None

_KINDS = {"NVIDIA": "cuda", "TPU": "tpu", "AMD": "rocm", "cpu": "cpu"}


class Target(NamedTuple):
    """What a call is compiled for.

    Args:
      kind: of the device, as `jax.Device.device_kind`.
      platform: the name under which XLA lowers for it: "cpu", "cuda", "rocm" or "tpu".
      compute_capability: of a CUDA GPU, such as "9.0"; None elsewhere and where it is not known.
    """

    kind: str
    platform: str
    compute_capability: str | None = None


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
    operands: Any, target: Target, select: Callable[[Target], str], execute: Callable[[str, Any], Any]
) -> Any:
    """`execute(select(target), operands)`, for the platform that the call will be lowered for.

    Concrete operands say where they are. While tracing, the platform is known to XLA alone, so where the platforms of
    this process would select differently, each one's selection is traced and the lowering keeps its own.

    Args:
      operands: of the call.
      target: where they lie, or the default one.
      select: target -> name; raises NotImplementedError where nothing can run the call.
      execute: (name, operands) -> result.

    Returns:
      The result.
    """
    default = select(target)
    others: dict[str, str] = {}
    if not all(map(is_concrete, jax.tree.leaves(operands))):
        for other in targets():
            try:
                others[other.platform] = select(other)
            except NotImplementedError:
                continue  # a named kernel of one platform has nothing to run on another: `default` reports it there
    if all(name == default for name in others.values()):
        return execute(default, operands)
    branches: Mapping[str, Any] = {other: functools.partial(execute, name) for other, name in others.items()}
    return lax.platform_dependent(operands, default=functools.partial(execute, default), **branches)


def targets() -> tuple[Target, ...]:
    """The platforms of this process, each by its first device."""
    found = [target_of(client.devices()[0]) for client in jax_backend.backends().values()]
    return tuple({target.platform: target for target in found}.values())


def target_of(device: jax.Device) -> Target:
    """What a call is compiled for on a device."""
    platform = platform_of(device)
    capability = str(device.compute_capability) if platform == "cuda" else None
    return Target(device.device_kind, platform, capability)


def platform_of(device: jax.Device) -> str:
    """The name under which XLA lowers for a device: "cpu", "cuda", "rocm" or "tpu"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def device_named(platform: str, compute_capability: str | None) -> str:
    """What a refusal calls a device: its platform, and of a CUDA GPU the compute capability."""
    return f"cuda of compute capability {compute_capability or 'unknown'}" if platform == "cuda" else platform


def elsewhere(capability: str, platform: str, compute_capability: str | None) -> tuple[str, ...]:
    """Why a kernel for GPUs of one compute capability cannot run on a device; empty when it can."""
    here, device = device_named("cuda", capability), device_named(platform, compute_capability)
    return () if device == here else (f"runs on {here} only, not on {device}",)


def resolve_device(device: jax.Device | str | None, operand: Any) -> Target:
    """The device to plan for: the one given, else where the operand lies, else the default one."""
    if isinstance(device, str):
        platform = next((value for start, value in _KINDS.items() if device.startswith(start)), None)
        if platform is None:
            raise fail("device", f"a jax.Device or a kind beginning with one of {tuple(_KINDS)}", repr(device))
        facts = find_device_facts(device)
        return Target(device, platform, None if facts is None else facts.compute_capability)
    if device is not None and not isinstance(device, jax.Device):
        raise fail("device", "a jax.Device, the kind of one, or None", repr(device))
    placed = isinstance(operand, jax.Array) and is_concrete(operand)
    return target_of(device or (next(iter(operand.devices())) if placed else default_device()))


def default_device() -> jax.Device:
    """Where jax puts an array that nothing else places."""
    default: Any = jax.config.jax_default_device
    return jax.devices(default)[0] if default is None or isinstance(default, str) else default


def split_axes(operand: Any) -> tuple[int, ...]:
    """Axes of an operand that are split over devices, as far as `shards` sees."""
    return tuple(axis for axis in range(len(getattr(operand, "shape", ()))) if shards(operand, axis) > 1)


def shards(operand: Any, axis: int) -> int:
    """Into how many parts devices split an axis of an operand.

    Sharding is seen on concrete arrays, on `ShapeDtypeStruct`s that carry one, and on tracers of meshes in explicit
    mode; inside a `jit` in automatic mode no operand has one.
    """
    traced = isinstance(operand, jax.core.Tracer)
    sharding = jax.typeof(operand).sharding if traced else getattr(operand, "sharding", None)
    if sharding is None:
        return 1
    if not isinstance(sharding, NamedSharding):
        return operand.shape[axis] // max(1, sharding.shard_shape(operand.shape)[axis])
    entry = sharding.spec[axis] if axis < len(sharding.spec) else None
    return math.prod(sharding.mesh.shape[name] for name in axis_names(entry))


def axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a spec names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


class Placement(NamedTuple):
    """How an operand lies on the several devices of a mesh.

    Args:
      mesh: with the axes that are left to split over; None where the operand lies on no mesh.
      spec: for each axis of the operand the mesh axes over which it is split, None for none of them; None in place of
        all where that is not visible, which is so while tracing over a mesh in automatic mode.
    """

    mesh: Mesh | AbstractMesh | None
    spec: tuple[Any, ...] | None

    def parts(self, axis: int) -> int:
        """Into how many parts an axis is split, as far as that is visible."""
        entry = None if self.spec is None or self.mesh is None else self.spec[axis]
        return math.prod(self.mesh.shape[name] for name in axis_names(entry)) if self.mesh else 1


def placement(operand: Any) -> Placement | None:
    """Where an operand lies; None for one device, and for the part of one device inside `jax.shard_map`."""
    traced = isinstance(operand, jax.core.Tracer)
    sharding = jax.typeof(operand).sharding if traced else getattr(operand, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None if sharding is None or sharding.num_devices == 1 else Placement(None, None)
    mesh = sharding.mesh
    free = {kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if mesh.shape[name] > 1}
    free -= {AxisType.Manual}
    if not free:
        return None
    if traced and free != {AxisType.Explicit}:
        return Placement(mesh, None)
    return Placement(mesh, (*sharding.spec, *[None] * (len(operand.shape) - len(sharding.spec))))
