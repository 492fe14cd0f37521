"""Where the check of an engine takes it from: its written files, or the plan of what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort

from export.graph import ExportError
from export.stored import first_line
from export.write import DATA, MODEL, Weight, place


class Written:
    """An engine's files. `graph` has no weights, `bytes` counts them. Raises ExportError."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.graph = read_graph(name, folder)
        self.bytes = (folder / DATA).stat().st_size

    def give(self, options: Any, names: Iterable[str]) -> None:
        """Lets the next session have these weights; they stay in the mapped data file."""
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self.folder)
        )


class Planned:
    """An FP32 engine that is not written: a graph and the weights for it. Raises ExportError."""

    def __init__(self, name: str, model: ir.Model, weights: Mapping[str, Weight]) -> None:
        self.weights = weights
        self.bytes = sum(weights[key].length for key in place(model, weights))
        self.graph = ir.to_proto(model)
        check(name, declared(self.graph))

    def give(self, options: Any, names: Iterable[str]) -> None:
        """Lets the next session have these weights; they stay in memory until the one after it."""
        self._given: dict[str, Any] = {}  # no session keeps them alive
        for name in names:
            value = ort.OrtValue.ortvalue_from_numpy(self.weights[name].read())
            self._given[name] = value
        options.add_external_initializers(list(self._given), list(self._given.values()))


def read_graph(name: str, folder: Path) -> onnx.ModelProto:
    """A written graph without its weights, after ONNX's own check of the files."""
    check(name, folder / MODEL)
    return onnx.load(folder / MODEL, load_external_data=False)


def check(name: str, model: onnx.ModelProto | Path) -> None:
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, RuntimeError) as error:
        raise ExportError(f"{name}: the graph is not valid: {first_line(error)}") from error


def external(graph: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The initializers that lie in the data file."""
    kept = onnx.TensorProto.EXTERNAL
    return [tensor for tensor in graph.graph.initializer if tensor.data_location == kept]


def declared(graph: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with inputs in place of its weights, which ONNX's check would look for in files."""
    result = onnx.ModelProto()
    result.CopyFrom(graph)
    weights = external(result)
    for tensor in weights:
        result.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
        result.graph.initializer.remove(tensor)
    return result
