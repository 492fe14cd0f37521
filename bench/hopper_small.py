"""The trained small checkpoint through the engines for Hopper: single predictions and pictures.

    python -m bench.hopper_small

Noise predictions for the gate's prompts (`quality/gates/tiny`) against diffusers' in FP32, the
lowest cosine of eight at each level of noise. On a GPU by the kernels, elsewhere by what they
compute in torch.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import ROOT, write_result
from build.assemble import assemble
from build.profile import load_profile
from build.progress import ProgressBar
from build.tiny import CALIBRATION, CHECKPOINT
from export.calibration import load_calibration
from export.checkpoint import Checkpoint
from export.engines import engines
from export.export import entry
from export.packed import PACKED, write_packed
from export.progress import ignore_progress
from export.recipe import EngineRecipe, load_recipe
from quality.distances import cosine
from quality.gate import Prompt, load_gate
from quality.run import load_run, measure
from quality.served import Served, pack, position_ids, unpack
from runtimes.safetensors import Runtime
from serving.server import TritonServer
from tests.e2e.serving_helpers import hopper_on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The recipe of each engine; where it says nothing of one, that is in BF16.
VARIANTS: dict[str, dict[str, str]] = {
    "bf16": {},
    "the DiT by fp8-rows": {"dit": "fp8-rows"},
    "the DiT by fp8-rows-attention": {"dit": "fp8-rows-attention"},
    "the DiT by fp8-rows-all": {"dit": "fp8-rows-all"},
    "the text encoder by fp8-rows": {"text_encoder": "fp8-rows"},
    "that and the DiT by fp8-rows-attention": {
        "text_encoder": "fp8-rows",
        "dit": "fp8-rows-attention",
    },
    "that and the DiT by fp8-rows-all": {"text_encoder": "fp8-rows", "dit": "fp8-rows-all"},
    "the DiT by fp8": {"dit": "fp8"},
    "the DiT and the text encoder by fp8": {"text_encoder": "fp8", "dit": "fp8"},
    "the DiT by fp8-attention": {"dit": "fp8-attention"},
}
PICTURES = ("fp8-rows", "fp8-rows-attention", "fp8-rows-all")


class Engines:
    def __init__(self, checkpoint: Checkpoint, recipes: dict[str, str], folder: Path) -> None:
        self.template = checkpoint.describe()["prompt_template"]
        self.tokenizer = checkpoint.tokenizer
        self.runtimes = {}
        fingerprint = checkpoint.describe()["fingerprint"]
        calibration = load_calibration(CALIBRATION, fingerprint)
        for engine in engines(checkpoint):
            recipe = EngineRecipe("bf16", f"recipe 'bf16', {engine.name}", "bf16")
            if engine.name in recipes:
                recipe = load_recipe(recipes[engine.name])[engine.name]
            place = folder / engine.name
            place.mkdir()
            write_packed(
                engine, checkpoint, recipe, entry(engine, {}), calibration, place, ignore_progress
            )
            self.runtimes[engine.name] = Runtime(place / PACKED, {"device": DEVICE})

    def predict_noise(self, prompt: Prompt, latents: np.ndarray, level: float) -> np.ndarray:
        ids = self.tokenizer(self.template.format(prompt.text), return_tensors="pt").input_ids
        text = self.runtimes["text_encoder"].run({"input_ids": ids})["hidden_states"]
        modulation = self.runtimes["modulation"].run({"timestep": torch.tensor([[level]])})
        height, width = latents.shape[1:]
        positions = position_ids(text.shape[1], height // 2, width // 2)[None]
        batch = {
            "hidden_states": torch.from_numpy(pack(latents[None])),
            "encoder_hidden_states": text,
            "text_mask": torch.ones(text.shape[:2], dtype=torch.bool),
            "position_ids": torch.from_numpy(np.ascontiguousarray(positions)),
            **modulation,
        }
        prediction = self.runtimes["dit"].run(batch)["noise_pred"]
        result: np.ndarray = unpack(prediction.float().cpu().numpy(), height, width)[0]
        return result


def lowest_cosines(made: Engines) -> dict[str, float]:
    gate = load_gate(ROOT / "quality" / "gates" / "tiny")
    assert gate.reference is not None
    theirs = load_run(gate.reference).noise()
    assert theirs is not None
    result = {}
    for i, level in enumerate(theirs["levels"].tolist()):
        cosines = []
        for number in gate.noise_indices():
            latents = theirs[f"latents_{number}"][i]
            predicted = made.predict_noise(gate.prompts[number], latents, level)
            cosines.append(cosine(predicted, theirs[f"predicted_{number}_{i}"]))
        result[f"{level:g}"] = round(min(cosines), 5)
    return result


def pictures(recipe: str, folder: Path) -> dict[str, Any]:
    """The gate's pictures by the whole profile, its DiT by a recipe, served on the CPU."""
    profile = load_profile("h200-torch")
    dit = replace(profile.engines["dit"], precision=recipe)
    profile = replace(profile, engines={**profile.engines, "dit": dit})
    assemble(CHECKPOINT, profile, folder / "gpu", calibration=CALIBRATION)
    repository = hopper_on_cpu(folder / "gpu", folder / "cpu")
    gate = load_gate(ROOT / "quality" / "gates" / "tiny")
    assert gate.reference is not None
    bar = ProgressBar()
    with TritonServer(repository, "h200-torch") as server, Served(server.grpc_url) as served:
        result = measure(gate, served, folder / "run", load_run(gate.reference), bar)
    bar.close()
    kept = ("score", "score_low", "score_high", "score_en", "score_zh", "distances", "comparison")
    return {name: result[name] for name in kept}


def main() -> None:
    checkpoint = Checkpoint(CHECKPOINT)
    values: dict[str, Any] = {"device": DEVICE, "lowest_cosines": {}}
    for name, recipes in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            made = Engines(checkpoint, recipes, Path(folder))
            values["lowest_cosines"][name] = lowest_cosines(made)
        print(name, values["lowest_cosines"][name], flush=True)
    values["pictures"] = {}
    for recipe in PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            values["pictures"][recipe] = pictures(recipe, Path(folder))
        print(recipe, values["pictures"][recipe], flush=True)
    print(write_result("hopper_small", values))


if __name__ == "__main__":
    main()
