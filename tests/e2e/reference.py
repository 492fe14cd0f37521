"""Pictures that diffusers itself makes from a checkpoint."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline


@lru_cache(maxsize=2)
def _pipeline(checkpoint: Path) -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def reference_images(checkpoint: Path, **fields: Any) -> list[np.ndarray]:
    """Returns UINT8 [H, W, 3] a picture, for the fields of a request to `qwen_image`."""
    pipeline = _pipeline(checkpoint)
    fields = {"negative_prompt": " ", "true_cfg_scale": 4.0, **fields}
    seed, count = fields.pop("seed"), fields.get("num_images_per_prompt", 1)
    if fields["num_inference_steps"] == 1:
        # The published `shift_terminal` divides by zero for one sigma: the picture is NaN.
        # Without it the scheduler gives the sigmas 1, 0.
        config = dict(pipeline.scheduler.config) | {"shift_terminal": None}
        pipeline = QwenImagePipeline(
            **pipeline.components | {"scheduler": FlowMatchEulerDiscreteScheduler(**config)}
        )
        pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(
        **fields,
        max_sequence_length=1024,
        generator=[torch.Generator("cpu").manual_seed(seed + i) for i in range(count)],
        output_type="np",
    ).images
    return [(picture * 255).round().astype(np.uint8) for picture in pictures]


def largest_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> int:
    """Returns the largest difference of any channel of any pixel, of 255."""
    assert len(ours) == len(theirs)
    assert [image.shape for image in ours] == [image.shape for image in theirs]
    return max(
        int(np.abs(one.astype(int) - other.astype(int)).max())
        for one, other in zip(ours, theirs, strict=True)
    )
