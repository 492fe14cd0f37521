"""The file of a calibration: how large the engines' activations are.

A safetensors file with three FP32 tensors an activation:

    <name>/amax      []         its largest absolute value
    <name>/channels  [channels] the same of each channel
    <name>/squares   [channels] the mean square of each channel

<name> is a weight of an engine without `.weight`, and means the input of that layer
(`dit/transformer_blocks.3.img_mlp.net.2`, channels: in); or query, key or value of a DiT block as
attention takes them, normed and rotated (`dit/transformer_blocks.3.attn.query`, channels: heads ×
head size). The metadata hold one key, `calibration`: JSON with what the ranges depend on, and how
many of the prompts are done.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from export.files import write_whole
from export.graph import ExportError
from export.stored import first_line

FORMAT = 2
METADATA = "calibration"


@dataclass(frozen=True)
class Calibration:
    """A calibration file: `settings` is its metadata, `tensors` are as in the file."""

    path: Path
    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def names(self) -> list[str]:
        return sorted(n.removesuffix("/amax") for n in self.tensors if n.endswith("/amax"))

    def amax(self, name: str) -> float:
        """The largest absolute value. Raises ExportError if `name` was not recorded."""
        return float(self._tensor(name, "amax"))

    def channels(self, name: str) -> np.ndarray:
        """The largest absolute value of each channel, FP32. Raises ExportError if `name` was not
        recorded."""
        return self._tensor(name, "channels")

    def squares(self, name: str) -> np.ndarray:
        """The mean square of each channel, FP32. Raises ExportError if `name` was not recorded."""
        return self._tensor(name, "squares")

    def _tensor(self, name: str, kind: str) -> np.ndarray:
        try:
            return self.tensors[f"{name}/{kind}"]
        except KeyError:
            raise ExportError(f"{self.path} has no range of {name}") from None


def load_calibration(path: Path, fingerprint: str) -> Calibration:
    """A finished calibration of the checkpoint with this fingerprint. Raises ExportError."""
    calibration = read_calibration(path)
    settings = calibration.settings
    if settings["checkpoint"] != fingerprint:
        raise ExportError(
            f"{path} was made from another checkpoint: from {settings['checkpoint'][:12]}…, but "
            f"this one is {fingerprint[:12]}…"
        )
    if settings["done"] < settings["total"]:
        raise ExportError(
            f"{path} is unfinished, with {settings['done']} of {settings['total']} prompts: the "
            "command that began it goes on"
        )
    return calibration


def read_calibration(path: Path) -> Calibration:
    """Reads a calibration file, finished or not. Raises ExportError."""
    foreign = f"{path} is no calibration file"
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(METADATA)
            if text is None:
                raise ExportError(f"{foreign}: its metadata have no {METADATA}")
            settings = json.loads(text)
            if not isinstance(settings, dict) or settings.get("format") != FORMAT:
                found = settings.get("format") if isinstance(settings, dict) else settings
                raise ExportError(f"{path} has the format {found!r}, but only {FORMAT} is read")
            problem = _problem(settings)
            if problem:
                raise ExportError(f"{foreign}, or a damaged one: its metadata {problem}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ExportError(
            f"{path} is missing: python -m export.calibrate makes a calibration file"
        ) from None
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ExportError(f"{foreign}, or a damaged one: {first_line(error)}") from None
    for name, tensor in tensors.items():
        rank = 0 if name.endswith("/amax") else 1
        if tensor.dtype != np.float32 or tensor.ndim != rank or not _is_range(tensor):
            raise ExportError(
                f"{foreign}, or a damaged one: {name} must be finite FP32, "
                f"{'one for each channel' if rank else 'one number'}, from 0 on"
            )
    return Calibration(path, settings, tensors)


def _is_range(tensor: np.ndarray) -> bool:
    return bool(np.isfinite(tensor).all() and (tensor >= 0).all())


def _problem(settings: dict[str, Any]) -> str | None:
    """What is wrong with the metadata of a file of FORMAT; None if nothing is."""
    checkpoint, done, total = (settings.get(name) for name in ("checkpoint", "done", "total"))
    if not isinstance(checkpoint, str):
        return f"name the checkpoint {checkpoint!r}, but it must be a fingerprint"
    if type(done) is not int or type(total) is not int or not 0 <= done <= total or not total:
        return f"have done = {done!r} of total = {total!r} prompts, but they must be counts"
    return None


def save_calibration(
    path: Path,
    settings: dict[str, Any],
    channels: dict[str, np.ndarray],
    squares: dict[str, np.ndarray],
) -> Calibration:
    """Writes or replaces the file in one step; `channels` and `squares`: name → FP32 array. Raises
    OSError."""
    tensors = {}
    for name, largest in channels.items():
        tensors[f"{name}/amax"] = np.array(largest.max())
        tensors[f"{name}/channels"] = largest
        tensors[f"{name}/squares"] = squares[name]
    # One key: safetensors writes several in a random order, and the same run shall give the same
    # bytes.
    data = save(tensors, {METADATA: json.dumps(settings, sort_keys=True)})
    write_whole(path, data)
    return Calibration(path, settings, tensors)
