"""Checkpoints in the Hugging Face layout: `config.json`, `model.safetensors` (or shards), `tokenizer.json`.

A weight is [outputs, inputs] in the file and [inputs, outputs] in the decoder, where weights that read the same input
are one matrix. `_slots` lists that correspondence once; loading, checking and saving all read it.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flashspec.checks import fail
from flashspec.language_model import Params
from flashspec.models import tensor_files
from flashspec.models.config import DecoderConfig
from flashspec.models.decoder import Decoder
from flashspec.models.tokenizer import Tokenizer

type Tensors = Sequence[np.ndarray]

# Older checkpoints store what is computed from the configuration.
REDUNDANT = "rotary_emb.inv_freq"
MAX_SHARD_BYTES = 5_000_000_000


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint directory holds: the model's shape, its parameters, and its tokenizer if there is one."""

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer | None


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One parameter: its path in the decoder, the tensors that make it up, and how to join and to split them."""

    path: tuple[str | int, ...]
    shapes: dict[str, tuple[int, ...]]
    join: Callable[[Tensors], np.ndarray]
    split: Callable[[np.ndarray], Tensors]


def _as_is(path: tuple[str | int, ...], name: str, *shape: int) -> _Slot:
    return _Slot(path, {name: shape}, lambda tensors: tensors[0], lambda array: [array])


def _transposed(path: tuple[str | int, ...], outputs: dict[str, int], inputs: int) -> _Slot:
    """Weights [outputs, inputs] side by side as one kernel [inputs, all outputs]."""
    bounds = np.cumsum(list(outputs.values()))[:-1]
    return _Slot(
        path,
        {name: (size, inputs) for name, size in outputs.items()},
        lambda tensors: np.concatenate(tensors).T,
        lambda kernel: np.split(kernel.T, bounds),
    )


def _qkv(path: tuple[str | int, ...], names: Sequence[str], config: DecoderConfig) -> _Slot:
    """Query, key and value weights as one kernel in which each key/value head's group is contiguous."""
    kv_heads, size, inputs = config.num_kv_heads, config.head_dim, config.hidden_size
    group = config.num_heads // kv_heads

    def join(tensors: Tensors) -> np.ndarray:
        grouped = [tensor.reshape(kv_heads, -1, inputs) for tensor in tensors]
        return np.concatenate(grouped, axis=1).reshape(-1, inputs).T

    def split(kernel: np.ndarray) -> Tensors:
        grouped = kernel.T.reshape(kv_heads, (group + 2) * size, inputs)
        parts = np.split(grouped, [group * size, (group + 1) * size], axis=1)
        return [part.reshape(-1, inputs) for part in parts]

    rows = (config.num_heads * size, kv_heads * size, kv_heads * size)
    return _Slot(path, {name: (count, inputs) for name, count in zip(names, rows, strict=True)}, join, split)


def _slots(config: DecoderConfig) -> Iterator[_Slot]:
    """Every parameter of the decoder with its tensors in the file."""
    hidden, inner = config.hidden_size, config.intermediate_size
    if not config.tie_embeddings:
        yield _as_is(("embed",), "model.embed_tokens.weight", config.vocab_size, hidden)
    for layer in range(config.num_layers):
        here, name = ("layers", layer), f"model.layers.{layer}."
        attention, mlp = name + "self_attn.", name + "mlp."
        yield _as_is((*here, "attention_norm", "scale"), name + "input_layernorm.weight", hidden)
        yield _qkv((*here, "qkv"), [f"{attention}{role}_proj.weight" for role in "qkv"], config)
        if config.qk_norm:
            for role in "qk":
                yield _as_is((*here, f"{role}_norm", "scale"), f"{attention}{role}_norm.weight", config.head_dim)
        yield _transposed((*here, "out"), {attention + "o_proj.weight": hidden}, config.num_heads * config.head_dim)
        yield _as_is((*here, "mlp_norm", "scale"), name + "post_attention_layernorm.weight", hidden)
        gate_up = {f"{mlp}{role}_proj.weight": inner for role in ("gate", "up")}
        yield _transposed((*here, "gate_up"), gate_up, hidden)
        yield _transposed((*here, "down"), {mlp + "down_proj.weight": hidden}, inner)
    yield _as_is(("norm", "scale"), "model.norm.weight", hidden)
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    yield _transposed(("head",), {head: config.vocab_size}, hidden)


def load(directory: Path | str, dtype: Any = None) -> Checkpoint:
    """Read a checkpoint directory; nothing in it is executed.

    Args:
      directory: holds `config.json`, `model.safetensors` or shards with their index, and usually `tokenizer.json`.
      dtype: of the parameters; None keeps the one in which the embeddings are stored.

    Raises:
      ValueError: a file is missing, malformed or cut short; the configuration is one that the decoder does not compute;
        tensors are missing, unexpected or of the wrong shape (all listed); the tokenizer belongs to another model.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise fail("directory", "a checkpoint directory", directory)
    config = DecoderConfig.from_hf(tensor_files.read_json(directory / "config.json"))
    stored = tensor_files.locate(directory)
    _check_tensors(directory, config, stored)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.load(path) if path.is_file() else None
    if tokenizer is not None:
        tokenizer.check(config.vocab_size)
    if dtype is None:
        dtype = tensor_files.DTYPES[stored["model.embed_tokens.weight"].code]
    params: dict[tuple[Any, ...], jax.Array] = {}
    for slot in _slots(config):
        joined = slot.join([stored[name].read() for name in slot.shapes])
        params[slot.path] = jnp.asarray(np.ascontiguousarray(joined, dtype))
    return Checkpoint(config, with_values(config, params), tokenizer)


def _check_tensors(directory: Path, config: DecoderConfig, stored: dict[str, tensor_files.StoredTensor]) -> None:
    """Compare names and shapes with what the configuration needs, and report every difference at once."""
    needed = {name: shape for slot in _slots(config) for name, shape in slot.shapes.items()}
    spare = {"lm_head.weight"} if config.tie_embeddings else set()
    complaints = [f"missing {name} {list(shape)}" for name, shape in needed.items() if name not in stored]
    for name, tensor in stored.items():
        if name in needed and tensor.shape != needed[name]:
            complaints.append(f"{name}: expected {list(needed[name])}, got {list(tensor.shape)} in {tensor.file.name}")
        elif name not in needed and name not in spare and not name.endswith(REDUNDANT):
            complaints.append(f"unexpected {name} {list(tensor.shape)} in {tensor.file.name}")
    if complaints:
        raise ValueError(f"{directory}: tensors do not match config.json: " + "; ".join(complaints))


def with_values(config: DecoderConfig, values: dict[tuple[Any, ...], jax.Array]) -> Params:
    """Parameters of a decoder of this shape, from arrays by their path."""
    abstract = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state([(path, leaf.replace(values[path])) for path, leaf in flat])


def _check_params(config: DecoderConfig, params: Params) -> None:
    """Check paths and shapes against the decoder's, and report every difference at once."""
    abstract = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    needed, got = (
        {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in nnx.to_flat_state(tree)}
        for tree in (abstract, params)
    )
    names = sorted(needed.keys() | got.keys())
    wrong = [f"{name} {got.get(name)} for {needed.get(name)}" for name in names if got.get(name) != needed.get(name)]
    if wrong:
        raise fail("params", "those of `config`", "; ".join(wrong))


def save(
    directory: Path | str,
    config: DecoderConfig,
    params: Params,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint directory that `load`, and Hugging Face's libraries, read.

    Args:
      directory: made if missing; files of the same names are replaced.
      config: the decoder's shape.
      params: its parameters.
      tokenizer: written as `tokenizer.json`.
      dtype: of the stored tensors; None keeps the parameters' own.
      max_shard_bytes: a file larger than this is split into shards with an index.

    Raises:
      ValueError: the parameters are not those of `config`; nothing is written or removed.
    """
    _check_params(config, params)
    arrays = dict(nnx.to_flat_state(params))
    tensors: dict[str, np.ndarray] = {}
    for slot in _slots(config):
        array = np.asarray(arrays[slot.path][...])
        parts = slot.split(array if dtype is None else array.astype(dtype))
        tensors |= dict(zip(slot.shapes, parts, strict=True))
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (*directory.glob("model*.safetensors"), directory / tensor_files.INDEX):
        stale.unlink(missing_ok=True)
    tensor_files.write(directory, tensors, max_shard_bytes)
    stored = np.dtype(next(iter(tensors.values())).dtype).name
    (directory / "config.json").write_text(json.dumps(config.to_hf(stored), indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.backend.save(str(directory / "tokenizer.json"))
