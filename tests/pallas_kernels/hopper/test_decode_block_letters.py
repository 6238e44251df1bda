"""Where the letters of the fused decoder step on Hopper lie, and the instructions that read them."""

import math
from types import ModuleType

import numpy as np
import pytest

from pallas_kernels.gpu.hopper import decode_block_letters as letters
from pallas_kernels.gpu.hopper import decode_block_letters_config as config
from tests.mutants import mutant
from tests.pallas_kernels.hopper.decode_block_cases import EVERY, Case


def assert_apart(module: ModuleType, case: Case) -> None:
    """Every letter is in one box at most, and two neighbours can be read at once."""
    found = module.letters_of(case.plan)
    boxes = [*found.squares.values(), *found.parts.values()]
    boxes += [box for box in (found.attended, found.normalisers) if box is not None]
    count = np.zeros(found.total, int)
    for box in boxes:
        assert box.begin % 2 == 0
        numbers = [box.letter(place) for place in np.ndindex(box.shape)]
        assert numbers == list(range(box.begin, box.begin + math.prod(box.shape)))
        count[numbers] += 1
    assert count.max() == 1
    if case.held:
        assert found.squares["down"].begin == 0


@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_boxes_are_apart(case: Case) -> None:
    assert_apart(config, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("end + math.prod(shape), ALIGNED", "end + math.prod(shape[1:]), ALIGNED"),
        ("round_up(end + math.prod(shape), ALIGNED)", "end + math.prod(shape)"),
        ("reversed(ADDING)", "ADDING"),
    ],
)
def test_wrong_boxes_are_noticed(old: str, new: str) -> None:
    edited = mutant(config, (old, new))
    with pytest.raises((AssertionError, IndexError)):
        _ = [assert_apart(edited, case) for case in EVERY.values()]  # type: ignore[func-returns-value]


def test_only_what_is_late_is_read_again() -> None:
    """Of three parts of two letters each: a read of both at once, which is asked for only while one of them is late."""
    text = letters._reading([letters._Read(2, 2, [0, 10, 20])])
    lines = text.splitlines()
    loop = lines[lines.index("AGAIN:") :]
    reads = [line for line in loop if "ld.relaxed.gpu.global.v2.b64" in line]
    assert [line.split("+ ")[1] for line in reads] == ["0];", "80];", "160];"]
    assert all(line.startswith("@there ") for line in reads)
    before = [loop[loop.index(line) - 1] for line in reads]
    assert before == ["setp.ne.u32 there, flag0, 0;"] * 3
    assert not [line for line in lines[: lines.index("AGAIN:")] if "ld." in line]
    assert [line for line in lines if line.startswith("mov.b64 {$")] == [
        f"mov.b64 {{${n}, bit}}, letter{n};" for n in range(6)
    ]


def test_a_write_is_one_word() -> None:
    text = letters._writing(2)
    assert "mov.b64 letter1, {$5, $3};" in text
    assert "@inside st.relaxed.gpu.global.v2.b64 [address], {letter0, letter1};" in text
