"""Tuned launch settings: the best that were measured on a device, read from the files that ship with the kernels.

`pallas_kernels/tuned/<device>/<kernel>.json` holds one entry for each shape that was tuned, written by
`python -m experiments tune_attention`. A call takes the settings of its own shape, found by the exact `TuningKey`, and
no neighbour's; without an entry it takes the heuristic's, and settings that the caller gives come before both.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pallas_kernels
from flashspec.attention.request import AttentionRequest
from pallas_kernels.gpu.ampere.attention_backward_config import BackwardConfig as AmpereBackwardConfig
from pallas_kernels.gpu.ampere.attention_forward_config import ForwardConfig as AmpereForwardConfig
from pallas_kernels.gpu.hopper import attention_decode_config
from pallas_kernels.gpu.hopper.attention_backward_config import BackwardConfig, BackwardShape, config_refusals
from pallas_kernels.gpu.hopper.attention_decode_config import DecodeConfig, DecodeShape
from pallas_kernels.gpu.hopper.attention_forward_config import AttentionShape, ForwardConfig

FOLDER = Path(pallas_kernels.__file__).parent / "tuned"
MOST_SHARED_MEMORY = 227 * 1024  # bytes that a thread block has on the GPU with the most
GIVEN, TUNED, HEURISTIC = "given", "tuned", "heuristic"


@dataclasses.dataclass(frozen=True)
class TuningKey:
    """What an entry is found by: all of it has to be equal.

    Args:
      dtype: of query, key and value.
      heads: B * N, rounded up to a power of two: how many tiles there are to share out.
      T, S: queries and keys, as the kernel gets them (padded).
      G: query heads per key/value head.
      H, Hv: head sizes, as the kernel gets them.
      mask: "full", "causal", or "window (left, right)" with "inf" for no limit; then " segments" where there are ids.
        For decoding "dense", "window", or "pages of n".
      deterministic: whether the backward is.
    """

    dtype: str
    heads: int
    T: int
    S: int
    G: int
    H: int
    Hv: int
    mask: str
    deterministic: bool = False

    @property
    def shape(self) -> AttentionShape:
        """Sizes of a call with this key."""
        groups = max(1, self.heads // self.G)
        return AttentionShape(1, self.T, self.S, groups * self.G, groups, self.H, self.Hv)


class Entry(NamedTuple):
    """One tuned shape.

    Args:
      key: the shape.
      config: the best settings whose result passed its check.
      seconds, heuristic_seconds: medians of the two, taken in turn.
      error: of the result, relative to the norm of the float32 twin's.
      jax: the version that it was measured with.
    """

    key: TuningKey
    config: Any
    seconds: float
    heuristic_seconds: float
    error: float
    jax: str


def heads_of(rows: int) -> int:
    """The `heads` of a key for B * N = `rows`: the next power of two."""
    return 1 << max(0, rows - 1).bit_length()


def mask_of(is_causal: bool, window: tuple[int | None, int | None], segments: bool = False) -> str:
    """The `mask` of a key."""
    left, right = window[0], 0 if is_causal else window[1]
    kind = f"window ({_limit(left)}, {_limit(right)})"
    if left is None and right in (None, 0):
        kind = "full" if right is None else "causal"
    return kind + (" segments" if segments else "")


def key_of(request: AttentionRequest, shape: AttentionShape, deterministic: bool = False) -> TuningKey:
    """By what an entry of a call is found.

    Args:
      request: its static facts.
      shape: its sizes, as the kernel gets them.
      deterministic: whether the backward is.
    """
    return TuningKey(
        dtype=request.dtype.name,
        heads=heads_of(shape.B * shape.N),
        T=shape.T,
        S=shape.S,
        G=shape.G,
        H=shape.H,
        Hv=shape.Hv,
        mask=mask_of(request.is_causal, request.window, "q_segment_ids" in request.options),
        deterministic=deterministic,
    )


def choose[Config](
    kernel: str, device: str | None, key: TuningKey | None, given: Config | None, heuristic: Callable[[], Config]
) -> tuple[Config, str]:
    """The settings of a launch, and where they come from: "given", "tuned" or "heuristic".

    Args:
      kernel: of `KERNELS`.
      device: kind of the device, such as "NVIDIA H200"; None where it is not known.
      key: of the call; None for one that is never tuned.
      given: what the caller gave, which comes before everything.
      heuristic: makes what is used otherwise.

    Raises:
      ValueError: the file of the kernel and the device is corrupt, or holds illegal settings; the message names it.
    """
    if given is not None:
        return given, GIVEN
    entry = None if device is None or key is None else packaged(kernel, device).get(key)
    return (heuristic(), HEURISTIC) if entry is None else (entry.config, TUNED)


def packaged(kernel: str, device: str) -> Mapping[TuningKey, Entry]:
    """The entries that ship for a kernel on a device; empty where there is no file."""
    return _packaged(FOLDER, kernel, device)


@functools.lru_cache
def _packaged(folder: Path, kernel: str, device: str) -> Mapping[TuningKey, Entry]:
    file = folder / device / f"{kernel}.json"
    return {entry.key: entry for entry in read(file, kernel, device)} if file.is_file() else {}


def write(entries: Sequence[Entry], kernel: str, device: str) -> str:
    """The text of a file that `read` reads, ordered by shape."""
    rows = [entry._asdict() for entry in sorted(entries, key=lambda entry: dataclasses.astuple(entry.key))]
    rows = [row | {"key": dataclasses.asdict(row["key"]), "config": dataclasses.asdict(row["config"])} for row in rows]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    head = f'{{\n  "kernel": {json.dumps(kernel)},\n  "device": {json.dumps(device)},\n  "entries": [\n'
    return f"{head}{lines}\n  ]\n}}\n"


def read(file: Path, kernel: str, device: str) -> tuple[Entry, ...]:
    """The entries of a file, each checked.

    Args:
      file: to read.
      kernel: of `KERNELS`, and named in the file.
      device: its kind, named in the file.

    Raises:
      ValueError: what the file holds is no JSON, or not of this form, or settings that the kernel does not take; the
        message names file, entry and remedy.
    """
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        names = {"kernel": kernel, "device": device}
        if not isinstance(held, dict) or {name: held.get(name) for name in names} != names:
            raise ValueError(f"expected the tuned settings of {names}")
        rows = _exactly(held, ("kernel", "device", "entries"))["entries"]
        if not isinstance(rows, list):
            raise ValueError(f"expected `entries` to be a list, got {rows!r}")
    except ValueError as error:
        raise _corrupt(file, "the file", error) from error
    entries: dict[TuningKey, Entry] = {}
    for number, row in enumerate(rows):
        try:
            entry = _entry(row, kernel)
            if entry.key in entries:
                raise ValueError("its key is that of another entry")
        except (TypeError, ValueError) as error:
            key = row.get("key") if isinstance(row, dict) else row
            raise _corrupt(file, f"entry {number} ({key})", error) from error
        entries[entry.key] = entry
    return tuple(entries.values())


def _entry(row: Any, kernel: str) -> Entry:
    held = _exactly(row, Entry._fields)
    key = TuningKey(**_typed(held["key"], TuningKey))
    config = KERNELS[kernel].config(**_typed(held["config"], KERNELS[kernel].config))
    reasons = KERNELS[kernel].refusals(key, config)
    if reasons:
        raise ValueError("; ".join(reasons))
    for name in ("seconds", "heuristic_seconds", "error"):
        if isinstance(held[name], bool) or not isinstance(held[name], int | float) or not 0 <= held[name] < math.inf:
            raise ValueError(f"expected `{name}` to be a finite number of at least 0, got {held[name]!r}")
    if not isinstance(held["jax"], str):
        raise ValueError(f"expected `jax` to be a version, got {held['jax']!r}")
    return Entry(**held | {"key": key, "config": config})


def _typed(held: Any, kind: type) -> dict[str, Any]:
    """The fields of a dataclass of numbers, flags and names, each of its own type.

    One that a file does not have takes its default: it came after the file was written.
    """
    fields = dataclasses.fields(kind)
    types = {field.name: field.type for field in fields}
    if isinstance(held, dict):
        held = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING} | held
    for name, value in _exactly(held, tuple(types)).items():
        if type(value) is not types[name]:
            raise ValueError(f"expected `{name}` to be of type {types[name]}, got {value!r}")
    return held


def _exactly(held: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(held, dict) or set(held) != set(names):
        raise ValueError(f"expected exactly the fields {', '.join(names)}, got {held!r}")
    return held


def _corrupt(file: Path, where: str, error: Exception) -> ValueError:
    return ValueError(
        f"{file}: {where}: {error}. Delete it to use the heuristic, or write it anew by "
        "`python -m experiments tune_attention`"
    )


def _limit(side: int | None) -> str:
    return "inf" if side is None else str(side)


class Kernel(NamedTuple):
    """A kernel that can be tuned: its settings, and why a call cannot have some of them."""

    config: type
    refusals: Callable[[TuningKey, Any], tuple[str, ...]]


def _backward_refusals(key: TuningKey, config: BackwardConfig) -> tuple[str, ...]:
    return config_refusals(BackwardShape(*key.shape), config, deterministic=key.deterministic)


def _decode_refusals(key: TuningKey, config: DecodeConfig) -> tuple[str, ...]:
    B, T, S, N, K, H, _ = key.shape
    return attention_decode_config.config_refusals(DecodeShape(B, T, S, N, K, H), config)


KERNELS: Mapping[str, Kernel] = {
    "attention_forward": Kernel(ForwardConfig, lambda key, config: config.refusals(key.shape)),
    "attention_backward": Kernel(BackwardConfig, _backward_refusals),
    "attention_decode": Kernel(DecodeConfig, _decode_refusals),
    "ampere_attention_forward": Kernel(
        AmpereForwardConfig, lambda key, config: config.refusals(key.shape, MOST_SHARED_MEMORY)
    ),
    "ampere_attention_backward": Kernel(
        AmpereBackwardConfig,
        lambda key, config: config.refusals(key.shape, MOST_SHARED_MEMORY, deterministic=key.deterministic),
    ),
}
