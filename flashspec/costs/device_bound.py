"""The lower bound on the time of a piece of work, and what bounds it (section 33.1)."""

import dataclasses

from flashspec.checks import at_least, fail
from flashspec.costs.numbers import Number, nonnegative, positive, ratio
from flashspec.devices import DeviceFacts

COMPUTE, MEMORY, LAUNCH = "compute", "memory", "launch"


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
      flops: R, operations a second in the dtype in question.
      bandwidth: b, bytes a second to and from its memory.
      launch_s: seconds that starting one program costs, whatever it computes.
      source: the document, or the measurement, that says so.
    """

    flops: Number
    bandwidth: Number
    launch_s: Number
    source: str

    def __post_init__(self) -> None:
        positive("flops", self.flops)
        positive("bandwidth", self.bandwidth)
        nonnegative("launch_s", self.launch_s)
        if not self.source:
            raise fail("source", "where the rates come from", repr(self.source))


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The parts of the bound, in seconds.

    Attributes:
      compute_s: F / R.
      memory_s: Q / b.
      launch_s: of all launches.
    """

    compute_s: Number
    memory_s: Number
    launch_s: Number

    @property
    def lower_bound_s(self) -> Number:
        """max(F / R, Q / b): no program is faster, and few reach it, since launches and synchronisation come on top."""
        return max(self.compute_s, self.memory_s)

    @property
    def bound_by(self) -> str:
        """ "compute", "memory" or "launch", whichever takes longest; computing wins ties, then memory."""
        parts = {COMPUTE: self.compute_s, MEMORY: self.memory_s, LAUNCH: self.launch_s}
        return max(parts, key=lambda part: parts[part])


def roofline(flops: Number, bytes_moved: Number, rates: Rates, *, launches: int = 1) -> Roofline:
    """How long a piece of work takes at least.

    max(F / R, Q / b)                                                                                 (section 33.1)

    Operations and transfers overlap, so the bound is their maximum and not their sum. It is no latency: small work
    waits for its launch, which is why the class of a result may be "launch".

    Args:
      flops: F >= 0, operations, from a formula or `flashspec.calibration.program_work`.
      bytes_moved: Q >= 0, bytes to and from memory.
      rates: of the device, from `sourced_rates` or `flashspec.calibration.calibrate`.
      launches: programs or kernels that are started.

    Returns:
      The parts; `lower_bound_s` and `bound_by` follow.

    Raises:
      ValueError: a negative or non-finite number.

    Source: chapter 33.1.
    """
    nonnegative("flops", flops)
    nonnegative("bytes_moved", bytes_moved)
    launched = at_least("launches", launches, 0) * rates.launch_s
    return Roofline(ratio(flops, rates.flops), ratio(bytes_moved, rates.bandwidth), launched)


def sourced_rates(facts: DeviceFacts, itemsize: int, *, launch_s: Number = 0) -> Rates:
    """The vendor's peak rates for a dtype; what a program reaches is less.

    Args:
      facts: of the device, from `flashspec.devices.device_facts`.
      itemsize: bytes an element: 2 for 16-bit floats on matrix units, 4 for float32 outside of them.
      launch_s: seconds of a launch, which no data sheet gives.

    Returns:
      The rates with their sources.

    Raises:
      ValueError: the sheets give no rate for that itemsize, or no bandwidth.
    """
    names = {2: "bf16_flops", 4: "f32_flops"}
    if itemsize not in names:
        raise fail("itemsize", "2 or 4 bytes", itemsize)
    flops, bandwidth = getattr(facts, names[itemsize]), facts.memory_bandwidth
    if flops is None or bandwidth is None:
        raise fail("facts", f"a device with {names[itemsize]} and memory_bandwidth (else calibrate)", facts.name)
    sources = {facts.sources[name] for name in (names[itemsize], "memory_bandwidth")}
    return Rates(flops, bandwidth, launch_s, "; ".join(sorted(sources)))
