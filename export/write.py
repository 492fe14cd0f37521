"""Writes an engine: model.onnx (the graph) and model.onnx.data (its weights, streamed)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from export.checkpoint import Checkpoint
from export.engines import Engine
from export.graph import GraphBuilder, TracedPart, trace
from export.progress import Progress
from export.stored import StoredTensor

MODEL, DATA = "model.onnx", "model.onnx.data"
ALIGNMENT = 64  # bytes; a cache line, and the widest vector load


@dataclass(frozen=True)
class Weight:
    """A weight of a graph: `shape` in the graph, `offset` in bytes in the data file."""

    name: str
    shape: tuple[int, ...]
    offset: int
    source: StoredTensor

    @property
    def length(self) -> int:
        return 4 * int(np.prod(self.shape))

    def initializer(self) -> ir.Value:
        tensor = ir.ExternalTensor(
            DATA,
            self.offset,
            self.length,
            ir.DataType.FLOAT,
            shape=ir.Shape(self.shape),
            name=self.name,
        )
        return ir.Value(
            name=self.name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(self.shape),
            const_value=tensor,
        )


def plan_weights(engine: Engine, checkpoint: Checkpoint) -> dict[str, Weight]:
    """The engine's weights by their names in the checkpoint, in the order of their use."""
    result: dict[str, Weight] = {}
    offset = 0
    for stage, part in engine.stages:
        for parameter, value in part.module.named_parameters():
            name = engine.weight_name(stage, parameter)
            weight = Weight(
                name, tuple(value.shape), offset, checkpoint.tensors[engine.component][name]
            )
            result[name] = weight
            offset += -(-weight.length // ALIGNMENT) * ALIGNMENT
    return result


def write_engine(engine: Engine, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    """Writes the engine's two files to `folder`. Raises ExportError, CheckpointError, OSError."""
    weights = plan_weights(engine, checkpoint)
    traced: dict[int, TracedPart] = {}
    unique = {id(part): part for _, part in engine.stages}
    for i, (key, part) in enumerate(unique.items()):
        progress(f"{engine.name}: trace", i, len(unique))
        traced[key] = trace(part)
    progress(f"{engine.name}: trace", len(unique), len(unique))

    builder = GraphBuilder(engine.name, engine.inputs)
    builder.initializers |= {name: weight.initializer() for name, weight in weights.items()}
    collected = []
    for stage, part in engine.stages:
        if any(tensor.name == "index" for tensor in part.inputs):
            builder.values["index"] = builder.constant(
                f"{stage}.index", ir.tensor(np.array([int(stage.split(".")[1])], np.int64))
            )
        builder.add(
            traced[id(part)],
            stage,
            {
                p: builder.initializers[engine.weight_name(stage, p)]
                for p in traced[id(part)].weights
            },
        )
        if engine.collected in part.outputs:
            collected.append(builder.values[engine.collected])
    if engine.collected:
        builder.concat(engine.collected, collected, axis=1)
    ir.save(builder.model(engine.outputs), folder / MODEL)
    write_data(engine, weights, folder / DATA, progress)


def write_data(engine: Engine, weights: dict[str, Weight], file: Path, progress: Progress) -> None:
    with file.open("wb") as stream:
        for i, weight in enumerate(weights.values()):
            progress(f"{engine.name}: weights", i, len(weights))
            stream.write(b"\0" * (weight.offset - stream.tell()))
            if weight.source.shape == weight.shape:
                for chunk in weight.source.chunks():
                    stream.write(chunk.data)
            else:
                stream.write(single_frame(weight.source.read(), weight.shape).data)
    progress(f"{engine.name}: weights", len(weights), len(weights))


def single_frame(tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A weight of the video decoder as the image decoder has it: of a causal convolution's time
    axis the last tap, of a norm one axis less."""
    if tensor.ndim == 5:
        tensor = tensor[:, :, -1]
    return np.ascontiguousarray(tensor).reshape(shape)
