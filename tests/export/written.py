"""A checkpoint's engines in FP32, traced once, and what the recipes make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from export import Checkpoint
from export.attention import PARTS
from export.calibration import Calibration
from export.convert import block_number, convert_engine
from export.engines import engines
from export.quantize import layers
from export.recipe import load_recipe
from export.write import write_engine

NAMES = ("text_encoder", "modulation", "dit", "vae_decoder")


def ignore(*_: Any) -> None: ...


class Written:
    """The small checkpoint's engines in FP32, each traced once."""

    def __init__(self, checkpoint: Path, folder: Path, names: Sequence[str] = NAMES) -> None:
        self.folder = folder
        made = engines(Checkpoint(checkpoint))
        self.engines = {engine.name: engine for engine in made if engine.name in names}
        self.weights = {}
        for name, engine in self.engines.items():
            (folder / name).mkdir()
            _, self.weights[name] = write_engine(
                engine, Checkpoint(checkpoint), folder / name, ignore
            )
        self.inputs = {name: self.feed(name) for name in names}

    def feed(self, name: str) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        sizes = {"batch": 2, "image_tokens": 12, "text_tokens": 8, "all_tokens": 20, "tokens": 60}
        sizes |= {"height": 4, "width": 6}
        feed = {}
        for tensor in self.engines[name].inputs:
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
            if tensor.dtype == ir.DataType.FLOAT:
                feed[tensor.name] = rng.standard_normal(shape).astype(np.float32)
            elif tensor.dtype == ir.DataType.BOOL:
                feed[tensor.name] = np.ones(shape, np.bool_)
            else:
                feed[tensor.name] = rng.integers(0, 32, shape).astype(tensor.dtype.numpy())
        return feed

    def run(self, name: str, folder: Path | None = None) -> np.ndarray:
        return self.session(folder or self.folder / name).run(None, self.inputs[name])[0]

    def session(self, folder: Path) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        path, providers = str(folder / "model.onnx"), ["CPUExecutionProvider"]
        return ort.InferenceSession(path, options, providers=providers)

    def calibration(self, name: str) -> Calibration:
        """The ranges of this one input, found by running the graph with them as outputs."""
        model = ir.load(self.folder / name / "model.onnx")
        found = layers(model, self.weights[name])
        attended = {
            f"transformer_blocks.{block_number(node)}.attn.{part}": value
            for node in model.graph
            if node.op_type == "Attention" and name == "dit"
            for part, value in zip(PARTS, node.inputs, strict=False)
        }
        watched = [layer.activation for layer in found.values()]
        watched = list(dict.fromkeys([*watched, *attended.values()]))
        borders = {value.name for value in model.graph.inputs}
        model.graph.outputs.extend(x for x in watched if x.name not in borders)
        # Where the weights are; the graph alone is written anew.
        path = self.folder / name / "watched.onnx"
        ir.save(model, path)
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        values = dict(zip(names, session.run(None, self.inputs[name]), strict=True))
        values |= self.inputs[name]
        tensors = {}
        for layer in found.values():
            value = values[str(layer.activation.name)]
            axis = 1 if layer.node.op_type == "Conv" else -1
            rows = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
            channels = np.abs(rows).max(0)
            tensors[f"{name}/{layer.name}/amax"] = np.array(channels.max())
            tensors[f"{name}/{layer.name}/channels"] = channels
            tensors[f"{name}/{layer.name}/squares"] = (rows**2).mean(0)
        for key, value in attended.items():
            tensors[f"{name}/{key}/channels"] = np.abs(values[str(value.name)]).max((0, 1))
        return Calibration(path, {}, tensors)

    def convert(
        self, name: str, recipe: str, compute: str, folder: Path, edge_blocks: int = 0
    ) -> dict[str, Any]:
        model = ir.load(self.folder / name / "model.onnx")
        chosen = replace(load_recipe(recipe)[name], compute=compute, edge_blocks=edge_blocks)
        ranges = self.calibration(name) if chosen.formats else None
        return convert_engine(
            self.engines[name], model, self.weights[name], chosen, ranges, folder, ignore
        )
