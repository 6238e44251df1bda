"""Every variant of the Hopper kernels, compiled for the chip: spills, matrix products that wait, memory.

Where the extra `aot` is not installed, what compiles is skipped.
"""

import dataclasses

import pytest

from tests.pallas_kernels.hopper import sass
from tests.pallas_kernels.hopper.sass import PLANTED, VARIANTS, Report, complaints, reports

compiled = pytest.mark.skipif(bool(sass.missing()), reason=sass.missing() or "-")

# Bytes that the worst kernel of a variant is known to spill (ptxas 13.5), most of them around the loops over masked
# blocks; all others spill none. One that spills less has its number lowered here.
KNOWN = {
    "forward 64 segments": 24,
    "forward 128 segments": 48,
    "forward 256 causal": 32,
    "forward 256 window": 40,
    "forward 256 segments": 104,
    "forward 128 soft cap": 16,
    "forward 256 causal, early turn": 48,
    "backward 64 causal": 160,
    "backward 64 window": 232,
    "backward 64 segments": 180,
    "backward 128 causal": 120,
    "backward 128 window": 192,
    "backward 128 segments": 248,
    "backward 256 full": 120,
    "backward 256 causal": 1112,
    "backward 256 window": 1140,
    "backward 256 segments": 1120,
    "backward 64 full deterministic": 80,
    "backward 64 causal deterministic": 104,
    "backward 128 causal deterministic": 20,
    "decode 16 dense, sixteen heads a group": 204,
    "decode 4 dense 256": 180,
    # Where the arrays of the layers are, once a call; a word is read back for each block that is copied.
    "decode block 1 with attention": 260,
    "decode block 9 with attention": 304,
    "decode block 8 rows with attention, all options": 320,
}
QUICK = ("forward 128 causal", PLANTED)
KINDS = ("forward", "backward", "decode", "matmul")
BLOCK = 32  # exponentials of a thread for a block of 64 keys, but for its two factors


@compiled
def test_a_main_variant_and_a_planted_one() -> None:
    found = reports(QUICK)
    assert not [line for report in found[QUICK[0]] for line in complaints(report)]
    assert any("spills" in line for report in found[PLANTED] for line in complaints(report))
    assert all(report.products > 0 and report.registers > 0 for report in found[QUICK[0]])


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant(kind: str) -> None:
    names = [name for name in VARIANTS if name.startswith(kind)]
    found = reports(names)
    assert list(found) == names
    lines = [line for name in names for report in found[name] for line in complaints(report, KNOWN.get(name, 0))]
    assert not lines, "\n".join(lines)
    needless = [name for name in names if name in KNOWN and max(report.spilled for report in found[name]) == 0]
    assert not needless, f"they spill no more: {needless}"
    ahead = [name for name in names if kind == "forward" and min(report.ahead for report in found[name]) > BLOCK]
    assert ahead == [name for name in names if name.endswith("early turn")]


def test_every_variant_is_of_a_kind() -> None:
    assert all(name.startswith((*KINDS, PLANTED)) for name in VARIANTS)
    assert {*KNOWN, *QUICK} <= set(VARIANTS)


def test_exponentials_ahead_of_a_wait_are_counted_where_fewest_are() -> None:
    first, last, other = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MUFU.EX2 R0, R0"
    lines = [other, first, other, other, last, other, first, other, last, other, last]
    assert sass.exponentials_ahead("\n".join(lines)) == 1
    assert sass.exponentials_ahead("\n".join([other, last])) == 0


def test_what_is_wrong_is_named() -> None:
    fine = Report("a variant", "a kernel", 168, 0, False, sass.SHARED_MEMORY, 32)
    assert complaints(fine) == []
    for change in ({"spilled": 4}, {"serialized": True}, {"shared_bytes": sass.SHARED_MEMORY + 1}):
        (line,) = complaints(dataclasses.replace(fine, **change))
        assert line.startswith("a variant, a kernel")
    assert complaints(dataclasses.replace(fine, spilled=4), spilled=4) == []
