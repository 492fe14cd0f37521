"""The ranges of activations for an export that names no calibration file."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch

from build.manifest import digest
from export import Checkpoint, ExportError, Progress
from export.activations import calibrate, check_prompts, read_prompts
from export.calibrate import PROMPTS, STEPS
from export.calibration import FORMAT, read_calibration

# Of a GPU's memory: what the weights in BF16 may take beside the activations.
WEIGHTS_SHARE = 0.8


def description() -> str:
    """What the ranges depend on besides the checkpoint."""
    return f"{STEPS} steps over the prompts {digest(PROMPTS)}, format {FORMAT}"


def own_calibration(checkpoint: Checkpoint, folder: Path, progress: Progress) -> Path:
    """Makes ranges over the prompts that come with the project, or goes on with them.

    Runs on the GPU, where there is one. Returns the file, which is named after what it depends on:
    there may be others in the folder. Raises ExportError, CheckpointError, OSError.
    """
    fingerprint = checkpoint.describe()["fingerprint"]
    key = hashlib.sha256(f"{fingerprint} {description()}".encode()).hexdigest()
    path = folder / f"calibration-{key[:12]}.safetensors"
    if path.is_file():
        try:
            settings = read_calibration(path).settings
        except ExportError:
            path.unlink()  # damaged; it is nobody's but ours
        else:
            if settings["done"] == settings["total"]:
                return path  # also if another kind of machine has made it

    def report(what: str, done: int, total: int) -> None:
        progress(f"no CALIBRATION was named, so it is made ({path.name}): {what}", done, total)

    prompts = check_prompts(read_prompts(PROMPTS), checkpoint)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    offload = device == "cuda" and not _fits(checkpoint)
    calibrate(checkpoint, path, prompts, STEPS, device, offload, report)
    return path


def _fits(checkpoint: Checkpoint) -> bool:
    """Whether the whole checkpoint fits into the GPU's memory in BF16."""
    elements = sum(
        math.prod(tensor.shape)
        for tensors in checkpoint.tensors.values()
        for tensor in tensors.values()
    )
    memory: int = torch.cuda.get_device_properties(0).total_memory
    return 2 * elements < WEIGHTS_SHARE * memory
