"""Records: what goes in comes out, different quantities stay apart, and a bad line is named."""

import dataclasses
import math
import sys
from pathlib import Path

import jax
import pytest

from flashspec.records import (
    TIMES,
    Environment,
    PerformanceRecord,
    RecordComparison,
    command_line,
    compare,
    environment,
    now,
    read_records,
    write_records,
)

HERE = Environment("3.12", "0.11.2", "0.11.2", "cpu", "cpu", 1, "Linux", None, None, False, None)


def record(**fields: object) -> PerformanceRecord:
    return PerformanceRecord(name="plain", environment=HERE, command="python -m experiments x", date=now(), **fields)  # type: ignore[arg-type]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    first = record(clock="host", steady_s=0.25, repeats=3, settings={"T": 8}, values={"tokens": 5})
    second = record(values={"by_position": [0.5, None]})
    write_records(path, [first])
    write_records(path, [second], append=True)
    assert read_records(path) == [first, second]
    write_records(path, [second])
    assert read_records(path) == [second]


def test_times_that_were_not_measured_are_null(tmp_path: Path) -> None:
    times = {field.name for field in dataclasses.fields(PerformanceRecord) if field.name.endswith("_s")}
    assert times == {*TIMES, "steady_low_s", "steady_high_s"}
    assert all(getattr(record(), name) is None for name in times)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steady_s": 1.0}, "clock"),
        ({"steady_s": -1.0, "clock": "host"}, "at least 0"),
        ({"compile_s": math.nan, "clock": "host"}, "finite"),
        ({"ttft_s": 1.0, "clock": "host"}, "ttft_method"),
        ({"ttft_s": 1.0, "clock": "host", "ttft_method": "guess"}, "ttft_method"),
        ({"values": {"speedup": 2.0}}, "check"),
        ({"values": {"ratio": 2.0}, "check": ""}, "check"),
    ],
)
def test_a_number_without_what_it_needs_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(**fields)


def test_a_ratio_beside_its_check_is_a_record() -> None:
    assert record(values={"speedup": 2.0}, check="greedy tokens equal").values["speedup"] == 2.0


@pytest.mark.parametrize("bad", ["{", '{"name": "x"}', "[1]", '{"environment": {}, "name": "x"}'])
def test_a_corrupt_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [record()])
    with open(path, "a") as file:
        file.write("\n" + bad + "\n")
    with pytest.raises(ValueError, match=r"records\.jsonl:3: not a measurement record"):
        read_records(path)


def test_values_that_json_lacks_are_refused_before_the_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [record()])
    with pytest.raises(ValueError, match="JSON"):
        write_records(path, [record(values={"loss": math.inf})])
    assert len(read_records(path)) == 1


def test_environment_says_where_it_ran() -> None:
    here = environment()
    assert here.jax == jax.__version__
    assert here.platform == jax.default_backend()
    assert here.device_count == len(jax.devices())
    assert here.python == sys.version.split()[0]
    assert here.x64 is False


def test_environment_sees_64_bit_mode_and_precision(x64: None) -> None:
    with jax.default_matmul_precision("highest"):
        assert environment().x64 is True
        assert environment().matmul_precision == "highest"


def test_no_commit_outside_a_checkout(tmp_path: Path) -> None:
    assert environment(tmp_path).commit is None


def test_command_line_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/experiments/__main__.py", "speculative", "--prompt", "def f(x):"])
    assert command_line() == "python -m experiments speculative --prompt 'def f(x):'"


PASSED = {"clock": "host", "check": "results are equal"}


def compared(tmp_path: Path, old: list[PerformanceRecord], new: list[PerformanceRecord]) -> RecordComparison:
    write_records(tmp_path / "old.jsonl", old)
    write_records(tmp_path / "new.jsonl", new)
    return compare(tmp_path / "old.jsonl", tmp_path / "new.jsonl")


def test_compare_gives_the_ratio_of_medians_with_what_the_quartiles_allow(tmp_path: Path) -> None:
    old = record(**PASSED, steady_s=3.0, steady_low_s=2.0, steady_high_s=6.0, compile_s=8.0, ttft_s=None)
    new = record(**PASSED, steady_s=1.5, steady_low_s=1.0, steady_high_s=2.0, compile_s=4.0)
    result = compared(tmp_path, [old], [new])
    found = {one.field: one for one in result.comparisons}
    assert set(found) == {"compile_s", "steady_s"}, "what one side lacks is no ratio, and quartiles are no times"
    assert (found["steady_s"].ratio, found["steady_s"].spread) == (2.0, (1.0, 6.0))
    assert (found["compile_s"].ratio, found["compile_s"].spread) == (2.0, None)
    assert result.left_out == ()
    assert "steady_s: 2 (1 to 6)" in str(result)


def test_compare_takes_several_records_of_one_call_together(tmp_path: Path) -> None:
    old = [record(**PASSED, steady_s=s) for s in (4.0, 2.0, 3.0)]
    new = [record(**PASSED, steady_s=s) for s in (1.0, 2.0)]
    (one,) = compared(tmp_path, old, new).comparisons
    assert (one.ratio, one.spread, one.counts) == (3.0 / 1.5, (1.0, 4.0), (3, 2))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (record(clock="host", steady_s=1.0), record(**PASSED, steady_s=1.0), "no passed correctness check"),
        (
            record(**PASSED, steady_s=1.0),
            record(clock="cupti", check="x", steady_s=1.0),
            "different clocks: cupti, host",
        ),
        (record(**PASSED, steady_s=1.0, settings={"T": 8}), record(**PASSED, steady_s=1.0, settings={"T": 9}), "only"),
        (record(**PASSED, steady_s=1.0), record(**PASSED, compile_s=1.0), "no time above 0 that both have"),
        (record(**PASSED, steady_s=1.0), record(**PASSED, steady_s=0.0), "no time above 0 that both have"),
    ],
)
def test_compare_says_what_it_leaves_out(
    tmp_path: Path, old: PerformanceRecord, new: PerformanceRecord, reason: str
) -> None:
    result = compared(tmp_path, [old], [new])
    assert result.comparisons == ()
    assert result.left_out
    assert all(reason in why for why in result.left_out)
    assert "left out: plain" in str(result)


def test_compare_names_what_differs_between_the_machines(tmp_path: Path) -> None:
    old = record(**PASSED, steady_s=2.0)
    new = dataclasses.replace(old, environment=dataclasses.replace(HERE, jax="0.12.0"), steady_s=1.0)
    result = compared(tmp_path, [old], [new])
    assert result.differences == {"jax": ("0.11.2", "0.12.0")}
    assert str(result).startswith("jax: '0.11.2' before, '0.12.0' after")
    with pytest.raises(ValueError, match=r"none in .*old\.jsonl"):
        compared(tmp_path, [], [new])
