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
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from flashspec.checks import fail

TTFT_METHODS = ("one-token program", "stream")


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
class Record:
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


def write_records(path: str | os.PathLike[str], records: Iterable[Record], *, append: bool = False) -> None:
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


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read records back.

    Raises:
      ValueError: a line is no record; the message names file and line.
    """
    with open(path, encoding="utf-8") as file:
        return [_parse(line, f"{path}:{number}") for number, line in enumerate(file, start=1) if line.strip()]


def _parse(line: str, where: str) -> Record:
    try:
        fields = json.loads(line)
        return Record(**{**fields, "environment": Environment(**fields["environment"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: not a measurement record: {error!r}") from error
