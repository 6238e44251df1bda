"""Named tensors in safetensors files: where each lies, whether it is whole, and reading them one at a time.

The format is eight bytes of header length, a JSON header, then raw little-endian numbers; nothing in it is executed.
The header is read here, not by the library, because a file that was cut short must be able to say what it lost.
Source: https://github.com/huggingface/safetensors, "Format".
"""

import dataclasses
import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
AGAIN = "fetch the checkpoint again"
DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its dtype's code, its shape, and the bytes [start, stop) that hold it."""

    file: Path
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> np.ndarray:
        """The tensor where it lies: a read-only view of the file's pages, which the system may drop at any time."""
        page = self.start - self.start % mmap.ALLOCATIONGRANULARITY
        with self.file.open("rb") as file:
            pages = mmap.mmap(file.fileno(), self.stop - page, offset=page, access=mmap.ACCESS_READ)
        own = np.frombuffer(pages, np.uint8, self.stop - self.start, self.start - page)
        return own.view(DTYPES[self.code]).reshape(self.shape)


def locate(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint directory, single-file or sharded, checked to be whole.

    Raises:
      ValueError: there is no checkpoint, a shard is missing, or a file is malformed or cut short; names the file and
        lists the tensors concerned with their shapes.
    """
    if (directory / INDEX).is_file():
        return _locate_shards(directory)
    if not (directory / SINGLE).is_file():
        found = sorted(path.name for path in directory.iterdir())
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in found)
        remedy = "; pickled weights may run code and are not read: convert them to safetensors" if pickled else ""
        raise ValueError(f"{directory}: expected {SINGLE} or {INDEX}, found {', '.join(found) or 'no files'}{remedy}")
    return read_header(directory / SINGLE)


def _locate_shards(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: expected a 'weight_map' from tensor names to file names")
    shards = sorted(set(places.values()))
    outside = [name for name in shards if Path(name).name != name]
    if outside:
        raise ValueError(f"{index}: expected files in the same folder, got {', '.join(outside)}")
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"{directory}: missing shards {', '.join(missing)} (named in {INDEX}): {AGAIN}")
    headers = {name: read_header(directory / name) for name in shards}
    absent = [f"{tensor} ({file})" for tensor, file in places.items() if tensor not in headers[file]]
    if absent:
        raise ValueError(f"{directory}: shards lack tensors that {INDEX} places in them: {', '.join(absent)}; {AGAIN}")
    return {tensor: headers[file][tensor] for tensor, file in places.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      ValueError: the file is missing or holds anything else; names it.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file declares, checked against the bytes that it has.

    Raises:
      ValueError: the header is malformed, a dtype is none of `DTYPES`, or tensors are cut short; names the file, the
        tensors and the remedy.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ValueError(f"{path}: a Git LFS pointer in place of the file: run `git lfs pull` in its folder")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path}: cut short or no safetensors file: {size} bytes cannot hold the header; {AGAIN}")
        try:
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            strange = [f"{name} in {entry['dtype']}" for name, entry in entries.items() if entry["dtype"] not in DTYPES]
            tensors = {name: _entry(path, entry, 8 + length) for name, entry in entries.items() if not strange}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: malformed safetensors header: {error}; {AGAIN}") from error
    if strange:
        remedy = "quantised weights are not computed: use the checkpoint that they were made from"
        raise ValueError(f"{path}: expected dtypes {', '.join(DTYPES)}, got {', '.join(strange[:8])}; {remedy}")
    short = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items() if tensor.stop > size]
    if short:
        need = max(tensor.stop for tensor in tensors.values())
        cut = f"cut short ({size} of {need} bytes); incomplete tensors: {', '.join(short)}"
        raise ValueError(f"{path}: {cut}; {AGAIN}")
    return tensors


def _entry(path: Path, entry: Mapping[str, Any], origin: int) -> StoredTensor:
    code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, start, stop)):
        raise ValueError(f"expected non-negative integers, got shape {list(shape)} at [{start}, {stop})")
    if stop - start != math.prod(shape) * np.dtype(DTYPES[code]).itemsize:
        raise ValueError(f"{stop - start} bytes cannot be a {code} tensor of shape {list(shape)}")
    return StoredTensor(path, code, shape, origin + start, origin + stop)


def write(
    directory: Path,
    entries: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    tensors: Iterator[np.ndarray],
    max_shard_bytes: int,
) -> None:
    """Write tensors as they come to one file, or to shards with an index where they exceed `max_shard_bytes`.

    Args:
      directory: exists.
      entries: shape and dtype of each tensor by name.
      tensors: the tensors, in the order of `entries`; each is written before the next is asked for.
      max_shard_bytes: no shard is larger unless one tensor is.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in entries.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[held] for held in shards[-1]) + size > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    files = [SINGLE]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        _write_file(directory / file, {name: entries[name] for name in names}, tensors)
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(
    path: Path, entries: Mapping[str, tuple[tuple[int, ...], np.dtype]], tensors: Iterator[np.ndarray]
) -> None:
    """One file with the next tensors of the iterator, which have to be those of `entries`."""
    codes = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, (shape, dtype) in entries.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that numbers lie on their own boundaries
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (shape, dtype), tensor in zip(entries.values(), tensors, strict=False):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(f"{path}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
