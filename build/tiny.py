"""The small trained checkpoint, exported for the CPU: what the demo and the gate serve."""

from __future__ import annotations

import os
from pathlib import Path

from build.profile import load_profile
from build.progress import say_once

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "checkpoints" / "tiny"
CALIBRATION = (
    ROOT / "checkpoints" / "tiny-calibration.safetensors"
)  # as bench.quantization makes it
REPOSITORY = ROOT / "artifacts" / "demo"


def export_tiny(repository: Path = REPOSITORY) -> Path:
    """Returns the repository, exported if it has to be.

    Raises BuildError, CheckpointError, ExportError, OSError.
    """
    from build.assemble import assemble  # with torch and diffusers, which takes seconds

    workers = os.cpu_count() or 1
    assemble(CHECKPOINT, load_profile("cpu"), repository, progress=say_once(), workers=workers)
    return repository
