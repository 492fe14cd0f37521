"""Pictures and noise predictions of diffusers itself, from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import QwenImagePipeline
from torch import Tensor, nn

from export import Checkpoint, CheckpointError
from quality.gate import Prompt, QualityError
from quality.source import Picture

_WORKSPACE = 8 * 2**30  # bytes; the activations of a guided step and of decoding at 1024²


class Diffused:
    """`QwenImagePipeline` on a checkpoint in diffusers layout, on a GPU where there is one; the
    modules take turns there if it does not hold them together."""

    def __init__(self, checkpoint: Path, dtype: str = "float32") -> None:
        """
        Args:
            dtype: what it computes in, `float32` or `bfloat16`.
        """
        try:
            self._fingerprint = Checkpoint(checkpoint).describe()["fingerprint"]
        except CheckpointError as error:
            raise QualityError(str(error)) from None
        self._name = checkpoint.resolve().name
        self._dtype = dtype
        for library in (diffusers, transformers):
            library.utils.logging.disable_progress_bar()
        self.pipeline = QwenImagePipeline.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        self.pipeline.set_progress_bar_config(disable=True)
        _place(self.pipeline)

    def describe(self) -> dict[str, Any]:
        return {
            "source": "diffusers" if self._dtype == "float32" else f"diffusers in {self._dtype}",
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
        scale = self.pipeline.vae_scale_factor
        unpacked = self.pipeline._unpack_latents(tokens, height, width, scale)
        return unpacked[0, :, 0].float().cpu().numpy()

    @torch.no_grad()
    def predict_noise(self, prompt: Prompt, latents: np.ndarray, level: float) -> np.ndarray:
        pipeline, (channels, h, w) = self.pipeline, latents.shape
        device, dtype = pipeline._execution_device, pipeline.transformer.dtype
        text, mask = pipeline.encode_prompt(prompt.text, device=device, max_sequence_length=1024)
        tokens = torch.from_numpy(latents).to(device, dtype)
        tokens = pipeline._pack_latents(tokens, 1, channels, h, w)
        prediction = self.predict_tokens(tokens, text, mask, level, (h // 2, w // 2))
        scale = pipeline.vae_scale_factor
        unpacked = pipeline._unpack_latents(prediction, h * scale, w * scale, scale)
        return unpacked[0, :, 0].float().cpu().numpy()

    def predict_tokens(
        self, tokens: Tensor, text: Tensor, mask: Tensor | None, level: float, size: tuple[int, int]
    ) -> Tensor:
        """One call of the transformer, [1, L, 64] → [1, L, 64]; size: image tokens down, across."""
        prediction: Tensor = self.pipeline.transformer(
            tokens,
            timestep=torch.tensor([level], dtype=tokens.dtype, device=tokens.device),
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *size)]],
            return_dict=False,
        )[0]
        return prediction

    def _size(self, prompt: Prompt) -> tuple[int, int]:
        default = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return prompt.fields.get("height", default), prompt.fields.get("width", default)

    def _run(self, prompt: Prompt, output_type: str) -> Any:
        fields = dict(prompt.fields)
        seed = fields.pop("seed")
        # The service's defaults, which are not all the pipeline's.
        fields = {"negative_prompt": " ", "true_cfg_scale": 4.0, **fields}
        fields["height"], fields["width"] = self._size(prompt)
        channels = self.pipeline.transformer.config.in_channels // 4
        noise = self.pipeline.prepare_latents(
            1,
            channels,
            fields["height"],
            fields["width"],
            torch.float32,  # BF16 noise would be another
            "cpu",
            torch.Generator("cpu").manual_seed(seed),
        )
        return self.pipeline(
            **fields,
            max_sequence_length=1024,
            latents=noise.to(self.pipeline._execution_device, self.pipeline.transformer.dtype),
            output_type=output_type,
        ).images


def _place(pipeline: QwenImagePipeline) -> None:
    if not torch.cuda.is_available():
        return
    free, _ = torch.cuda.mem_get_info()
    modules = {name: x for name, x in pipeline.components.items() if isinstance(x, nn.Module)}
    sizes = [sum(p.nbytes for p in module.parameters()) for module in modules.values()]
    if sum(sizes) + _WORKSPACE < free:
        pipeline.to("cuda")
    elif max(sizes) + _WORKSPACE < free:
        pipeline.enable_model_cpu_offload()
    else:  # layer by layer
        pipeline.enable_sequential_cpu_offload()
