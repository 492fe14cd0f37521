"""The trained small checkpoint's engines in FP32, and how near a recipe comes to them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from build.tiny import CHECKPOINT, ROOT
from export import Checkpoint
from export.calibration import Calibration
from export.convert import convert_engine
from export.engines import engines
from export.progress import ignore_progress
from export.quantize import layers
from export.recipe import EngineRecipe
from export.write import MODEL, write_engine
from quality.distances import cosine
from quality.gate import load_gate
from quality.served import pack, position_ids

GATE = load_gate(ROOT / "quality" / "gates" / "tiny")
Arrays = dict[str, np.ndarray]


class Trained:
    """Writes the engines once; a recipe then takes a second.

    The DiT is run on the gate's noise inputs with the FP32 text encoder's text, so that only its
    own error counts; the text encoder on all prompts of the gate.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        checkpoint = Checkpoint(CHECKPOINT)
        self.fingerprint = checkpoint.describe()["fingerprint"]
        self.engines = {e.name: e for e in engines(checkpoint) if e.name != "vae_decoder"}
        self.weights = {}
        for name, engine in self.engines.items():
            (folder / name).mkdir()
            _, self.weights[name] = write_engine(engine, checkpoint, folder / name, ignore_progress)
        template = checkpoint.describe()["prompt_template"]
        prompts = [checkpoint.tokenizer(template.format(p.text)).input_ids for p in GATE.prompts]
        self.feeds = {"text_encoder": [{"input_ids": np.array([ids])} for ids in prompts]}
        self.expected = {"text_encoder": self.run("text_encoder", folder / "text_encoder")}
        self.feeds["dit"] = self._noise()
        self.expected["dit"] = self.run("dit", folder / "dit")

    def layers(self, name: str) -> list[str]:
        return list(layers(ir.load(self.folder / name / MODEL), self.weights[name]))

    def _noise(self) -> list[Arrays]:
        """The DiT's inputs, level by level."""
        assert GATE.reference is not None
        noise = np.load(GATE.reference / "noise.npz")
        modulation = open_session(self.folder / "modulation")
        feeds = []
        for i, level in enumerate(GATE.noise_levels):
            names = ["block_modulation", "final_modulation"]
            given = modulation.run(names, {"timestep": np.array([[level]], np.float32)})
            for number in GATE.noise_indices():
                latents = noise[f"latents_{number}"][i : i + 1]
                text = self.expected["text_encoder"][number]
                height, width = latents.shape[2:]
                positions = position_ids(text.shape[1], height // 2, width // 2)
                feeds.append(
                    {
                        "hidden_states": pack(latents),
                        "encoder_hidden_states": text,
                        "text_mask": np.ones(text.shape[:2], np.bool_),
                        "position_ids": positions[None],
                        **dict(zip(names, given, strict=True)),
                    }
                )
        return feeds

    def run(self, name: str, folder: Path) -> list[np.ndarray]:
        session = open_session(folder)
        return [session.run(None, feed)[0] for feed in self.feeds[name]]

    def cosines(self, name: str, recipe: EngineRecipe, calibration: Calibration) -> list[float]:
        """The lowest over the prompts: of the DiT one for each of the gate's noise levels, of the
        text encoder one."""
        model = ir.load(self.folder / name / MODEL)
        with tempfile.TemporaryDirectory(dir=self.folder) as made:
            convert_engine(
                self.engines[name],
                model,
                self.weights[name],
                replace(recipe, compute="fp32"),
                calibration,
                Path(made),
                ignore_progress,
            )
            results = self.run(name, Path(made))
        found = [cosine(a, b) for a, b in zip(results, self.expected[name], strict=True)]
        groups = len(GATE.noise_levels) if name == "dit" else 1
        return [min(group) for group in np.array_split(found, groups)]


def open_session(folder: Path) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # Models as small as these wait for their threads longer than they compute.
    options.intra_op_num_threads = 1
    # As the service runs them: inputs of layers with INT8 weights are not rounded to INT8, too.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return ort.InferenceSession(str(folder / MODEL), options, providers=["CPUExecutionProvider"])
