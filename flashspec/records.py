"""Measurement records: what was timed, on what machine, with quantities that differ kept in different fields.

A file of records is JSON lines. Compile, first call, steady state, time to first token, time per later token and
queueing are never added up: each has its field, None where it was not measured (section 33.7).
"""

import dataclasses
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from flashspec.checks import fail

TTFT_METHODS = ("one-token program", "stream")
TIMES = ("compile_s", "first_call_s", "steady_s", "ttft_s", "time_per_later_token_s", "queueing_s")


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where numbers come from, as far as they depend on it.

    Attributes:
      python, jax, jaxlib: versions.
      platform: jax's backend: "cpu", "gpu" or "tpu".
      device, device_count: kind and number of the devices that jax shows.
      os, cpu: of the host; None where unknown.
      commit: of the checkout that ran, with "+changes" when its files differ; None outside a checkout.
      x64: whether 64-bit mode is on.
      matmul_precision: jax's default, None for the platform's own.
    """

    python: str
    jax: str
    jaxlib: str
    platform: str
    device: str
    device_count: int
    os: str
    cpu: str | None
    commit: str | None
    x64: bool
    matmul_precision: str | None


@dataclasses.dataclass(frozen=True)
class PerformanceRecord:
    """One measurement. Times are in seconds, None where there is none.

    Attributes:
      name: what was measured, such as "plain" or "speculative".
      environment: where.
      command: the command line that produces the record again.
      date: UTC, ISO 8601.
      settings: what was chosen: shapes, dtype, draft length, seed.
      clock: what the times were read from; required when there is a time.
      compile_s: tracing, lowering and compiling, ahead of time.
      first_call_s: the first call of the executable.
      steady_s: median of the later calls.
      steady_low_s, steady_high_s: their quartiles.
      repeats: calls that the median is over.
      ttft_s: time to first token, prefill (the draft's too) included.
      ttft_method: one of `TTFT_METHODS`; required with `ttft_s`.
      time_per_later_token_s: (total - first) / (n - 1).
      queueing_s: waiting before the work began.
      check: the correctness check of the same call that passed; required in a record that states a ratio.
      values: what was counted or computed, by name: tokens, acceptance, bytes, ratios.
    """

    name: str
    environment: Environment
    command: str
    date: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clock: str | None = None
    compile_s: float | None = None
    first_call_s: float | None = None
    steady_s: float | None = None
    steady_low_s: float | None = None
    steady_high_s: float | None = None
    repeats: int | None = None
    ttft_s: float | None = None
    ttft_method: str | None = None
    time_per_later_token_s: float | None = None
    queueing_s: float | None = None
    check: str | None = None
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        times = [field.name for field in dataclasses.fields(self) if field.name.endswith("_s")]
        measured = {name: getattr(self, name) for name in times if getattr(self, name) is not None}
        for name, value in measured.items():
            if not (math.isfinite(value) and value >= 0):
                raise fail(name, "a finite time of at least 0 s", value)
        if measured and not self.clock:
            raise fail("clock", f"the clock that {', '.join(measured)} was read from", self.clock)
        if self.ttft_s is not None and self.ttft_method not in TTFT_METHODS:
            raise fail("ttft_method", f"one of {TTFT_METHODS}, since they time different things", self.ttft_method)
        if not self.check and any("speedup" in name or "ratio" in name for name in self.values):
            raise fail("check", "the passed correctness check of the same call, beside a ratio", self.check)


def environment(root: Path | None = None) -> Environment:
    """The fingerprint of this process and machine; `root` is the checkout whose commit is asked for."""
    devices = jax.devices()
    return Environment(
        python=platform.python_version(),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        platform=jax.default_backend(),
        device=devices[0].device_kind,
        device_count=len(devices),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_model(),
        commit=_commit(root or Path(__file__).parent),
        x64=bool(jax.config.jax_enable_x64),
        matmul_precision=jax.config.jax_default_matmul_precision,
    )


def _cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(models, platform.processor()) or None


def _commit(root: Path) -> str | None:
    def git(*command: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain") else commit


def command_line() -> str:
    """How this process was started, as one would type it again."""
    script = Path(sys.argv[0])
    program = ["-m", script.parent.name] if script.name == "__main__.py" else [str(script)]
    return shlex.join(["python", *program, *sys.argv[1:]])


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_records(path: str | os.PathLike[str], records: Iterable[PerformanceRecord], *, append: bool = False) -> None:
    """Write records as JSON lines.

    Args:
      path: the file; its folder is made.
      records: what to write. NaN and infinities are refused: JSON has none.
      append: keep what the file holds.

    Raises:
      ValueError: a value is not finite.
      TypeError: a value has no JSON form.
    """
    lines = [json.dumps(dataclasses.asdict(record), allow_nan=False) for record in records]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a" if append else "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def read_records(path: str | os.PathLike[str]) -> list[PerformanceRecord]:
    """Read records back.

    Raises:
      ValueError: a line is no record; the message names file and line.
    """
    with open(path, encoding="utf-8") as file:
        return [_parse(line, f"{path}:{number}") for number, line in enumerate(file, start=1) if line.strip()]


def _parse(line: str, where: str) -> PerformanceRecord:
    try:
        fields = json.loads(line)
        return PerformanceRecord(**{**fields, "environment": Environment(**fields["environment"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: not a measurement record: {error!r}") from error


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One time of one call, before and after.

    Attributes:
      name, settings: of the records compared.
      field: which time; different times are never added up.
      ratio: median before over median after: above 1, it became faster.
      spread: the least and the greatest ratio that quartiles (or several records of one call) allow; None where each
        side has one number.
      counts: records before and after.
    """

    name: str
    settings: Mapping[str, Any]
    field: str
    ratio: float
    spread: tuple[float, float] | None
    counts: tuple[int, int]

    def __str__(self) -> str:
        spread = "no spread" if self.spread is None else f"{self.spread[0]:.3g} to {self.spread[1]:.3g}"
        return f"{self.name} {json.dumps(dict(self.settings))} {self.field}: {self.ratio:.4g} ({spread})"


@dataclasses.dataclass(frozen=True)
class RecordComparison:
    """What `compare` found; `print` shows it as lines.

    Attributes:
      comparisons: one for each name, settings and time that both files have.
      left_out: what could not be compared, each with its reason.
      differences: fields of the environments that differ, before and after; the ratios are of these too.
    """

    comparisons: tuple[Comparison, ...]
    left_out: tuple[str, ...]
    differences: Mapping[str, tuple[Any, Any]]

    def __str__(self) -> str:
        differing = (f"{name}: {old!r} before, {new!r} after" for name, (old, new) in self.differences.items())
        return "\n".join([*differing, *map(str, self.comparisons), *(f"left out: {why}" for why in self.left_out)])


def compare(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> RecordComparison:
    """Compare two record files, call by call and time by time.

    Calls are matched by name and settings. As within one run, a ratio needs a passed check and one clock on both sides;
    what lacks either is left out with the reason. Records of other machines or versions are compared, and it is said.

    Args:
      before: a file of records, such as an experiment's records.jsonl.
      after: another.

    Returns:
      Ratios before over after, with their spread.

    Raises:
      ValueError: a line is no record, or a file has none.
    """
    files = [read_records(before), read_records(after)]
    for path, records in zip((before, after), files, strict=True):
        if not records:
            raise fail("records", "at least one in each file", f"none in {path}")
    sides = [_by_call(records) for records in files]
    comparisons: list[Comparison] = []
    left_out = []
    for key in sorted(sides[0].keys() | sides[1].keys()):
        old, new = (side.get(key, []) for side in sides)
        why = _incomparable(old, new)
        found = [] if why else list(_compare_call(old, new))
        comparisons += found
        if not found:
            left_out.append(f"{' '.join(key)}: {why or 'no time above 0 that both have'}")
    here, there = (dataclasses.asdict(records[0].environment) for records in files)
    differences = {name: (here[name], there[name]) for name in here if here[name] != there[name]}
    return RecordComparison(tuple(comparisons), tuple(left_out), differences)


def _by_call(records: Iterable[PerformanceRecord]) -> dict[tuple[str, str], list[PerformanceRecord]]:
    calls: dict[tuple[str, str], list[PerformanceRecord]] = {}
    for record in records:
        calls.setdefault((record.name, json.dumps(record.settings, sort_keys=True)), []).append(record)
    return calls


def _incomparable(old: Sequence[PerformanceRecord], new: Sequence[PerformanceRecord]) -> str | None:
    """Why no ratio may be stated, or None."""
    if not old or not new:
        return f"only {'after' if new else 'before'}"
    if not all(record.check for record in (*old, *new)):
        return "no passed correctness check"
    clocks = sorted({str(record.clock) for record in (*old, *new)})
    return f"different clocks: {', '.join(clocks)}" if len(clocks) > 1 else None


def _compare_call(old: Sequence[PerformanceRecord], new: Sequence[PerformanceRecord]) -> Iterator[Comparison]:
    """One comparison for each time that both sides have."""
    for name in TIMES:
        slow, fast = (_values(records, name) for records in (old, new))
        if not slow or not fast or min(fast) <= 0:
            continue
        ends = ("steady_low_s", name, "steady_high_s") if name == "steady_s" else (name,)
        slows, fasts = (_values(records, *ends) for records in (old, new))
        several = len(slows) > 1 or len(fasts) > 1
        yield Comparison(
            name=old[0].name,
            settings=old[0].settings,
            field=name,
            ratio=statistics.median(slow) / statistics.median(fast),
            spread=(min(slows) / max(fasts), max(slows) / min(fasts)) if several and min(fasts) > 0 else None,
            counts=(len(old), len(new)),
        )


def _values(records: Sequence[PerformanceRecord], *names: str) -> list[float]:
    return [value for record in records for name in names if (value := getattr(record, name)) is not None]
