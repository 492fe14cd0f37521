"""Writes an engine's weights as the runtime for Hopper takes them: model.safetensors, streamed.

Layers that share an input lie in one tensor (`backend/engine/hopper/layout.yaml`). What the recipe
makes FP8 is E4M3 with an FP32 scale for each output channel, if all of a tensor's layers are; the
rest is BF16, also what it would store in eight bits and compute in BF16. The file's metadata
describe it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from torch import nn

from backend.engine.hopper.layout import layout
from export.calibration import Calibration
from export.cast import FP32_INPUTS
from export.checkpoint import Checkpoint
from export.engines import Engine
from export.graph import ExportError
from export.progress import Progress
from export.quantize import SMALLEST, scaled
from export.recipe import EngineRecipe
from export.write import Weight, plan_weights

PACKED = "model.safetensors"
PACKABLE = "holds layers in bf16 and fp8 only"
FORMAT = 1  # `hopper.weights` reads this one
BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}


@dataclass(frozen=True)
class Packed:
    """Sources whose rows lie behind each other, and the tensors made of them: one in BF16, or the
    elements in E4M3 and their scales."""

    sources: list[Weight]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # by name: dtype, shape
    given: np.ndarray | None = None  # the elements, where they are no source's

    def pieces(self) -> Iterator[np.ndarray]:
        """The tensors' elements in order."""
        if self.given is not None:
            yield self.given
        scales = []
        for source in self.sources:
            if len(self.tensors) == 1:
                yield from (piece.astype(ml_dtypes.bfloat16) for piece in source.pieces())
            else:
                whole = np.concatenate([piece.reshape(-1) for piece in source.pieces()])
                elements, scale = scaled(whole.reshape(source.shape), "fp8")
                scales.append(scale)
                yield elements
        yield from scales


def unpackable(recipe: EngineRecipe) -> str | None:
    """Why no engine can be written by it, if so; eight-bit weights for BF16 arithmetic are BF16."""
    formats = {name for name, patterns in recipe.formats.items() if patterns}
    if not {*formats, recipe.edge_format} <= {"fp8", "int8_weights", "keep"}:
        return f"{PACKED} {PACKABLE}"
    if recipe.compute != "bf16":
        return f"{PACKED} computes in bf16, not in {recipe.compute}"
    return None


def write_packed(
    engine: Engine,
    checkpoint: Checkpoint,
    recipe: EngineRecipe,
    borders: Mapping[str, Any],
    calibration: Calibration | None,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Writes `folder`/model.safetensors; returns what the manifest says of it.

    borders: `inputs` and `outputs` of the FP32 engine, as `export.entry` gives them. calibration:
    for attention in FP8. Raises ExportError, CheckpointError, OSError.
    """
    weights = plan_weights(engine, checkpoint)
    found = layer_names(engine)
    assigned = recipe.assign(found, engine.blocks)
    if why := unpackable(recipe):
        raise ExportError(f"{recipe.where}: {why}")
    quantized = {name for name, kind in assigned.items() if kind == "fp8"}
    packed = pack(engine.name, weights, quantized)
    if recipe.attention:
        if calibration is None:
            raise ExportError(
                f"{recipe.where} needs the ranges of the attention's values: make them with "
                "`python -m export.calibrate` and name the file as CALIBRATION"
            )
        packed += largest_values(engine, calibration, recipe.edges(engine.blocks))
    described = {
        direction: {name: border(name, tensor) for name, tensor in borders[direction].items()}
        for direction in ("inputs", "outputs")
    }
    description = {"format": FORMAT, "engine": engine.name, **described}
    description["config"] = configuration(engine, checkpoint)
    save(engine.name, packed, description, folder / PACKED, progress)
    in_fp8 = {part.name for group in packed if len(group.tensors) == 2 for part in group.sources}
    counts = Counter("fp8" if f"{name}.weight" in in_fp8 else "bf16" for name in found)
    return ({"attention": recipe.attention} if recipe.attention else {}) | {
        "precision": recipe.name,
        "compute": "bf16",
        "layers": dict(counts),
        "artifact": PACKED,
        "files": [PACKED],
        **described,
    }


def layer_names(engine: Engine) -> list[str]:
    """The engine's layers: matrix multiplications and convolutions with a weight."""
    return [
        engine.weight_name(stage, f"{name}.weight").removesuffix(".weight")
        for stage, part in engine.stages
        for name, module in part.module.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]


def pack(engine: str, weights: Mapping[str, Weight], quantized: set[str]) -> list[Packed]:
    """What the file holds; quantized: layers in FP8, if those that lie in one tensor with them
    are so, too."""
    packed = []
    for name, sources in layout(engine, weights).items():
        parts = [weights[source] for source in sources]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if quantized.issuperset(source.removesuffix(".weight") for source in sources):
            scale = f"{name.removesuffix('.weight')}.scale"
            tensors = {name: ("F8_E4M3", shape), scale: ("F32", shape[:1])}
        else:
            tensors = {name: ("BF16", shape)}
        packed.append(Packed(parts, tensors))
    return packed


def largest_values(engine: Engine, calibration: Calibration, edges: set[int]) -> Iterator[Packed]:
    """The largest absolute value that a block's attention mixes, for each but those at the ends."""
    for i in sorted({*range(engine.blocks)} - edges):
        block = f"{engine.blocks_prefix}.{i}"
        amax = max(calibration.amax(f"{engine.name}/{block}.attn.value"), SMALLEST)
        given = np.array([amax], np.float32)
        yield Packed([], {f"{block}.attention.largest_value": ("F32", (1,))}, given)


def save(
    engine: str, groups: Sequence[Packed], description: Any, file: Path, progress: Progress
) -> None:
    """Writes the header, then the tensors one source at a time."""
    header: dict[str, Any] = {"__metadata__": {"description": json.dumps(description)}}
    end = 0
    for group in groups:
        for name, (dtype, shape) in group.tensors.items():
            start, end = end, end + BYTES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for i, group in enumerate(groups):
            progress(f"{engine}: weights", i, len(groups))
            for piece in group.pieces():
                stream.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    progress(f"{engine}: weights", len(groups), len(groups))


def border(name: str, tensor: Mapping[str, Any]) -> dict[str, Any]:
    bf16 = tensor["dtype"] == "FP32" and name not in FP32_INPUTS
    return {**tensor, "dtype": "BF16"} if bf16 else dict(tensor)


def configuration(engine: Engine, checkpoint: Checkpoint) -> dict[str, Any]:
    """What the forward pass needs to know besides the weights."""
    if engine.name == "text_encoder":
        config = checkpoint.text_config
        names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
        return {name: getattr(config, name) for name in names} | {
            "rope_theta": config.rope_parameters["rope_theta"],
            "dropped_tokens": checkpoint.dropped_tokens,
        }
    if engine.name == "vae_decoder":
        return {name: checkpoint.vae.config[name] for name in ("dim_mult", "num_res_blocks")}
    needed = ("num_layers", "attention_head_dim", "axes_dims_rope")
    return {name: checkpoint.transformer.config[name] for name in needed}
