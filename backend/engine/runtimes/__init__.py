"""What every runtime of the backend `engine` provides.

A runtime is a module named after the suffix of its artifact (`onnx.py` loads `model.onnx`) with a
class `Runtime`:

- `Runtime(artifact: Path, parameters: Mapping[str, str], gpu: int)` loads the engine; the
  parameters are those of the model's configuration, `gpu` is the number that its instance got
  (0 for KIND_CPU);
- `device`: None if it computes with numpy arrays, else the torch device that its results are on;
- `inputs`, `outputs`: lists of `TensorSpec`;
- `run(batch) -> results` computes one batch, rows first: mappings of names to arrays, or to torch
  tensors, of which the inputs are wherever Triton had them. Results are finished and nobody
  else's;
- `close()` ends it, when the model is unloaded.

All raise `EngineError` with one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class EngineError(Exception):
    """An engine that cannot be loaded or run."""


class TensorSpec(NamedTuple):
    """Name and Triton's data type, such as `BF16`, of an engine's input or output."""

    name: str
    dtype: str


def check_signature(
    direction: str, declared: Sequence[TensorSpec], actual: Sequence[TensorSpec]
) -> None:
    """Compares the configuration's tensors with the engine's.

    Raises:
        EngineError: names what differs on both sides.
    """
    config, engine = dict(declared), dict(actual)
    if config != engine:
        differing = sorted(set(config.items()) ^ set(engine.items()), key=str)
        names = sorted({name for name, _ in differing})
        raise EngineError(
            f"the {direction} {', '.join(names)} differ: config.pbtxt has "
            f"{_listed(config, names)}, the engine has {_listed(engine, names)}"
        )


def _listed(tensors: dict[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {tensors[name]}" for name in names if name in tensors) or "none"
