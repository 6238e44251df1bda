"""What a roofline needs to know of a device, each number with the document that it was read from.

Numbers are for one jax device (half a chip on TPU7x, a whole chip elsewhere), dense (no sparsity), at the vendor's
boost clock: they bound what a program can reach and promise nothing. What no document says is None, never a guess.
"""

import dataclasses
import types
from collections.abc import Mapping

from flashspec.checks import fail

H200 = "NVIDIA H200 Tensor Core GPU datasheet, SXM; tensor-core rates halved, since it prints those with sparsity"
H100 = "NVIDIA H100 Tensor Core GPU datasheet; tensor-core rates halved, since it prints those with sparsity"
HOPPER = "NVIDIA H100 Tensor Core GPU Architecture white paper"
HOPPER_TUNING = "NVIDIA Hopper Tuning Guide, shared memory: 228 KB an SM, 227 KB a thread block"
A100 = "NVIDIA A100 Tensor Core GPU datasheet"
AMPERE = "NVIDIA A100 Tensor Core GPU Architecture white paper"
AMPERE_TUNING = "NVIDIA Ampere GPU Architecture Tuning Guide, shared memory: 164 KB an SM, 163 KB a thread block"
CLOUD_TPU = "Google Cloud TPU documentation, the version's page, per chip"
HALF_TPU7X = "Google Cloud TPU documentation, TPU7x, halved: each of a chip's two TensorCores is a jax device"
PALLAS_TPU = "jax documentation, Pallas TPU hardware reference, per TensorCore"
PALLAS_TPU7X = "jax documentation, Pallas TPU hardware reference, per TensorCore (which is the jax device)"

CAPABILITIES = "NVIDIA, CUDA GPU Compute Capability"

FACTS = (
    *("bf16_flops", "f32_flops", "memory_bandwidth", "memory_bytes", "cores", "on_chip_bytes"),
    "compute_capability",
)


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """Facts of one jax device.

    Attributes:
      name: what people call it.
      bf16_flops: peak matrix rate in bfloat16 with float32 accumulation, FLOP/s.
      f32_flops: peak float32 rate outside the matrix units, FLOP/s.
      memory_bandwidth: of device memory, bytes/s.
      memory_bytes: size of device memory.
      cores: streaming multiprocessors of a GPU, TensorCores of a TPU device.
      compute_capability: of an NVIDIA GPU, such as "9.0".
      on_chip_bytes: what one program may use in one core: shared memory of a thread block, VMEM of a TensorCore.
      sources: fact -> the document that states it; exactly the facts that are not None.
    """

    name: str
    bf16_flops: float | None = None
    f32_flops: float | None = None
    memory_bandwidth: float | None = None
    memory_bytes: float | None = None
    cores: int | None = None
    on_chip_bytes: int | None = None
    compute_capability: str | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        known = {fact for fact in FACTS if getattr(self, fact) is not None}
        if known != set(self.sources):
            raise fail("sources", f"one for each of {sorted(known)}", sorted(self.sources))
        object.__setattr__(self, "sources", types.MappingProxyType(dict(self.sources)))


def _facts(name: str, **stated: tuple[float | int | str, str]) -> DeviceFacts:
    values = {fact: value for fact, (value, _) in stated.items()}
    return DeviceFacts(name, **values, sources={fact: source for fact, (_, source) in stated.items()})  # type: ignore[arg-type]


def _hopper(
    name: str, sheet: str, *, bf16: float, f32: float, bandwidth: float, memory: float, cores: int
) -> DeviceFacts:
    return _facts(
        name,
        bf16_flops=(bf16, sheet),
        f32_flops=(f32, sheet),
        memory_bandwidth=(bandwidth, sheet),
        memory_bytes=(memory, sheet),
        cores=(cores, HOPPER),
        on_chip_bytes=(227 * 2**10, HOPPER_TUNING),
        compute_capability=("9.0", CAPABILITIES),
    )


def _a100(name: str, *, bandwidth: float, memory: float) -> DeviceFacts:
    return _facts(
        name,
        bf16_flops=(312e12, A100),
        f32_flops=(19.5e12, A100),
        memory_bandwidth=(bandwidth, A100),
        memory_bytes=(memory, A100),
        cores=(108, AMPERE),
        on_chip_bytes=(163 * 2**10, AMPERE_TUNING),
        compute_capability=("8.0", CAPABILITIES),
    )


def _tpu(name: str, *, bf16: float, bandwidth: float, memory: float, cores: int, vmem: int) -> DeviceFacts:
    return _facts(
        name,
        bf16_flops=(bf16, CLOUD_TPU),
        memory_bandwidth=(bandwidth, CLOUD_TPU),
        memory_bytes=(memory, CLOUD_TPU),
        cores=(cores, PALLAS_TPU),
        on_chip_bytes=(vmem, PALLAS_TPU),
    )


_H200 = _hopper("NVIDIA H200 SXM", H200, bf16=989.5e12, f32=67e12, bandwidth=4.8e12, memory=141e9, cores=132)
_H100_SXM = _hopper("NVIDIA H100 SXM", H100, bf16=989.5e12, f32=67e12, bandwidth=3.35e12, memory=80e9, cores=132)
_H100_PCIE = _hopper("NVIDIA H100 PCIe", H100, bf16=756.5e12, f32=51e12, bandwidth=2e12, memory=80e9, cores=114)
_V5E = _tpu("TPU v5e", bf16=197e12, bandwidth=819e9, memory=16e9, cores=1, vmem=128 * 2**20)
_V5P = _tpu("TPU v5p", bf16=459e12, bandwidth=2765e9, memory=95e9, cores=2, vmem=64 * 2**20)
_V6E = _tpu("TPU v6e", bf16=918e12, bandwidth=1638e9, memory=32e9, cores=1, vmem=128 * 2**20)
_V7X = _facts(
    "TPU7x (one TensorCore)",
    bf16_flops=(2307e12 / 2, HALF_TPU7X),
    memory_bandwidth=(7.4e12 / 2, PALLAS_TPU7X),
    memory_bytes=(192 * 2**30 / 2, HALF_TPU7X),
    cores=(1, PALLAS_TPU7X),
    on_chip_bytes=(64 * 2**20, PALLAS_TPU7X),
)

DEVICES: Mapping[str, DeviceFacts] = types.MappingProxyType(
    {
        "cpu": DeviceFacts("CPU"),
        "NVIDIA H200": _H200,
        "NVIDIA H100 80GB HBM3": _H100_SXM,
        "NVIDIA H100 PCIe": _H100_PCIE,
        "NVIDIA A100-SXM4-40GB": _a100("NVIDIA A100 SXM 40 GB", bandwidth=1555e9, memory=40e9),
        "NVIDIA A100-SXM4-80GB": _a100("NVIDIA A100 SXM 80 GB", bandwidth=2039e9, memory=80e9),
        "NVIDIA A100 80GB PCIe": _a100("NVIDIA A100 PCIe 80 GB", bandwidth=1935e9, memory=80e9),
        "TPU v5 lite": _V5E,
        "TPU v5e": _V5E,
        "TPU v5": _V5P,
        "TPU v5p": _V5P,
        "TPU v6 lite": _V6E,
        "TPU v6e": _V6E,
        "TPU7x": _V7X,
    }
)


def find_device_facts(kind: str) -> DeviceFacts | None:
    """The facts of a device by `jax.Device.device_kind`, or None for a device that is not in the table."""
    return DEVICES.get(kind)


def device_facts(kind: str) -> DeviceFacts:
    """The facts of a device, by `jax.Device.device_kind`.

    Args:
      kind: the name that jax gives the device, such as "NVIDIA H200" or "TPU v5 lite".

    Returns:
      Its `DeviceFacts`; for "cpu" every number is None, since CPUs differ.

    Raises:
      ValueError: the device is not in the table; the message lists those that are.
    """
    facts = find_device_facts(kind)
    if facts is None:
        raise fail("kind", "a known device (" + ", ".join(sorted(DEVICES)) + ")", repr(kind))
    return facts


_ASSUMED = "NVIDIA H200"  # what a launch on Hopper is shaped for where the device is not known


def multiprocessors(kind: str | None) -> int:
    """Streaming multiprocessors of an NVIDIA GPU, to shape a launch for: any number of them runs it.

    Args:
      kind: of the device, as `jax.Device.device_kind`; for None, and for one whose number no document says, those of
        an H200.
    """
    facts = find_device_facts(kind or _ASSUMED)
    if facts is None or facts.compute_capability is None or facts.cores is None:
        facts = device_facts(_ASSUMED)
    assert facts.cores is not None
    return facts.cores
