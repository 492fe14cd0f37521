"""Where pictures come from: what a run asks of a served model, or of diffusers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from quality.gate import Prompt


class Picture(NamedTuple):
    """`number` is the prompt's place in what was asked for; `pixels` is uint8 [H, W, 3]."""

    number: int
    pixels: np.ndarray


class Source(Protocol):
    """Draws pictures and predicts noise. Every call may raise QualityError."""

    def describe(self) -> dict[str, Any]:
        """What quality.json says of it: `source`, `checkpoint`, `versions`."""

    def draw(self, prompts: Sequence[Prompt]) -> Iterator[Picture]:
        """A picture for each prompt, in any order."""

    def latents(self, prompt: Prompt) -> np.ndarray:
        """The latents of the prompt's picture, FP32 [16, h, w], up to a scale and a shift for
        each channel."""

    def predict_noise(self, prompt: Prompt, latents: np.ndarray, level: float) -> np.ndarray:
        """The transformer's prediction for the prompt itself, without guidance, FP32 [16, h, w].

        latents: FP32 [16, h, w], normalised as the transformer takes them. level: the share of
        noise in them, which is also their timestep (sigma).
        """
