"""Every variant of the portable kernels, compiled for an A100 and an H200: spills, memory, and that they are on mma.

Where the extra `aot` is not installed, what compiles is skipped.
"""

import pytest

from pallas_kernels.gpu.ampere.attention_forward_config import shared_memory
from tests.pallas_kernels.ampere.sass import MODULE, PLANTED, TARGETS, VARIANTS
from tests.pallas_kernels.hopper import sass
from tests.pallas_kernels.hopper.sass import complaints, reports

compiled = pytest.mark.skipif(bool(sass.missing()), reason=sass.missing() or "-")

# Bytes that the worst kernel of a variant is known to spill (ptxas 13.5); all others spill none.
KNOWN = {
    "8.0 forward 128 full": 48,
    "8.0 forward 128 causal": 120,
    "8.0 forward 128 segments": 100,
    "8.0 backward 64 full": 96,
    "8.0 backward 64 full deterministic": 72,
    "8.0 backward 64 causal": 236,
    "8.0 backward 64 causal deterministic": 116,
    "8.0 backward 64 segments": 380,
    "8.0 backward 64 segments deterministic": 180,
    "8.0 backward 128 full": 168,
    "8.0 backward 128 full deterministic": 12,
    "8.0 backward 128 causal": 272,
    "8.0 backward 128 causal deterministic": 108,
    "8.0 backward 128 segments": 368,
    "8.0 backward 128 segments deterministic": 196,
    "9.0 forward 128 full": 24,
    "9.0 forward 128 segments": 8,
    "9.0 backward 64 full": 24,
    "9.0 backward 64 causal": 168,
    "9.0 backward 64 causal deterministic": 48,
    "9.0 backward 64 segments": 128,
    "9.0 backward 64 segments deterministic": 80,
    "9.0 backward 128 full deterministic": 16,
    "9.0 backward 128 causal deterministic": 52,
    "9.0 backward 128 segments": 4,
    "9.0 backward 128 segments deterministic": 72,
}
QUICK = ("9.0 forward 64 causal", PLANTED)
KINDS = ("forward", "backward")


@compiled
def test_a_main_variant_and_a_planted_one() -> None:
    found = reports(QUICK, MODULE)
    assert not [line for report in found[QUICK[0]] for line in complaints(report)]
    assert any("spills" in line for report in found[PLANTED] for line in complaints(report))
    assert all(report.products > 0 and report.registers > 0 for report in found[QUICK[0]])


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant(kind: str, capability: str) -> None:
    names = [name for name in VARIANTS if name.startswith(f"{capability} {kind}")]
    found = reports(names, MODULE)
    assert list(found) == names
    lines = [line for name in names for report in found[name] for line in complaints(report, KNOWN.get(name, 0))]
    assert not lines, "\n".join(lines)
    for name in names:
        assert all(report.shared_bytes <= shared_memory(capability) for report in found[name]), name
        assert all(report.products > 0 for report in found[name]), name
    needless = [name for name in names if name in KNOWN and max(report.spilled for report in found[name]) == 0]
    assert not needless, f"they spill no more: {needless}"


def test_every_variant_is_of_a_kind() -> None:
    assert all(name.split()[0] in TARGETS and (name.split()[1] in KINDS or name == PLANTED) for name in VARIANTS)
    assert set(KNOWN) <= set(VARIANTS)
