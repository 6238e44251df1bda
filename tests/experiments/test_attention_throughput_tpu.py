"""The throughput of attention as on a TPU: what a process there would choose, its kernels in an interpreter."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from experiments.__main__ import main
from flashspec import selection
from flashspec.attention import api
from flashspec.measure import HOST
from flashspec.records import read_records
from tests.contracts.interpreted_tpu import interpreted_tpu


@pytest.fixture
def as_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(api, "resolve_device", lambda *_: selection.Target("TPU v5 lite", "tpu"))
    monkeypatch.setattr(selection, "targets", tuple)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with interpreted_tpu():
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.slow
def test_it_times_our_kernels_and_says_so(as_on_a_tpu: None, tmp_path: Path) -> None:
    main(["attention_throughput", "--smoke", "--parts", "forward", "training", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "report.json").read_text())
    for name in ("forward", "training"):
        table = report["tables"][name]
        assert {row[table["columns"].index("kernel")] for row in table["rows"]} == {"tpu"}
        assert HOST in table["title"]
    assert {record.clock for record in read_records(tmp_path / "records.jsonl")} <= {HOST, None}
