"""What every runtime of the backend `engine` provides.

A runtime is a module named after the suffix of its artifact (`onnx.py` loads `model.onnx`) with a
class `Runtime`:

- `Runtime(artifact: Path, parameters: Mapping[str, str])` loads the engine; the parameters are
  those of the model's configuration;
- `inputs`, `outputs`: lists of `TensorSpec`;
- `run(batch: Mapping[str, ndarray]) -> dict[str, ndarray]` computes one batch, rows first;
- `close()` ends it, when the model is unloaded.

All raise `EngineError` with one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Dtypes = dict[str, "np.dtype[Any]"]


class EngineError(Exception):
    """An engine that cannot be loaded or run."""


class TensorSpec(NamedTuple):
    """Name and numpy dtype of an engine's input or output."""

    name: str
    dtype: type


def check_signature(
    direction: str, declared: Sequence[TensorSpec], actual: Sequence[TensorSpec]
) -> None:
    """Compares the configuration's tensors with the engine's.

    Raises:
        EngineError: names what differs on both sides.
    """
    config: Dtypes = {spec.name: np.dtype(spec.dtype) for spec in declared}
    engine: Dtypes = {spec.name: np.dtype(spec.dtype) for spec in actual}
    if config != engine:
        differing = sorted(set(config.items()) ^ set(engine.items()), key=str)
        names = sorted({name for name, _ in differing})
        raise EngineError(
            f"the {direction} {', '.join(names)} differ: config.pbtxt has "
            f"{_listed(config, names)}, the engine has {_listed(engine, names)}"
        )


def _listed(tensors: Dtypes, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {tensors[name]}" for name in names if name in tensors) or "none"
