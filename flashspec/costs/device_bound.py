"""The lower bound on the time of a piece of work, and what bounds it (section 33.1)."""

import dataclasses

from flashspec.checks import at_least, fail
from flashspec.costs.numbers import Number, nonnegative, positive, ratio
from flashspec.devices import DeviceFacts

COMPUTE, MEMORY, LAUNCH = "compute", "memory", "launch"
FLOP_RATES = {2: "bf16_flops", 4: "f32_flops"}  # by bytes an element


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
    if itemsize not in FLOP_RATES:
        raise fail("itemsize", "2 or 4 bytes", itemsize)
    flops, bandwidth = getattr(facts, FLOP_RATES[itemsize]), facts.memory_bandwidth
    if flops is None or bandwidth is None:
        raise fail("facts", f"a device with {FLOP_RATES[itemsize]} and memory_bandwidth (else calibrate)", facts.name)
    sources = {facts.sources[name] for name in (FLOP_RATES[itemsize], "memory_bandwidth")}
    return Rates(flops, bandwidth, launch_s, "; ".join(sorted(sources)))


def sheet_bound_s(flops: Number, bytes_moved: Number, facts: DeviceFacts, itemsize: int) -> float | None:
    """`roofline`'s lower bound by whichever peak rates the vendor's sheet gives for a dtype.

    Args:
      flops: F >= 0, operations.
      bytes_moved: Q >= 0, bytes to and from memory.
      facts: of the device.
      itemsize: bytes an element; without a rate for it, transfers alone bound the time.

    Returns:
      Seconds; None where the sheet gives neither rate.

    Raises:
      ValueError: a negative or non-finite number.

    Source: chapter 33.1.
    """
    peak, bandwidth = getattr(facts, FLOP_RATES.get(itemsize, ""), None), facts.memory_bandwidth
    if peak is None and bandwidth is None:
        return None
    # A rate that is not given bounds nothing: that part of the work counts as none.
    work = flops if peak is not None else 0, bytes_moved if bandwidth is not None else 0
    return float(roofline(*work, Rates(peak or 1, bandwidth or 1, 0, facts.name)).lower_bound_s)
