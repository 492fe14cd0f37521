"""Writes an engine: model.onnx (the graph) and model.onnx.data (its weights, streamed)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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
    """A weight as the engine holds it. `pieces` gives its elements in order; one piece at a time
    is in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: ir.DataType
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def length(self) -> int:
        """Bytes; of 4-bit types two elements share one."""
        return math.ceil(self.dtype.itemsize * math.prod(self.shape))

    def value(self) -> ir.Value:
        """The graph's initializer, still without its place in the data file."""
        return ir.Value(name=self.name, type=ir.TensorType(self.dtype), shape=ir.Shape(self.shape))


def plan_weights(engine: Engine, checkpoint: Checkpoint) -> dict[str, Weight]:
    """The engine's weights, FP32, by their names in the checkpoint, in the order of their use."""
    result: dict[str, Weight] = {}
    for stage, part in engine.stages:
        for parameter, value in part.module.named_parameters():
            name = engine.weight_name(stage, parameter)
            source, shape = checkpoint.tensors[engine.component][name], tuple(value.shape)
            result[name] = Weight(name, shape, ir.DataType.FLOAT, partial(fitted, source, shape))
    return result


def fitted(source: StoredTensor, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """A stored tensor's elements, as those of `shape`."""
    if source.shape == shape:
        yield from source.chunks()
    else:
        yield single_frame(source.read(), shape)


def write_engine(
    engine: Engine, checkpoint: Checkpoint, folder: Path, progress: Progress
) -> tuple[ir.Model, dict[str, Weight]]:
    """Writes the engine's two files to `folder`, in FP32; returns what they were written from.

    Raises ExportError, CheckpointError, OSError.
    """
    weights = plan_weights(engine, checkpoint)
    model = build_graph(engine, weights, progress)
    save(engine.name, model, weights, folder, progress)
    return model, weights


def build_graph(engine: Engine, weights: Mapping[str, Weight], progress: Progress) -> ir.Model:
    """The engine's graph in FP32; its weights are initializers without data."""
    traced: dict[int, TracedPart] = {}
    unique = {id(part): part for _, part in engine.stages}
    for i, (key, part) in enumerate(unique.items()):
        progress(f"{engine.name}: trace", i, len(unique))
        traced[key] = trace(part)
    progress(f"{engine.name}: trace", len(unique), len(unique))

    builder = GraphBuilder(engine.name, engine.inputs)
    builder.initializers |= {name: weight.value() for name, weight in weights.items()}
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
    return builder.model(engine.outputs)


def save(
    name: str, model: ir.Model, weights: Mapping[str, Weight], folder: Path, progress: Progress
) -> None:
    """Writes the graph, and the weights that it uses behind each other into its data file."""
    used = {key: weight for key, weight in weights.items() if key in model.graph.initializers}
    offsets = {}
    end = 0
    for key, weight in used.items():
        offsets[key] = end
        end += -(-weight.length // ALIGNMENT) * ALIGNMENT
        model.graph.initializers[key].const_value = ir.ExternalTensor(
            DATA,
            offsets[key],
            weight.length,
            weight.dtype,
            shape=ir.Shape(weight.shape),
            name=key,
        )
    ir.save(model, folder / MODEL)
    with (folder / DATA).open("wb") as stream:
        for i, (key, weight) in enumerate(used.items()):
            progress(f"{name}: weights", i, len(used))
            stream.write(b"\0" * (offsets[key] - stream.tell()))
            for piece in weight.pieces():
                stream.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    progress(f"{name}: weights", len(used), len(used))


def single_frame(tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A weight of the video decoder as the image decoder has it: of a causal convolution's time
    axis the last tap, of a norm one axis less."""
    if tensor.ndim == 5:
        tensor = tensor[:, :, -1]
    return np.ascontiguousarray(tensor).reshape(shape)
