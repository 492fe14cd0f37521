"""A verified FP32 engine → the same by a recipe: BF16, FP8, NVFP4, INT8."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from export.attention import quantize_attention
from export.calibration import Calibration
from export.cast import to_bf16
from export.engines import Engine
from export.graph import ExportError
from export.progress import Progress
from export.quantize import Activations, layers, quantize
from export.recipe import EngineRecipe
from export.simulate import simulate
from export.source import read_graph
from export.verify import check_written
from export.write import Weight, save


def convert_engine(
    engine: Engine,
    model: ir.Model,
    weights: Mapping[str, Weight],
    recipe: EngineRecipe,
    calibration: Calibration | None,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Writes the engine's files to `folder` and checks them; returns what the manifest says of it.

    In FP32 NVFP4 layers are simulated, since no runtime but TensorRT has them.

    model, weights: what `plan_engine` returned; `model` is changed. Raises ExportError.
    """
    found = layers(model, weights)
    formats = recipe.assign(found, engine.blocks)
    if (formats or recipe.attention) and calibration is None:
        raise ExportError(
            f"{recipe.where} needs the ranges of activations: make them with "
            "`python -m export.calibrate` and name the file as CALIBRATION"
        )
    converted = to_bf16(model, weights) if recipe.compute == "bf16" else dict(weights)
    if formats:
        assert calibration is not None
        converted |= {f"{name}.weight": weights[f"{name}.weight"] for name in formats}
        activations = Activations(
            lambda name: calibration.amax(f"{engine.name}/{name}"),
            lambda name: calibration.channels(f"{engine.name}/{name}"),
            lambda name: calibration.squares(f"{engine.name}/{name}"),
        )
        converted = quantize(model, converted, formats, activations, recipe.smooth)
    if recipe.attention:
        assert calibration is not None
        edges = recipe.edges(engine.blocks)

        def attention_name(node: ir.Node) -> str | None:
            block = block_number(node)
            return None if block in edges else f"{engine.blocks_prefix}.{block}.attn"

        quantize_attention(
            model.graph,
            attention_name,
            lambda name: calibration.channels(f"{engine.name}/{name}"),
        )
    if recipe.compute == "fp32" and "nvfp4" in formats.values():
        # Nothing but TensorRT computes its form.
        with tempfile.TemporaryDirectory(dir=folder) as form:
            write_checked(engine.name, model, converted, Path(form), progress)
            simulate(Path(form), folder)
        read_graph(engine.name, folder)
    else:
        write_checked(engine.name, model, converted, folder, progress)
    counts = Counter(formats.get(name, recipe.compute) for name in found)
    described = {"precision": recipe.name, "compute": recipe.compute, "layers": dict(counts)}
    return described | ({"attention": recipe.attention} if recipe.attention else {})


def block_number(node: ir.Node) -> int:
    """Of the block that a node is of: its name is `block.<number>/…`."""
    return int(str(node.name).split("/")[0].removeprefix("block."))


def write_checked(
    name: str, model: ir.Model, weights: Mapping[str, Weight], folder: Path, progress: Progress
) -> None:
    sums = save(name, model, weights, folder, progress)
    check_written(name, folder, sums, progress)
