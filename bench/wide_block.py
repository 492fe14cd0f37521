"""One block of the DiT at full width in each precision: does width make quantizing easier?

    python -m bench.wide_block

Random weights, with outliers as trained models have them: the channels that the norms' modulation
hands to the layers differ as those of checkpoints/tiny do (log-normal, its widest deviation), and
one in a thousand is twenty times as large, as Dettmers et al. found in language models (LLM.int8(),
2022, section 4); so is one in a thousand of the values and of the MLPs' hidden channels. The same
at the width of checkpoints/tiny and at one between. Full width takes 5 GB of memory.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from safetensors.torch import load_file, save_file

from bench.common import write_result
from export.calibration import Calibration
from export.convert import convert_engine
from export.recipe import EngineRecipe, load_recipe
from export.write import MODEL
from quality.distances import cosine
from quality.served import position_ids
from tests.export.written import Written, ignore
from tests.make_checkpoint import make_checkpoint

SMALL: dict[str, Any] = {"heads": 5, "head_size": 32, "rope_axes": (8, 12, 12)}  # checkpoints/tiny
PUBLISHED: dict[str, Any] = {"heads": 24, "head_size": 128, "rope_axes": (16, 56, 56)}
SHAPES = [SMALL, PUBLISHED | {"heads": 8}, PUBLISHED]
LEVELS = (0.95, 0.6, 0.2)
SIDE, TEXT = 12, 48  # image tokens a side, text tokens
SPREAD = 0.95  # of the logarithms of channels' sizes: the most in checkpoints/tiny
OUTLIERS, LARGER = 1000, 20  # one in so many, so many times as large


def recipes() -> dict[str, EngineRecipe]:
    """The shipped recipes of the DiT (a single block is no edge), and FP8 without exceptions."""
    found = {name: load_recipe(name)["dit"] for name in ("fp8", "int8", "nvfp4")}
    every = found["nvfp4"].formats
    formats = {"fp8": every["nvfp4"], "keep": every["keep"]}
    return found | {"fp8 everywhere": replace(found["fp8"], formats=formats)}


def add_outliers(folder: Path) -> None:
    """Changes the transformer of a checkpoint in one file."""
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    rng = np.random.default_rng(0)

    def outliers(count: int) -> torch.Tensor:
        factors = np.ones(count, np.float32)
        factors[rng.choice(count, max(1, count // OUTLIERS), replace=False)] = LARGER
        return torch.from_numpy(factors)

    for name, tensor in tensors.items():
        if name.endswith("_mod.1.bias"):
            for scale in tensor.chunk(6)[1::3]:
                sizes = torch.from_numpy(rng.lognormal(0, SPREAD, len(scale)).astype(np.float32))
                scale.copy_(sizes * outliers(len(scale)) - 1)  # the norm adds the one
        elif "attn.norm_" in name:
            tensor.fill_(1)  # not the sharp attention that lets tests see mistakes
        elif name.endswith(("attn.to_v.weight", "attn.add_v_proj.weight", "net.0.proj.weight")):
            tensor.mul_(outliers(len(tensor))[:, None])
    save_file(tensors, file, metadata={"format": "pt"})


class WideBlock(Written):
    """A checkpoint of one block with outliers, written in FP32. `shape`: of its attention, as
    `make_checkpoint` takes it."""

    def __init__(self, shape: dict[str, Any], folder: Path) -> None:
        checkpoint = make_checkpoint(folder / "checkpoint", **shape, blocks=1, max_shard_size=2**40)
        add_outliers(checkpoint)
        super().__init__(checkpoint, folder, ("modulation", "dit"))
        self.ranges = self._ranges()
        self.feeds = [self.noise(level, seed=1) for level in LEVELS]
        self.expected = self.outputs(folder / "dit")

    def noise(self, level: float, seed: int) -> dict[str, np.ndarray]:
        """Inputs of the DiT at a noise level."""
        rng = np.random.default_rng(seed)
        timestep = {"timestep": np.array([[level]], np.float32)}
        block, final = self.session(self.folder / "modulation").run(None, timestep)
        width = self.engines["dit"].inputs[1].shape[-1]
        assert isinstance(width, int)
        return {
            "hidden_states": rng.standard_normal((1, SIDE * SIDE, 64), np.float32),
            "encoder_hidden_states": rng.standard_normal((1, TEXT, width), np.float32),
            "text_mask": np.ones((1, TEXT), np.bool_),
            "position_ids": position_ids(TEXT, SIDE, SIDE)[None],
            "block_modulation": block,
            "final_modulation": final,
        }

    def _ranges(self) -> Calibration:
        """Over the noise levels, of other inputs than are measured."""
        tensors: dict[str, np.ndarray] = {}
        for level in LEVELS:
            self.inputs["dit"] = self.noise(level, seed=0)
            for name, value in self.calibration("dit").tensors.items():
                known = tensors.get(name, np.zeros_like(value))
                if name.endswith("/squares"):
                    tensors[name] = known + value / len(LEVELS)
                else:
                    tensors[name] = np.maximum(known, value)
        return Calibration(self.folder, {}, tensors)

    def outputs(self, folder: Path) -> list[np.ndarray]:
        session = self.session(folder)
        return [session.run(None, feed)[0] for feed in self.feeds]

    def cosines(self, recipe: EngineRecipe) -> list[float]:
        """To FP32, at each noise level."""
        model = ir.load(self.folder / "dit" / MODEL)
        engine, weights = self.engines["dit"], self.weights["dit"]
        exact = replace(recipe, compute="fp32")
        with tempfile.TemporaryDirectory(dir=self.folder) as made:
            convert_engine(engine, model, weights, exact, self.ranges, Path(made), ignore)
            results = self.outputs(Path(made))
        return [cosine(a, b) for a, b in zip(results, self.expected, strict=True)]


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.wide_block", description=__doc__).parse_args()
    values: dict[str, Any] = {"noise_levels": LEVELS, "widths": {}}
    for shape in SHAPES:
        width = shape["heads"] * shape["head_size"]
        with tempfile.TemporaryDirectory() as folder:
            block = WideBlock(shape, Path(folder))
            found = {name: block.cosines(recipe) for name, recipe in recipes().items()}
        values["widths"][width] = found
        print(width, found, flush=True)
    print(write_result("wide_block", values))


if __name__ == "__main__":
    main()
