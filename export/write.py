"""Writes an engine: model.onnx (the graph) and model.onnx.data (its weights, streamed)."""

from __future__ import annotations

import math
import zlib
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

    def read(self) -> np.ndarray:
        """All elements of an FP32 weight at once."""
        result, done = np.empty(math.prod(self.shape), np.float32), 0
        for piece in self.pieces():
            result[done : done + piece.size] = piece.reshape(-1)
            done += piece.size
        return result.reshape(self.shape)

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


def plan_engine(
    engine: Engine, checkpoint: Checkpoint, progress: Progress
) -> tuple[ir.Model, dict[str, Weight]]:
    """The engine in FP32: its graph, and the weights that belong into its data file.

    Raises ExportError.
    """
    weights = plan_weights(engine, checkpoint)
    return build_graph(engine, weights, progress), weights


def write_engine(
    engine: Engine, checkpoint: Checkpoint, folder: Path, progress: Progress
) -> tuple[ir.Model, dict[str, Weight]]:
    """Writes the engine's two files to `folder`, in FP32; returns what they were written from.

    Raises ExportError, CheckpointError, OSError.
    """
    model, weights = plan_engine(engine, checkpoint, progress)
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


def place(model: ir.Model, weights: Mapping[str, Weight]) -> dict[str, int]:
    """Gives the weights that the graph uses their places in the data file, one behind another;
    returns their offsets in bytes."""
    offsets = {}
    end = 0
    for key, weight in weights.items():
        if key in model.graph.initializers:
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
    return offsets


def save(
    name: str, model: ir.Model, weights: Mapping[str, Weight], folder: Path, progress: Progress
) -> dict[str, int]:
    """Writes the graph, and the weights that it uses into its data file; returns the CRC-32 of each
    one's bytes."""
    offsets = place(model, weights)
    ir.save(model, folder / MODEL)
    sums = dict.fromkeys(offsets, 0)
    with (folder / DATA).open("wb") as stream:
        for i, (key, offset) in enumerate(offsets.items()):
            progress(f"{name}: weights", i, len(offsets))
            stream.write(b"\0" * (offset - stream.tell()))
            for piece in weights[key].pieces():
                data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
                sums[key] = zlib.crc32(data, sums[key])
                stream.write(data)
    progress(f"{name}: weights", len(offsets), len(offsets))
    return sums


def single_frame(tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A weight of the video decoder as the image decoder has it: of a causal convolution's time
    axis the last tap, of a norm one axis less."""
    if tensor.ndim == 5:
        tensor = tensor[:, :, -1]
    return np.ascontiguousarray(tensor).reshape(shape)
