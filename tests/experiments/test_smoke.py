"""Every experiment runs from the command line: `--smoke`, in a process of its own, as a user starts it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import harness, registry
from flashspec.records import read_records

# The promise is 30 s on two idle cores. CPU time is what waiting does not stretch; what does is a machine that shares
# its cores, and so does it stretch the yardstick: Python that starts, and compiles one program.
CPU_SECONDS, YARDSTICK_SECONDS = 2 * 30, 2.5
YARDSTICK = "import jax, jax.numpy as jnp; jax.jit(lambda x: jnp.sort(x @ x))(jnp.ones((64, 64))).block_until_ready()"
TIMEOUT = 600
# 12 to 30 s of CPU time each, over code that other smoke runs or tests of their own go through.
HEAVY = (
    "attention_end_to_end",
    "attention_throughput",
    "blockwise_memory",
    "decode_roofline",
    "fusion",
    "graph_replay",
    "large_pair",
    "loop_overhead",
    "shape_buckets",
    "speculative",
    "speculative_load",
    "train_pair",
    "tune_attention",
    "window_error",
)
FUSED = [("large_pair", ("--parts", "decoding")), ("decode_roofline", ("--parts", "speculation"))]


def cpu_seconds() -> float:
    """CPU time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def allowed_seconds() -> float:
    """`CPU_SECONDS`, and more in proportion on a machine that is slower now than two idle cores."""
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", YARDSTICK], check=True, timeout=TIMEOUT)
    return CPU_SECONDS * max(1.0, (cpu_seconds() - before) / YARDSTICK_SECONDS)


def run_smoke(name: str, options: tuple[str, ...], out: Path) -> None:
    """Run the experiment with these options, and look at what it leaves."""
    plain = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-m", "experiments", name, "--smoke", *options, "--out", str(out)]
    before = cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env=plain)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    used = cpu_seconds() - before
    assert used < CPU_SECONDS or used < allowed_seconds()
    report = json.loads((out / "report.json").read_text())
    assert report["finished"]
    assert report["experiment"] == name
    assert (out / "report.md").read_text().startswith(f"# {report['question']}")
    assert read_records(out / "records.jsonl")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in registry.discover()]
)
def test_smoke(name: str, tmp_path: Path) -> None:
    run_smoke(name, (), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), FUSED)
def test_smoke_with_fused_layers(name: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    run_smoke(name, ("--fused", *parts), tmp_path)


@pytest.mark.parametrize(("name", "parts"), [FUSED[0], pytest.param(*FUSED[1], marks=pytest.mark.slow)])
def test_fused_layers_are_those_of_the_pair(name: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    """The twin serves a smoke run anywhere; the kernel in its place is refused here, so that it is what decodes."""
    monkeypatch.setattr(f"experiments.{name}.fused_by", lambda job: "hopper")
    options = ["--smoke", *parts, "--out", str(tmp_path)]
    assert harness.run_experiment(name, [*options, "--fused"]) == registry.WRONG_USE
    assert "runs on cuda of compute capability 9.0 only" in (tmp_path / "error.txt").read_text()
