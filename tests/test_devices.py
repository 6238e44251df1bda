"""Device facts: each has a source, nothing is invented, and an unknown device is said to be unknown."""

import dataclasses

import pytest

from flashspec.devices import DEVICES, FACTS, DeviceFacts, device_facts, find_device_facts, multiprocessors


@pytest.mark.parametrize("kind", DEVICES)
def test_every_fact_has_a_source(kind: str) -> None:
    facts = device_facts(kind)
    assert {fact for fact in FACTS if getattr(facts, fact) is not None} == set(facts.sources)
    assert all(len(source) > 20 for source in facts.sources.values())


def test_the_fields_are_the_facts() -> None:
    assert {field.name for field in dataclasses.fields(DeviceFacts)} == {"name", "sources", *FACTS}


def test_a_fact_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match="sources"):
        DeviceFacts("invented", bf16_flops=1e15)


def test_a_source_without_a_fact_is_refused() -> None:
    with pytest.raises(ValueError, match="sources"):
        DeviceFacts("invented", sources={"bf16_flops": "a datasheet that was not read"})


def test_nothing_is_known_of_a_cpu() -> None:
    assert all(getattr(device_facts("cpu"), fact) is None for fact in FACTS)


def test_a_launch_is_shaped_for_the_device_where_that_is_known() -> None:
    kinds = ("NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA H2000", "TPU v5 lite", "cpu", None)
    assert [multiprocessors(kind) for kind in kinds] == [114, 108, 132, 132, 132, 132]


def test_an_unknown_device_is_said_to_be_unknown() -> None:
    assert find_device_facts("NVIDIA H2000") is None
    with pytest.raises(ValueError, match=r"`kind`: expected a known device .*NVIDIA H200.*'NVIDIA H2000'"):
        device_facts("NVIDIA H2000")


def test_published_ridge_points() -> None:
    """FLOPs per byte where memory stops being the limit: 206 on an H200, 295 on an H100, 241 on a v5e."""

    def ridge(kind: str) -> float:
        facts = device_facts(kind)
        assert facts.bf16_flops is not None
        assert facts.memory_bandwidth is not None
        return facts.bf16_flops / facts.memory_bandwidth

    assert ridge("NVIDIA H200") == pytest.approx(206, abs=1)
    assert ridge("NVIDIA H100 80GB HBM3") == pytest.approx(295, abs=1)
    assert ridge("TPU v5 lite") == pytest.approx(241, abs=1)
    assert ridge("NVIDIA H200") != pytest.approx(2 * 206, abs=2), "the rate with sparsity would double it"


def test_facts_cannot_be_changed() -> None:
    facts = device_facts("NVIDIA H200")
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.name = "another"  # type: ignore[misc]
    with pytest.raises(TypeError):
        facts.sources["name"] = "another"  # type: ignore[index]
