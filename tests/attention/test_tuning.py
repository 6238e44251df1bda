"""Launch settings: those that a caller gives, those of a tuned file, the heuristic's; and files that are corrupt."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flashspec.attention import (
    BackwardConfig,
    DecodeConfig,
    ForwardConfig,
    Hopper,
    attention_stats,
    dot_product_attention,
    plan_attention,
    tuning,
)
from flashspec.attention.tuning import Entry, TuningKey, choose, heads_of, mask_of, packaged, read, write
from flashspec.devices import DEVICES
from tests.attention import hopper_twin
from tests.attention.hopper_twin import hopper_by_twin

H200, KERNEL = "NVIDIA H200", "attention_forward"
KEY = TuningKey("bfloat16", 8, 1024, 1024, 1, 128, 128, "causal")
CONFIG = ForwardConfig(block_kv=64, stages=3, heads_per_section=1)
ENTRY = Entry(KEY, CONFIG, 1e-4, 1.1e-4, 2e-3, "0.11.2")
GRADIENT = dataclasses.replace(KEY, deterministic=True)
BACKWARD = Entry(GRADIENT, BackwardConfig(kv_stages=1), 2e-4, 2e-4, 2e-3, "0.11.2")
DECODE = Entry(dataclasses.replace(KEY, T=1, mask="dense"), DecodeConfig(block_keys=64), 1e-5, 1e-5, 2e-3, "0.11.2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tuned files of this test alone."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    return tmp_path


def put(folder: Path, text: str, kernel: str = KERNEL) -> Path:
    file = folder / H200 / f"{kernel}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def plan(T: int = 1024, **options: Any) -> Any:
    shape = jax.ShapeDtypeStruct((2, T, 4, 128), jnp.bfloat16)
    return plan_attention(shape, shape, shape, **{"is_causal": True, "device": H200} | options)


# Who decides.


def test_a_call_takes_the_entry_of_its_own_shape_and_no_other(folder: Path) -> None:
    put(folder, write([ENTRY], KERNEL, H200))
    put(folder, write([BACKWARD], "attention_backward", H200), "attention_backward")
    tuned = plan()
    assert (tuned.forward.source, tuned.backward.source) == ("tuned", "heuristic")
    assert {name: tuned.forward.config[name] for name in ("block_kv", "stages", "heads_per_section")} == {
        "block_kv": 64,
        "stages": 3,
        "heads_per_section": 1,
    }
    assert "(tuned)" in str(tuned)
    deterministic = plan(implementation=Hopper(deterministic=True)).backward
    assert (deterministic.source, deterministic.config["backward_kv_stages"]) == ("tuned", 1)
    others = [plan(1032), plan(is_causal=False), plan(window=(7, 0)), plan(device="NVIDIA H100 80GB HBM3")]
    assert [other.forward.source for other in others] == ["heuristic"] * 4


def test_a_key_that_forgets_the_mask_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, write([ENTRY], KERNEL, H200))
    monkeypatch.setattr(tuning, "mask_of", lambda *mask: "causal")
    assert plan(is_causal=False).forward.source == "tuned"


def test_what_the_caller_gives_comes_first(folder: Path) -> None:
    put(folder, write([ENTRY], KERNEL, H200))
    given = plan(implementation=Hopper(forward=ForwardConfig(stages=1)))
    assert (given.forward.source, given.forward.config["stages"]) == ("given", 1)
    assert plan(implementation="hopper").forward.source == "tuned"
    assert plan(implementation=("cudnn", Hopper())).forward.implementation == "cudnn"


def test_keys() -> None:
    assert [heads_of(rows) for rows in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    calls = [(False, (None, None)), (True, (None, None)), (False, (None, 0)), (True, (7, None)), (False, (None, 3))]
    assert [mask_of(*call) for call in calls] == ["full", "causal", "causal", "window (7, 0)", "window (inf, 3)"]
    assert mask_of(True, (None, None), segments=True) == "causal segments"


def test_what_is_given_reaches_the_kernels() -> None:
    seen: dict[str, Any] = {}

    def forward(*arrays: Any, config: Any, **options: Any) -> Any:
        seen["forward"] = config
        return hopper_twin.forward(*arrays, config=config, **options)

    def backward(*arrays: Any, config: Any, deterministic: bool, **options: Any) -> Any:
        seen.update(backward=config, deterministic=deterministic)
        return hopper_twin.backward(*arrays, config=config, **options)

    x = jnp.ones((1, 8, 1, 64))
    given = Hopper(ForwardConfig(block_kv=64), BackwardConfig(block_q=128, kv_stages=1), deterministic=True)
    jax.clear_caches()  # a program of other stand-ins must not answer
    with hopper_by_twin(forward, backward):
        jax.jit(jax.grad(lambda x: jnp.sum(dot_product_attention(x, x, x, implementation=given))))(x)
        assert seen == {"forward": given.forward, "backward": given.backward, "deterministic": True}
        jax.grad(lambda x: jnp.sum(dot_product_attention(x, x, x, implementation="hopper")))(x)
        assert not seen["deterministic"]
        attention_stats(x, x, x, implementation=(given, "blockwise"))
        assert seen["forward"] == given.forward
    jax.clear_caches()


def test_settings_that_a_call_cannot_have_are_refused_before_compute() -> None:
    wrong = Hopper(ForwardConfig(block_kv=256, stages=8), BackwardConfig(block_q=128, stages=4))
    with pytest.raises(
        NotImplementedError, match=r"forward settings given: needs \d+ bytes of shared memory"
    ) as raised:
        plan(implementation=wrong)
    assert "the backward settings given" in str(raised.value)
    assert plan(implementation=(wrong, "cudnn")).forward.implementation == "cudnn"
    with pytest.raises(ValueError, match="`forward`: expected a ForwardConfig"):
        Hopper(forward=BackwardConfig())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`implementation`: expected the Hopper kernels at most once"):
        plan(implementation=(Hopper(), "hopper"))


# Files.


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for kernel, entry in ((KERNEL, ENTRY), ("attention_backward", BACKWARD), ("attention_decode", DECODE)):
        later = entry._replace(key=dataclasses.replace(entry.key, T=entry.key.T * 2))
        file = put(tmp_path, write([later, entry], kernel, H200), kernel)
        assert read(file, kernel, H200) == (entry, later)


def test_a_setting_that_a_file_does_not_have_takes_its_default(tmp_path: Path) -> None:
    new = {"query_buffers": 1, "early_turn": 0, "lazy_sum": False}
    entry = json.loads(write([ENTRY], KERNEL, H200))
    (row,) = entry["entries"]
    row["config"] = {name: value for name, value in row["config"].items() if name not in new}
    assert read(put(tmp_path, json.dumps(entry)), KERNEL, H200) == (ENTRY,)
    assert {name: getattr(CONFIG, name) for name in new} == new
    del row["key"]["T"]  # but one without a default has to be there
    with pytest.raises(ValueError, match="expected exactly the fields"):
        read(put(tmp_path, json.dumps(entry)), KERNEL, H200)


def test_every_file_that_ships_is_legal_and_of_a_known_device() -> None:
    """And written as the search writes it."""
    files = list(tuning.FOLDER.glob("*/*.json"))
    assert files
    for file in files:
        kernel, device = file.stem, file.parent.name
        assert device in DEVICES
        entries = packaged(kernel, device)
        assert entries
        assert not [entry for key, entry in entries.items() if tuning.KERNELS[kernel].refusals(key, entry.config)]
        assert file.read_text(encoding="utf-8") == write(list(entries.values()), kernel, device)


def test_what_ships_reaches_a_plan() -> None:
    shape = jax.ShapeDtypeStruct((16, 1024, 16, 128), jnp.bfloat16)
    tuned = plan_attention(shape, shape, shape, is_causal=True, device=H200, implementation="hopper").forward
    entry = packaged(KERNEL, H200)[dataclasses.replace(KEY, heads=256)]
    assert (tuned.source, tuned.config["early_turn"]) == ("tuned", entry.config.early_turn)


HELD = json.loads(write([ENTRY], KERNEL, H200))


def changed(**changes: Any) -> str:
    """The file with other fields in its entry; a dict changes those of `key` or `config`."""
    (entry,) = HELD["entries"]
    entry = entry | {name: entry[name] | x if isinstance(x, dict) else x for name, x in changes.items()}
    return json.dumps(HELD | {"entries": [entry]})


CORRUPT = {
    "no JSON": ("{", "the file"),
    "a list": ("[]", "the file"),
    "another kernel": (json.dumps(HELD | {"kernel": "attention_decode"}), "the file"),
    "another device": (json.dumps(HELD | {"device": "NVIDIA H100 PCIe"}), "the file"),
    "a field more": (json.dumps(HELD | {"more": 1}), "the file"),
    "no list": (json.dumps(HELD | {"entries": {}}), "the file"),
    "no entry": (json.dumps(HELD | {"entries": [3]}), "entry 0"),
    "twice": (json.dumps(HELD | {"entries": HELD["entries"] * 2}), "entry 1"),
    "text for a number": (changed(config={"block_kv": "64"}), "entry 0"),
    "a fraction": (changed(key={"T": 1024.0}), "entry 0"),
    "an unknown setting": (changed(config={"blocks": 1}), "entry 0"),
    "an illegal setting": (changed(config={"block_kv": 96}), "`block_kv`: expected a multiple of 64"),
    "too much memory": (changed(config={"block_kv": 256, "stages": 8}), "bytes of shared memory"),
    "no time": (changed(seconds=None), "`seconds`"),
    "an infinite time": (changed(heuristic_seconds=float("inf")), "`heuristic_seconds`"),
    "a NaN": (changed(error=float("nan")), "`error`"),
    "no version": (changed(jax=0.11), "`jax`"),
}


@pytest.mark.parametrize("what", CORRUPT)
def test_a_corrupt_file_is_an_error_that_names_file_entry_and_remedy(what: str, folder: Path) -> None:
    text, where = CORRUPT[what]
    file = put(folder, text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        plan()
    message = str(raised.value)
    assert message.startswith(str(file))
    assert where in message
    assert "Delete it to use the heuristic, or write it anew by `python -m experiments tune_attention`" in message
    assert choose(KERNEL, H200, KEY, CONFIG, ForwardConfig) == (CONFIG, "given")
    put(folder, write([ENTRY], KERNEL, H200))
    assert plan().forward.source == "tuned"
