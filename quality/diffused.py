"""Pictures and noise predictions of diffusers itself, from a checkpoint, in FP32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import QwenImagePipeline

from export import Checkpoint, CheckpointError
from quality.gate import Prompt, QualityError
from quality.source import Picture


class Diffused:
    """`QwenImagePipeline` on a checkpoint in diffusers layout, on a GPU where there is one."""

    def __init__(self, checkpoint: Path) -> None:
        try:
            self._fingerprint = Checkpoint(checkpoint).describe()["fingerprint"]
        except CheckpointError as error:
            raise QualityError(str(error)) from None
        self._name = checkpoint.resolve().name
        self._pipeline = QwenImagePipeline.from_pretrained(checkpoint, dtype=torch.float32)
        self._pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
        self._pipeline.set_progress_bar_config(disable=True)

    def describe(self) -> dict[str, Any]:
        return {
            "source": "diffusers",
            "checkpoint": {"name": self._name, "fingerprint": self._fingerprint},
            "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")},
        }

    def draw(self, prompts: Sequence[Prompt]) -> Iterator[Picture]:
        for number, prompt in enumerate(prompts):
            (picture,) = self._run(prompt, "np")
            yield Picture(number, (picture * 255).round().astype(np.uint8))

    def latents(self, prompt: Prompt) -> np.ndarray:
        tokens = self._run(prompt, "latent")
        height, width = self._size(prompt)
        scale = self._pipeline.vae_scale_factor
        unpacked = self._pipeline._unpack_latents(tokens, height, width, scale)
        return unpacked[0, :, 0].float().cpu().numpy()

    @torch.no_grad()
    def predict_noise(self, prompt: Prompt, latents: np.ndarray, level: float) -> np.ndarray:
        pipeline, (channels, h, w) = self._pipeline, latents.shape
        device = pipeline.transformer.device
        text, mask = pipeline.encode_prompt(prompt.text, device=device, max_sequence_length=1024)
        tokens = pipeline._pack_latents(torch.from_numpy(latents).to(device), 1, channels, h, w)
        prediction = pipeline.transformer(
            tokens,
            timestep=torch.tensor([level], dtype=torch.float32, device=device),
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, h // 2, w // 2)]],
            return_dict=False,
        )[0]
        scale = pipeline.vae_scale_factor
        unpacked = pipeline._unpack_latents(prediction, h * scale, w * scale, scale)
        return unpacked[0, :, 0].float().cpu().numpy()

    def _size(self, prompt: Prompt) -> tuple[int, int]:
        default = self._pipeline.default_sample_size * self._pipeline.vae_scale_factor
        return prompt.fields.get("height", default), prompt.fields.get("width", default)

    def _run(self, prompt: Prompt, output_type: str) -> Any:
        fields = dict(prompt.fields)
        seed = fields.pop("seed")
        # The service's defaults, which are not all the pipeline's.
        fields = {"negative_prompt": " ", "true_cfg_scale": 4.0, **fields}
        fields["height"], fields["width"] = self._size(prompt)
        return self._pipeline(
            **fields,
            max_sequence_length=1024,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type=output_type,
        ).images
