"""Exports a Qwen-Image checkpoint in diffusers layout to ONNX engines, in FP32 or by a recipe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.checkpoint import Checkpoint
    from export.export import export_checkpoint
    from export.graph import ExportError
    from export.progress import Progress, ignore_progress
    from export.stored import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ExportError",
    "Progress",
    "export_checkpoint",
    "ignore_progress",
]

_MODULES = {
    "Checkpoint": "checkpoint",
    "CheckpointError": "stored",
    "ExportError": "graph",
    "Progress": "progress",
    "export_checkpoint": "export",
    "ignore_progress": "progress",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for then: torch and diffusers take seconds, in which `python -m
    export.calibrate` could not be interrupted tidily."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
