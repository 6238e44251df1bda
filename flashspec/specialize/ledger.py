"""The ledger of a specialised function: what each bucket cost and what it saved (eq. 33.9)."""

import dataclasses
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashspec.costs import net_benefit

OP_BY_OP = "op by op"
COLUMNS = ("bucket", "C, s", "n", "t_e, ms", "t_e is", "t_c, ms", "hits", "padding", "memory, bytes", "net benefit, s")


@dataclasses.dataclass
class BucketEntry:
    """Sums over the calls of one bucket; seconds by the host clock, of whole calls, padding and unpadding included.

    Attributes:
      bound: of the bucket.
      compile_s: C, tracing, lowering and compiling of its executables.
      compilations: how many.
      loads: those of them that the persistent cache answered.
      memory_bytes: temporaries, results and code of the executables that are held now.
      calls: calls whose length belongs to this bucket.
      hits: those served at once by an executable of the bucket.
      waits: those that compiled it first.
      borrowed: those served by a larger bucket meanwhile.
      lender: the larger bucket that served last.
      padding: positions padded in all calls.
      first_calls_s: calls that were the first of their executable, which are apart from the steady state.
      steady_s, steady_calls: all other calls of the bucket's own executables.
      borrowed_s, borrowed_calls: all other calls that larger buckets served.
      op_by_op_s: one call op by op, where measured.
    """

    bound: int
    compile_s: float = 0.0
    compilations: int = 0
    loads: int = 0
    memory_bytes: int = 0
    calls: int = 0
    hits: int = 0
    waits: int = 0
    borrowed: int = 0
    lender: int | None = None
    padding: int = 0
    first_calls_s: float = 0.0
    steady_s: float = 0.0
    steady_calls: int = 0
    borrowed_s: float = 0.0
    borrowed_calls: int = 0
    op_by_op_s: float | None = None

    @property
    def served(self) -> int:
        """n, the calls that the bucket's own executables served."""
        return self.hits + self.waits

    @property
    def time_after(self) -> float | None:
        """t_c, mean seconds of a steady call (a ratio of sums); None before there is one."""
        return self.steady_s / self.steady_calls if self.steady_calls else None

    @property
    def time_before(self) -> float | None:
        """t_e, seconds of a call without the executable: op by op where measured, else in the larger bucket."""
        if self.op_by_op_s is not None:
            return self.op_by_op_s
        return self.borrowed_s / self.borrowed_calls if self.borrowed_calls else None

    @property
    def before_is(self) -> str | None:
        """Which alternative t_e is."""
        if self.op_by_op_s is not None:
            return OP_BY_OP
        return f"bucket {self.lender}" if self.borrowed_calls else None

    @property
    def net_benefit_s(self) -> float | None:
        """n (t_e - t_c) - C; None while a time is missing (eq. 33.9)."""
        if self.time_before is None or self.time_after is None:
            return None
        return float(net_benefit(self.compile_s, self.served, self.time_before, self.time_after))

    def row(self) -> tuple[Any, ...]:
        """The entry under `COLUMNS`."""
        before, after = (None if t is None else 1e3 * t for t in (self.time_before, self.time_after))
        return (
            *(self.bound, self.compile_s, self.served, before, self.before_is, after),
            *(self.hits, self.padding, self.memory_bytes, self.net_benefit_s),
        )

    def as_dict(self) -> dict[str, Any]:
        """Sums and what follows from them, for JSON."""
        derived = ("served", "time_before", "before_is", "time_after", "net_benefit_s")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


class Ledger:
    """One `BucketEntry` for each bucket, filled by any number of threads; `print` shows it as a table."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self.entries = {bound: BucketEntry(bound) for bound in bounds}
        self._lock = threading.Lock()

    def __getitem__(self, bound: int) -> BucketEntry:
        return self.entries[bound]

    def add(self, bound: int, **amounts: float | int) -> None:
        """Add to the sums of one bucket."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.entries[bound], name, getattr(self.entries[bound], name) + amount)

    def note(self, bound: int, **facts: Any) -> None:
        """Set what is no sum."""
        with self._lock:
            for name, fact in facts.items():
                setattr(self.entries[bound], name, fact)

    def as_list(self) -> list[dict[str, Any]]:
        """All entries in the order of their bounds."""
        with self._lock:
            return [entry.as_dict() for entry in self.entries.values()]

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write all entries; the folder is made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.as_list(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        rows = [COLUMNS, *(tuple(map(_cell, entry.row())) for entry in self.entries.values())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
