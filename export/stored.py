"""Weights as they lie on disk: safetensors files, whole or in shards.

Headers are read at once, tensors later and in pieces of at most `CHUNK` elements, so that memory
depends neither on a shard's size nor on a tensor's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
CHUNK = 8 * 2**20  # elements


class CheckpointError(Exception):
    """The checkpoint cannot be exported; the message is one sentence that says why."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` in bytes from the start of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def chunks(self) -> Iterator[np.ndarray]:
        """The elements in order, as flat FP32 arrays of at most `CHUNK` elements."""
        size, dtype = math.prod(self.shape), DTYPES[self.dtype]
        for start in range(0, size, CHUNK):
            count = min(CHUNK, size - start)
            raw = np.fromfile(self.file, dtype, count, offset=self.offset + start * dtype.itemsize)
            if raw.size != count:
                raise CheckpointError(f"{self.file} became shorter while it was read")
            if self.dtype == "BF16":  # the upper half of an FP32
                raw = raw.astype(np.uint32)
                raw <<= 16
                yield raw.view(np.float32)
            else:
                yield raw.astype(np.float32, copy=False)

    def read(self) -> np.ndarray:
        """The whole tensor, FP32."""
        result = np.empty(math.prod(self.shape), np.float32)
        done = 0
        for chunk in self.chunks():
            result[done : done + chunk.size] = chunk
            done += chunk.size
        return result.reshape(self.shape)


def weight_files(folder: Path, stem: str) -> list[Path]:
    """A component's safetensors files: one, or the shards that an index names.

    A variant (`<stem>.fp16.safetensors`) is taken where there is nothing else.
    """
    whole, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    found = [folder / name for name in (whole, index) if (folder / name).is_file()]
    if not found:
        variants = [*folder.glob(f"{stem}.*.safetensors"), *folder.glob(f"{stem}.*.index.*.json")]
        # The shards of a variant look like "<stem>.fp16-00001-of-00002.safetensors".
        found = sorted(file for file in variants if "-of-" not in file.name)
    if not found:
        raise CheckpointError(
            f"{folder} has neither {whole} nor {index}; other formats of weights are not read"
        )
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} has {' and '.join(file.name for file in found)}, but there may be only one"
        )
    if found[0].suffix != ".json":
        return found
    weight_map = read_json(found[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{found[0]} has no weight_map with the names of the shards")
    files = sorted({folder / str(name) for name in weight_map.values()})
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, but {found[0].name} names it")
    return files


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file: 8 bytes of header length, a JSON header, the data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= size - 8 else b""
    tensors = {}
    try:
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                start, end = (int(offset) for offset in entry["data_offsets"])
                shape = tuple(int(dim) for dim in entry["shape"])
                tensors[name] = StoredTensor(file, str(entry["dtype"]), shape, 8 + length + start)
                dtype = DTYPES.get(tensors[name].dtype)
                if dtype and end - start != math.prod(shape) * dtype.itemsize:
                    raise ValueError
                if 8 + length + end > size:
                    raise CheckpointError(
                        f"{file} is cut off: tensor {name} ends at byte {8 + length + end}, the "
                        f"file at {size}"
                    )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file} is no safetensors file: its header is not valid") from None
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return value


def first_line(error: Exception) -> str:
    """An error's message as far as it fits into a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
