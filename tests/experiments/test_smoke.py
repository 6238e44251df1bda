"""Every experiment runs from the command line: `--smoke`, in a process of its own, as a user starts it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import registry
from flashspec.records import read_records

# The promise is 30 s on a CPU with two cores. CPU time is what a busy machine does not stretch.
CPU_SECONDS = 2 * 30
TIMEOUT = 300
# 12 to 30 s of CPU time each, over code that other smoke runs or tests of their own go through.
HEAVY = (
    "attention_end_to_end",
    "blockwise_memory",
    "decode_roofline",
    "large_pair",
    "loop_overhead",
    "speculative_load",
    "train_pair",
    "tune_attention",
)


def cpu_seconds() -> float:
    """CPU time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in registry.discover()]
)
def test_smoke(name: str, tmp_path: Path) -> None:
    plain = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-m", "experiments", name, "--smoke", "--out", str(tmp_path)]
    before = cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env=plain)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert cpu_seconds() - before < CPU_SECONDS
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["finished"]
    assert report["experiment"] == name
    assert (tmp_path / "report.md").read_text().startswith(f"# {report['question']}")
    assert read_records(tmp_path / "records.jsonl")
