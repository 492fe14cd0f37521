"""One export for all tests here: 12 blocks, bf16 weights in shards of 300 kB."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from export import Checkpoint, export_checkpoint
from tests.make_checkpoint import cached_checkpoint

CONFIG: dict[str, Any] = {
    "blocks": 12,
    "heads": 2,
    "head_size": 16,
    "rope_axes": (4, 6, 6),
    "text_width": 64,
    "dtype": "bfloat16",
    "max_shard_size": 300_000,
}


@dataclass(frozen=True)
class Exported:
    checkpoint: Checkpoint
    folder: Path
    entries: dict[str, dict[str, Any]]
    progress: list[tuple[str, int, int]]

    def session(self, engine: str) -> Any:
        return ort.InferenceSession(self.folder / engine / "model.onnx")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors this small, more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return cached_checkpoint(**CONFIG)


@pytest.fixture(scope="session")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("engines")
    opened, progress = Checkpoint(checkpoint), list[tuple[str, int, int]]()
    entries = export_checkpoint(opened, folder, progress=lambda *step: progress.append(step))
    return Exported(opened, folder, entries, progress)


@pytest.fixture(scope="session")
def transformer(checkpoint: Path) -> Any:
    """The stock transformer, FP32."""
    return QwenImageTransformer2DModel.from_pretrained(
        checkpoint / "transformer", dtype=torch.float32
    )


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a checkpoint or an engine, so that a test may damage it."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))
