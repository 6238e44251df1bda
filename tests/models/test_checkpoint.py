"""Checkpoint directories: round trips, Hugging Face's names and layout, and files that are wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from flashspec import models
from flashspec.models import tensor_files
from tests.models.examples import CONFIGS, example
from tests.models.test_tokenizer import tiny_tokenizer


def assert_same(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_large_weights_are_turned_by_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.checkpoint, "WORTH_COMPILING", 0)
    config, params = example("qwen2")
    models.save(tmp_path, config, params)
    assert_same(models.load(tmp_path).params, params)


@pytest.mark.parametrize("shard_bytes", [10**9, 3000])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str, shard_bytes: int, tmp_path: Path) -> None:
    config, params = example(name)
    models.save(tmp_path, config, params, max_shard_bytes=shard_bytes)
    loaded = models.load(tmp_path)
    assert loaded.config == config
    assert loaded.tokenizer is None
    assert_same(loaded.params, params)
    assert (tmp_path / tensor_files.INDEX).exists() == (shard_bytes == 3000)


def test_saving_again_leaves_no_old_shards(tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params, max_shard_bytes=3000)
    models.save(tmp_path, config, params)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == [tensor_files.SINGLE]


@pytest.mark.parametrize("other", ["llama, wide heads", "qwen3"])
def test_parameters_of_another_shape_replace_nothing(other: str, tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params)
    with pytest.raises(ValueError, match=r"`params`: expected those of `config`, got .*layers\.0\.\w+"):
        models.save(tmp_path, config, example(other)[1])
    assert_same(models.load(tmp_path).params, params)


def test_layout_is_hugging_face_s(tmp_path: Path) -> None:
    config, params = example("qwen3")
    models.save(tmp_path, config, params)
    tensors = safetensors.numpy.load_file(tmp_path / tensor_files.SINGLE)
    assert tensors["model.embed_tokens.weight"].shape == (37, 16)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 8, 16)
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (2 * 8, 16)
    assert tensors["model.layers.1.self_attn.o_proj.weight"].shape == (16, 4 * 8)
    assert tensors["model.layers.1.self_attn.k_norm.weight"].shape == (8,)
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (16, 24)
    assert "lm_head.weight" not in tensors
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(dtype: Any, tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params, dtype=dtype)
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    assert_same(models.load(tmp_path).params, narrow)
    assert_same(
        models.load(tmp_path, dtype=jnp.float32).params, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    )


def test_float64_needs_64_bits(tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params, dtype=np.float64)
    assert_same(models.load(tmp_path).params, params)
    with pytest.raises(ValueError, match="`dtype`: expected float32 or narrower unless jax_enable_x64"):
        models.load(tmp_path, np.float64)
    with pytest.raises(ValueError, match="`dtype`: expected a floating dtype, got int8"):
        models.load(tmp_path, np.int8)
    with jax.enable_x64(True):
        assert models.load(tmp_path).params["head"][...].dtype == np.float64


def test_tokenizer_travels_along(tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params, tiny_tokenizer(37))
    loaded = models.load(tmp_path)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.size == 37


def test_another_model_s_tokenizer_is_refused(tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params, tiny_tokenizer(38))
    with pytest.raises(
        ValueError, match=r"expected ids .* vocabulary of 37, got 38 ids in .*tokenizer\.json \(use the"
    ):
        models.load(tmp_path)


def test_computed_and_tied_extras_are_ignored(tmp_path: Path) -> None:
    config, params = example("qwen3")
    models.save(tmp_path, config, params)
    edit(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    edit(tmp_path, {"lm_head.weight": np.ones((37, 16), np.float32)})
    assert_same(models.load(tmp_path).params, params)


def edit(directory: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Replace, add or (None) remove tensors of a single-file checkpoint."""
    path = directory / tensor_files.SINGLE
    tensors = safetensors.numpy.load_file(path) | changes
    safetensors.numpy.save_file({name: array for name, array in tensors.items() if array is not None}, path)


def test_numbers_off_their_boundaries(tmp_path: Path) -> None:
    """Another writer's header may have any length."""
    config, params = example("llama")
    models.save(tmp_path, config, params, dtype=jnp.bfloat16)
    path = tmp_path / tensor_files.SINGLE
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + whole[8 : 8 + length] + b" " + whole[8 + length :])
    assert_same(models.load(tmp_path).params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))


def test_parameters_do_not_follow_their_file(tmp_path: Path) -> None:
    config, params = example("qwen2")
    models.save(tmp_path, config, params)
    loaded = models.load(tmp_path).params
    path = tmp_path / tensor_files.SINGLE
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert_same(loaded, params)


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    config, params = example("qwen3")
    models.save(tmp_path, config, params)
    seen: list[tuple[int, int]] = []
    models.load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (4 * config.num_parameters, 4 * config.num_parameters)
    assert seen == sorted(seen)


GOLDEN = Path(__file__).parents[1] / "golden"
WITH_IMAGES = GOLDEN / "gemma3_with_images"


@pytest.mark.filterwarnings("ignore:.* tensors of .* are left out")
def test_transformers_own_files_are_written_again(tmp_path: Path) -> None:
    """What `save` writes has the tensors that Hugging Face's library wrote, name by name and bit by bit."""
    for folder in sorted(path.parent for path in GOLDEN.glob("*/config.json")):
        checkpoint = models.load(folder)
        models.save(tmp_path, checkpoint.config, checkpoint.params)
        ours, theirs = (safetensors.numpy.load_file(place / tensor_files.SINGLE) for place in (tmp_path, folder))
        if folder == WITH_IMAGES:
            theirs = {name.removeprefix("language_model."): x for name, x in theirs.items() if "language_model" in name}
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            np.testing.assert_array_equal(tensor.view(np.uint16), theirs[name].view(np.uint16), err_msg=name)


def test_a_vision_tower_is_left_out_and_said_to_be() -> None:
    with pytest.warns(UserWarning, match="23 tensors of multi_modal_projector, vision_tower are left out: text alone"):
        loaded = models.load(WITH_IMAGES)
    stored = safetensors.numpy.load_file(WITH_IMAGES / tensor_files.SINGLE)
    assert set(loaded.left_out) == {name for name in stored if not name.startswith("language_model.")}
    assert models.load(GOLDEN / "gemma3").left_out == ()


def copy_with_images(place: Path, rename: Callable[[str], str]) -> None:
    """The golden checkpoint with a vision tower, its tensors under other names."""
    stored = safetensors.numpy.load_file(WITH_IMAGES / tensor_files.SINGLE)
    safetensors.numpy.save_file({rename(name): x for name, x in stored.items()}, place / tensor_files.SINGLE)
    (place / "config.json").write_text((WITH_IMAGES / "config.json").read_text())


@pytest.mark.filterwarnings("ignore:.* tensors of .* are left out")
def test_a_vision_tower_s_checkpoint_of_the_library_s_own_names(tmp_path: Path) -> None:
    def inner(name: str) -> str:
        return name.replace("language_model.model.", "model.language_model.").replace("vision_t", "model.vision_t")

    copy_with_images(tmp_path, inner)
    assert_same(models.load(tmp_path).params, models.load(WITH_IMAGES).params)


@pytest.mark.filterwarnings("ignore:.* tensors of .* are left out")
def test_nothing_but_the_tower_is_left_out(tmp_path: Path) -> None:
    copy_with_images(tmp_path, lambda name: name.replace("vision_tower.post", "audio_tower.post"))
    with pytest.raises(ValueError, match=r"unexpected audio_tower\.post_layernorm\.bias \[8\]"):
        models.load(tmp_path)
    copy_with_images(tmp_path, lambda name: name.replace("language_model.model.norm", "vision_tower.norm"))
    with pytest.raises(ValueError, match=r"missing model\.norm\.weight \[24\]"):
        models.load(tmp_path)
    configure(tmp_path, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text")
    with pytest.raises(ValueError, match="`boi_token_index`: expected no option"):
        models.load(tmp_path)


def test_stored_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    config, params = example("qwen2")
    models.save(tmp_path, config, params, dtype=jnp.bfloat16)
    held = safetensors.numpy.load_file(tmp_path / tensor_files.SINGLE)
    given = dict(models.checkpoint.stored_tensors(config, params, jnp.bfloat16))
    assert given.keys() == held.keys()
    for name, tensor in given.items():
        np.testing.assert_array_equal(tensor, held[name], err_msg=name)
    with pytest.raises(ValueError, match="`params`: expected those of `config`"):
        next(models.checkpoint.stored_tensors(example("llama")[0], params))


def test_every_wrong_tensor_is_listed_at_once(tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params)
    edit(
        tmp_path,
        {
            "model.norm.weight": None,
            "lm_head.weight": np.zeros((36, 16), np.float32),
            "model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32),
        },
    )
    with pytest.raises(ValueError, match=r"tensors do not match config\.json") as error:
        models.load(tmp_path)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "missing model.norm.weight [16]" in message
    assert "lm_head.weight: expected [37, 16], got [36, 16] in model.safetensors" in message
    assert "unexpected model.layers.0.self_attn.q_proj.bias [32]" in message


def cut_short(directory: Path) -> None:
    path = directory / tensor_files.SINGLE
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_the_header(directory: Path) -> None:
    path = directory / tensor_files.SINGLE
    path.write_bytes(path.read_bytes()[:50])


def empty(directory: Path) -> None:
    (directory / tensor_files.SINGLE).write_bytes(b"")


def garbled_header(directory: Path) -> None:
    path = directory / tensor_files.SINGLE
    path.write_bytes((20).to_bytes(8, "little") + b"{" * 20)


def lying_sizes(directory: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 4]}}).encode()
    path = directory / tensor_files.SINGLE
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")


def endless_header(directory: Path) -> None:
    path = directory / tensor_files.SINGLE
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")


def nested_header(directory: Path) -> None:
    header = b"[" * 200_000
    path = directory / tensor_files.SINGLE
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def nested_config(directory: Path) -> None:
    (directory / "config.json").write_text("[" * 200_000)


def unknown_dtype(directory: Path) -> None:
    header = json.dumps({"x": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path = directory / tensor_files.SINGLE
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")


def a_pointer(directory: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (directory / tensor_files.SINGLE).write_text(text)


def pickled(directory: Path) -> None:
    (directory / tensor_files.SINGLE).rename(directory / "pytorch_model.bin")


def configure(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def another_activation(directory: Path) -> None:
    configure(directory, hidden_act="relu")


def not_tied(directory: Path) -> None:
    edit(directory, {"lm_head.weight": None})


def tied_by_the_head(directory: Path) -> None:
    configure(directory, tie_word_embeddings=True)
    edit(directory, {"model.embed_tokens.weight": None})


def no_weights(directory: Path) -> None:
    (directory / tensor_files.SINGLE).unlink()


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def config_is_a_list(directory: Path) -> None:
    (directory / "config.json").write_text("[1]")


def bad_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, r"model.safetensors: cut short \(\d+ of \d+ bytes\); incomplete tensors: \S+ \[\d+"),
        (cut_in_the_header, "model.safetensors: cut short or no safetensors file"),
        (empty, "model.safetensors: cut short or no safetensors file: 0 bytes"),
        (garbled_header, "model.safetensors: malformed safetensors header"),
        (lying_sizes, r"4 bytes cannot be a F32 tensor of shape \[5\]"),
        (endless_header, "cut short or no safetensors file: 10 bytes"),
        (nested_header, "malformed safetensors header"),
        (nested_config, "config.json: expected a JSON object"),
        (unknown_dtype, "expected dtypes F64, F32, F16, BF16, got x in I8; quantised weights are not computed"),
        (a_pointer, "a Git LFS pointer in place of the file: run `git lfs pull`"),
        (pickled, "pickled weights may run code and are not read: convert them to safetensors"),
        (another_activation, r"config.json: `hidden_act`: expected 'silu'"),
        (not_tied, r"Without lm_head.weight the head is the embeddings: set tie_word_embeddings to true"),
        (tied_by_the_head, r"Tied embeddings are stored as model.embed_tokens.weight: rename lm_head.weight"),
        (no_weights, "expected model.safetensors or model.safetensors.index.json, found config.json"),
        (no_config, "config.json: expected a JSON object"),
        (config_is_a_list, "config.json: expected a JSON object, got list"),
        (bad_tokenizer, "tokenizer.json: not a tokenizer.json"),
    ],
)
def test_a_damaged_directory_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params)
    models.load(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params, max_shard_bytes=3000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"missing shards {shard.name} .*: fetch the checkpoint again"):
        models.load(tmp_path)


def test_a_shard_without_its_tensor_is_named(tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params, max_shard_bytes=3000)
    path = tmp_path / tensor_files.INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"shards lack tensors .* model\.norm\.weight"):
        models.load(tmp_path)


def test_an_index_may_not_reach_outside(tmp_path: Path) -> None:
    config, params = example("llama")
    models.save(tmp_path, config, params, max_shard_bytes=3000)
    path = tmp_path / tensor_files.INDEX
    own = path.read_text()
    for outside in ("../model-00001", f"{tmp_path}/model-00001"):
        path.write_text(own.replace("model-00001", outside))
        with pytest.raises(ValueError, match="same folder"):
            models.load(tmp_path)
    path.write_text(own)
    assert_same(models.load(tmp_path).params, params)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a checkpoint directory"):
        models.load(tmp_path / "nowhere")
