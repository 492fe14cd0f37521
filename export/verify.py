"""Checks a written engine in ONNX Runtime against the stock torch modules.

Engines up to `WHOLE_LIMIT` run as a whole; larger ones stage by stage: each stage is cut out of the
written graph, with its own weights from the written data, and gets the reference's inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

from export.checkpoint import Checkpoint
from export.engines import Engine
from export.graph import ExportError, Tensor
from export.reference import REFERENCES, Stage, Values
from export.write import DATA, Progress

WHOLE_LIMIT = 2 * 2**30  # bytes of weights
TOLERANCE = 1e-4
ORT_TYPES = {
    "FLOAT": "tensor(float)",
    "INT64": "tensor(int64)",
    "INT32": "tensor(int32)",
    "BOOL": "tensor(bool)",
    "UINT8": "tensor(uint8)",
}


def verify_engine(
    engine: Engine, checkpoint: Checkpoint, folder: Path, mode: str, progress: Progress
) -> dict[str, Any]:
    """Checks borders and values; `mode` is `auto` or `full`. Returns what was checked.

    Raises ExportError, which names the engine and the tensor.
    """
    blocks = mode != "full" and (folder / DATA).stat().st_size > WHOLE_LIMIT and engine.blocks
    reference = REFERENCES[engine.name](checkpoint)
    with torch.no_grad():
        error = (verify_stages if blocks else verify_whole)(engine, reference, folder, progress)
    shapes = [{name: list(value.shape) for name, value in case.items()} for case in reference.cases]
    return {"mode": "blocks" if blocks else "whole", "shapes": shapes, "max_abs_error": error}


def open_session(model: Path | bytes, name: str, folder: Path, frugal: bool = False) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    if frugal:  # leave the weights in the mapped file: no packed copies, no memory pool
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = False
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"{name}: ONNX Runtime does not load the graph: {first_line(error)}") from error


def verify_whole(engine: Engine, reference: Any, folder: Path, progress: Progress) -> float:
    session = open_session(folder / "model.onnx", engine.name, folder)
    check_borders(engine.name, session.get_inputs(), engine.inputs)
    check_borders(engine.name, session.get_outputs(), engine.outputs)
    names = [tensor.name for tensor in engine.outputs]
    worst = 0.0
    progress(f"{engine.name}: verify", 0, 1)
    for case, expected in zip(reference.cases, reference.whole(), strict=True):
        results = run(session, engine.name, names, case)
        for name in names:
            worst = max(worst, compare(engine.name, name, results[name], expected[name]))
    progress(f"{engine.name}: verify", 1, 1)
    return worst


def verify_stages(engine: Engine, reference: Any, folder: Path, progress: Progress) -> float:
    raise NotImplementedError


def check_borders(engine: str, found: list[Any], declared: tuple[Tensor, ...]) -> None:
    if [value.name for value in found] != [tensor.name for tensor in declared]:
        raise ExportError(
            f"{engine}: the graph has {[v.name for v in found]} instead of {[t.name for t in declared]}"
        )
    for value, tensor in zip(found, declared, strict=True):
        if value.type != ORT_TYPES[tensor.dtype.name]:
            raise ExportError(
                f"{engine}: {tensor.name} is {value.type} instead of {ORT_TYPES[tensor.dtype.name]}"
            )
        if list(value.shape) != list(tensor.shape):
            raise ExportError(
                f"{engine}: {tensor.name} has the dimensions {value.shape} instead of {list(tensor.shape)}"
            )


def run(session: Any, name: str, outputs: list[str], case: Values) -> dict[str, np.ndarray]:
    try:
        values = session.run(outputs, {key: value.numpy() for key, value in case.items()})
    except Exception as error:
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in case.items())
        raise ExportError(f"{name}: the graph fails with {shapes}: {first_line(error)}") from error
    return dict(zip(outputs, values, strict=True))


def compare(engine: str, name: str, result: np.ndarray, expected: torch.Tensor) -> float:
    """The largest absolute difference. Raises ExportError if it is too large."""
    if list(result.shape) != list(expected.shape):
        raise ExportError(
            f"{engine}: {name} has the shape {list(result.shape)} instead of {list(expected.shape)}"
        )
    reference = expected.numpy()
    if reference.dtype == np.uint8:  # a value near .5 may be rounded either way
        error, allowed = int(np.abs(result.astype(int) - reference.astype(int)).max()), 1.0
    else:
        error, allowed = float(np.abs(result - reference).max()), TOLERANCE * float(np.abs(reference).max())
    if not error <= allowed:
        raise ExportError(
            f"{engine}: {name} differs from the torch module by {error:.3g}, more than {allowed:.3g}"
        )
    return float(error)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
