"""The full-size DiT in FP8 and NVFP4, compiled by TensorRT-RTX for SM120.

    python -m bench.compile_full_size [--blocks 60] [--recipes fp8 nvfp4] [--work DIR]

Needs neither a checkpoint nor a GPU: random weights go through the export's own code into a graph
of the real sizes, and TensorRT-RTX compiles it. Both precisions run side by side, every step in a
process of its own, whose time and peak memory are told; the result is written after every step.
60 blocks need 45 GB of disk in DIR.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch
from diffusers import QwenImageTransformer2DModel

from bench.common import GB, check_space, folder_gb, in_process, positive, write_result
from build.engine_builder import RTX, ShapeRange, build_engine
from export.calibration import Calibration
from export.convert import convert_engine
from export.engines import dit
from export.progress import ignore_progress
from export.recipe import load_recipe
from export.write import MODEL, plan_engine

RECIPES = ("fp8", "nvfp4")
TARGET = "sm120"
# Smallest, best and largest: one to four rows, 512² to 1664 · 928 pixels.
BATCH, IMAGE_TOKENS, TEXT_TOKENS = (1, 2, 4), (1024, 4096, 6032), (16, 256, 1024)
POOL, PIECE = 2**24, 2**22  # random numbers, and how many of them are a piece of a weight
BLOCK_GB = {"fp8": 0.47, "nvfp4": 0.28}  # of disk: its weights in the graph and in the engine

MAKE = """
import sys; from pathlib import Path; from bench import compile_full_size
result = compile_full_size.make(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""
COMPILE = """
import sys; from pathlib import Path; from bench import compile_full_size
result = compile_full_size.compile_engine(Path(sys.argv[1]))
"""


@dataclass(frozen=True)
class RandomTensor:
    """Stands for a StoredTensor: stretches of one row of normal numbers, in other places for every
    tensor, scaled so that a layer keeps the size of its input."""

    name: str
    shape: tuple[int, ...]
    pool: np.ndarray

    def chunks(self) -> Iterator[np.ndarray]:
        scale = np.float32(math.prod(self.shape[1:]) ** -0.5)
        place = zlib.crc32(self.name.encode())
        for done in range(0, math.prod(self.shape), PIECE):
            first = (place + 7919 * done // PIECE) % (POOL - PIECE)
            yield self.pool[first : first + min(PIECE, math.prod(self.shape) - done)] * scale


def make(folder: Path, recipe: str, blocks: int) -> dict[str, Any]:
    """Writes the DiT, converted by a recipe, to `folder`."""
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(num_layers=blocks).eval()
    pool = np.random.default_rng(0).standard_normal(POOL, np.float32)
    tensors = {
        name: RandomTensor(name, tuple(value.shape), pool)
        for name, value in transformer.state_dict().items()
    }
    # As much of a checkpoint as the DiT's export reads.
    checkpoint: Any = SimpleNamespace(transformer=transformer, tensors={"transformer": tensors})
    engine = dit(checkpoint)
    model, weights = plan_engine(engine, checkpoint, ignore_progress)
    # Made up: neither size nor time depends on the ranges.
    ranges = {}
    for name, weight in weights.items():
        layer = f"dit/{name.removesuffix('.weight')}"
        ranges[f"{layer}/amax"] = np.array(8, np.float32)
        ranges[f"{layer}/squares"] = np.ones(weight.shape[-1], np.float32)
    calibration = Calibration(folder, {}, ranges)
    made = convert_engine(
        engine, model, weights, load_recipe(recipe)["dit"], calibration, folder, ignore_progress
    )
    return {"layers": made["layers"], "weights_gb": folder_gb(folder)}


def compile_engine(folder: Path) -> dict[str, Any]:
    """Compiles the graph in `folder`; returns what the engine's description says."""
    ranges = shape_ranges(onnx.load(folder / MODEL, load_external_data=False))
    engine = build_engine(folder / MODEL, folder / "model.rtx", RTX, TARGET, [ranges])
    return {
        "engine_gb": round(engine["bytes"] / GB, 3),
        "build_seconds": engine["seconds"],
        "tensorrt_rtx": engine["version"],
        "target": engine["target"],
        "shapes": engine["profiles"][0]["hidden_states"],
    }


def shape_ranges(graph: onnx.ModelProto) -> dict[str, ShapeRange]:
    """A range for each input, by the names of its free dimensions."""
    free = [
        {"batch": batch, "image_tokens": image, "text_tokens": text, "all_tokens": image + text}
        for batch, image, text in zip(BATCH, IMAGE_TOKENS, TEXT_TOKENS, strict=True)
    ]
    ranges = {}
    for tensor in graph.graph.input:
        dims = tensor.type.tensor_type.shape.dim
        sizes = [tuple(one.get(dim.dim_param, dim.dim_value) for dim in dims) for one in free]
        ranges[tensor.name] = ShapeRange(*sizes)
    return ranges


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compile_full_size")
    parser.add_argument("--blocks", type=positive, default=60)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--work", type=Path, help="folder for the temporary files")
    options = parser.parse_args()
    check_space(
        parser, options.work, options.blocks * sum(BLOCK_GB[name] for name in options.recipes)
    )
    result: dict[str, Any] = {"blocks": options.blocks}
    writing = threading.Lock()

    def step(recipe: str, name: str, code: str, folder: Path, *arguments: object) -> None:
        done = in_process(code, folder, *arguments)
        with writing:
            result.setdefault(recipe, {})[name] = done
            print(write_result("compile_full_size", result), recipe, name, done, flush=True)

    def measure(recipe: str) -> None:
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            step(recipe, "make", MAKE, Path(work), recipe, options.blocks)
            step(recipe, "compile", COMPILE, Path(work))

    with ThreadPoolExecutor() as pool:
        list(pool.map(measure, options.recipes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
