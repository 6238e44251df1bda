"""Checkpoints in the Hugging Face layout: `config.json`, `model.safetensors` (or shards), `tokenizer.json`.

Tensors stream one parameter at a time from the file's pages to the device, which joins, transposes and converts them:
the host holds none of them but those on their way.
"""

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from flashspec.checks import fail
from flashspec.language_model import Params
from flashspec.models import multimodal, tensor_files
from flashspec.models.config import DecoderConfig
from flashspec.models.decoder import Decoder
from flashspec.models.parameter_layout import EMBEDDINGS, HEAD, Layout, Slot, Spec, slots, turned, unturned
from flashspec.models.partition import check_mesh, parameter_spec, sharding
from flashspec.models.tokenizer import Tokenizer

type Stored = dict[str, tensor_files.StoredTensor]

# Older checkpoints store what is computed from the configuration.
REDUNDANT = "rotary_emb.inv_freq"
MAX_SHARD_BYTES = 5_000_000_000
WORTH_COMPILING = 1_000_000


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint directory holds.

    Attributes:
      config: the model's shape.
      params: its parameters.
      tokenizer: its tokenizer, if there is one.
      left_out: names of the tensors that were not loaded, since the text model computes without them: the vision tower
        of a model that also reads images.
    """

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer | None
    left_out: tuple[str, ...] = ()


def load(
    directory: Path | str,
    dtype: Any = None,
    *,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Checkpoint:
    """Read a checkpoint directory; nothing in it is executed.

    Args:
      directory: holds `config.json`, `model.safetensors` or shards with their index, and usually `tokenizer.json`.
      dtype: of the parameters, floating; None keeps the one in which the embeddings are stored.
      mesh: devices with the axes "data" and "model" (`decoder_mesh`) to split the parameters over; each device is given
        its own part of every tensor.
      progress: called as progress(bytes read so far, bytes in all) after each parameter.

    Returns:
      The checkpoint, its parameters on the default device or split over the mesh. Of a model that also reads images it
      is the text model; a warning says what was left out, and `left_out` names it.

    Raises:
      ValueError: a file is missing, malformed or cut short; the configuration is one that the decoder does not compute;
        tensors are missing, unexpected or of the wrong shape (all listed); the tokenizer belongs to another model;
        the mesh does not divide the model. Each message names the file and the remedy.
    """
    directory = Path(directory)
    wanted = None if dtype is None else _floating(dtype)
    config, tokenizer, stored, left_out = _read_descriptions(directory)
    mesh = None if mesh is None else check_mesh(config, mesh)
    if wanted is None:
        wanted = jax.dtypes.canonicalize_dtype(tensor_files.DTYPES[stored[EMBEDDINGS].code])
    needed = [stored[name] for slot in slots(config) for name in slot.shapes]
    total, done = sum(tensor.stop - tensor.start for tensor in needed), 0
    params: dict[tuple[Any, ...], jax.Array] = {}
    before: jax.Array | None = None
    for slot in slots(config):
        spec = None if mesh is None else parameter_spec(config, mesh, slot.path)
        params[slot.path] = _load(slot, stored, wanted, mesh, spec)
        # At most two parameters are on their way: the next is read while the last is still being copied.
        jax.block_until_ready(before)
        before = params[slot.path]
        done += sum(stored[name].stop - stored[name].start for name in slot.shapes)
        if progress is not None:
            progress(done, total)
    return Checkpoint(config, with_values(config, params), tokenizer, left_out)


def _floating(dtype: Any) -> np.dtype:
    """A dtype that parameters can have here."""
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise fail("dtype", "a floating dtype", dtype) from error
    if not jax.dtypes.issubdtype(found, np.floating):
        raise fail("dtype", "a floating dtype", found)
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise fail("dtype", "float32 or narrower unless jax_enable_x64 is set", found)
    return found


def _read_descriptions(directory: Path) -> tuple[DecoderConfig, Tokenizer | None, Stored, tuple[str, ...]]:
    """Everything but the weights, checked to belong together, and the names of the tensors that are left out."""
    if not directory.is_dir():
        raise fail("directory", "a checkpoint directory, with config.json and model.safetensors", directory)
    path = directory / "config.json"
    values = tensor_files.read_json(path)
    try:
        config = DecoderConfig.from_hf(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    stored, left_out = multimodal.text_tensors(values, tensor_files.locate(directory))
    if left_out:
        parts = ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in left_out}))
        warnings.warn(
            f"{directory}: {len(left_out)} tensors of {parts} are left out: text alone is computed", stacklevel=3
        )
    _check_tensors(directory, config, stored)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.load(path) if path.is_file() else None
    if tokenizer is not None:
        tokenizer.check(config.vocab_size, path)
    return config, tokenizer, stored, left_out


def _load(slot: Slot, stored: Stored, dtype: np.dtype, mesh: Mesh | None, spec: Spec | None) -> jax.Array:
    """One parameter on the device or the mesh, from its tensors where they lie in the files."""
    tensors = [stored[name].read() for name in slot.shapes]
    # What the device has no dtype for (float64 without jax_enable_x64) is converted here.
    held = [tensor.astype(jax.dtypes.canonicalize_dtype(tensor.dtype), copy=False) for tensor in tensors]
    layout = slot.layout
    if mesh is None or spec is None:
        joined = _joiner(layout, dtype, None)(jax.device_put(held))
        return _turner(None)(joined) if layout.turns else joined
    joined_spec = (*spec[1:], spec[0]) if layout.turns else spec
    parts = jax.device_put(held, sharding(mesh, layout.stored_spec(joined_spec)))
    joined = _joiner(layout, dtype, sharding(mesh, joined_spec))(parts)
    return _turner(sharding(mesh, spec))(joined) if layout.turns else joined


@functools.cache
def _joiner(layout: Layout, dtype: np.dtype, out: NamedSharding | None) -> Callable[[Sequence[jax.Array]], jax.Array]:
    return jax.jit(lambda tensors: layout.join(tensors).astype(dtype), out_shardings=out)


@functools.cache
def _turner(out: NamedSharding | None) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(turned, out_shardings=out)


def place(config: DecoderConfig, params: Params, mesh: Mesh) -> Params:
    """Parameters split over a mesh, as `load(mesh=)` gives them.

    Args:
      config: the decoder's shape.
      params: its parameters.
      mesh: devices with the axes "data" and "model" (`decoder_mesh`).

    Raises:
      ValueError: the parameters are not those of `config`, or the mesh does not divide the model.
    """
    _check_params(config, params)
    mesh = check_mesh(config, mesh)
    flat = nnx.to_flat_state(params)
    placed = {
        path: jax.device_put(leaf[...], sharding(mesh, parameter_spec(config, mesh, path))) for path, leaf in flat
    }
    return with_values(config, placed)


def _check_tensors(directory: Path, config: DecoderConfig, stored: Stored) -> None:
    """Compare names and shapes with what the configuration needs, and report every difference at once."""
    needed = {name: shape for slot in slots(config) for name, shape in slot.shapes.items()}
    spare = {HEAD} if config.tie_embeddings else set()
    complaints = [f"missing {name} {list(shape)}" for name, shape in needed.items() if name not in stored]
    for name, tensor in stored.items():
        if name in needed and tensor.shape != needed[name]:
            complaints.append(f"{name}: expected {list(needed[name])}, got {list(tensor.shape)} in {tensor.file.name}")
        elif name not in needed and name not in spare and not name.endswith(REDUNDANT):
            complaints.append(f"unexpected {name} {list(tensor.shape)} in {tensor.file.name}")
    if complaints:
        remedy = _remedy(config, stored)
        raise ValueError(f"{directory}: tensors do not match config.json: " + "; ".join(complaints) + f". {remedy}")


def _remedy(config: DecoderConfig, stored: Stored) -> str:
    """What to do about tensors that do not match."""
    if not config.tie_embeddings and HEAD not in stored and EMBEDDINGS in stored:
        return f"Without {HEAD} the head is the embeddings: set tie_word_embeddings to true in config.json"
    if config.tie_embeddings and EMBEDDINGS not in stored and HEAD in stored:
        return f"Tied embeddings are stored as {EMBEDDINGS}: rename {HEAD}, or set tie_word_embeddings to false"
    return "Use the config.json that came with these weights, or fetch the checkpoint again"


def with_values(config: DecoderConfig, values: dict[tuple[Any, ...], jax.Array]) -> Params:
    """Parameters of a decoder of this shape, from arrays by their path."""
    return nnx.from_flat_state([(path, leaf.replace(values[path])) for path, leaf in _abstract(config)])


def _abstract(config: DecoderConfig) -> list[tuple[tuple[Any, ...], Any]]:
    """Paths and shapes of the decoder's parameters."""
    return list(nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)))


def _check_params(config: DecoderConfig, params: Params) -> None:
    """Check paths and shapes against the decoder's, and report every difference at once."""
    needed, got = (
        {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in flat}
        for flat in (_abstract(config), nnx.to_flat_state(params))
    )
    names = sorted(needed.keys() | got.keys())
    wrong = [f"{name} {got.get(name)} for {needed.get(name)}" for name in names if got.get(name) != needed.get(name)]
    if wrong:
        raise fail("params", "those of `config`", "; ".join(wrong))


def _unturned(array: Any) -> Any:
    """Weights as the file has them; turned by the device, which is faster, unless compiling takes longer than that."""
    return jax.jit(unturned)(array) if array.nbytes > WORTH_COMPILING else unturned(np.asarray(array))


def stored_tensors(config: DecoderConfig, params: Params, dtype: Any = None) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a checkpoint of these parameters, by their names in the file, one parameter at a time.

    Args:
      config: the decoder's shape.
      params: its parameters, on one device or split over a mesh.
      dtype: of the tensors; None keeps the parameters' own.

    Yields:
      (name, tensor) in the order of the file.

    Raises:
      ValueError: the parameters are not those of `config`.
    """
    _check_params(config, params)
    arrays, dtypes = dict(nnx.to_flat_state(params)), _dtypes(params, dtype)
    for slot in slots(config):
        array = arrays[slot.path][...]
        joined = np.asarray(_unturned(array) if slot.layout.turns else array)
        for name, tensor in zip(slot.shapes, slot.layout.split(joined), strict=True):
            yield name, tensor.astype(dtypes[slot.path], copy=False)


def _dtypes(params: Params, dtype: Any) -> dict[tuple[Any, ...], np.dtype]:
    """The dtype of each parameter in the file, by its path."""
    return {path: np.dtype(leaf[...].dtype if dtype is None else dtype) for path, leaf in nnx.to_flat_state(params)}


def save(
    directory: Path | str,
    config: DecoderConfig,
    params: Params,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint directory that `load`, and Hugging Face's libraries, read; one parameter at a time.

    Args:
      directory: made if missing; files of the same names are replaced.
      config: the decoder's shape.
      params: its parameters, on one device or split over a mesh.
      tokenizer: written as `tokenizer.json`.
      dtype: of the stored tensors; None keeps the parameters' own.
      max_shard_bytes: a file larger than this is split into shards with an index.

    Raises:
      ValueError: the parameters are not those of `config`; nothing is written or removed.
    """
    _check_params(config, params)
    dtypes = _dtypes(params, dtype)
    entries = {name: (shape, dtypes[slot.path]) for slot in slots(config) for name, shape in slot.shapes.items()}
    tensors = (tensor for _, tensor in stored_tensors(config, params, dtype))
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (*directory.glob("model*.safetensors"), directory / tensor_files.INDEX):
        stale.unlink(missing_ok=True)
    tensor_files.write(directory, entries, tensors, max_shard_bytes)
    stored = next(iter(dtypes.values())).name
    (directory / "config.json").write_text(json.dumps(config.to_hf(stored), indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.backend.save(str(directory / "tokenizer.json"))
