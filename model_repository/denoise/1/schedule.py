"""The noise schedule: diffusers' own scheduler, configured by the checkpoint, gives the sigmas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)


@dataclass(frozen=True)
class Schedule:
    """timesteps: FP32 [N], each sigma as the model is told it. sigmas: FP32 [N + 1], last one 0."""

    timesteps: torch.Tensor
    sigmas: torch.Tensor


class Scheduler:
    """Makes schedules from a checkpoint's `scheduler_config.json`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(config))
        self.schedule = lru_cache(maxsize=256)(self._schedule)

    def _schedule(self, num_inference_steps: int, image_tokens: int) -> Schedule:
        """Returns the schedule that `QwenImagePipeline` takes for this many steps and tokens."""
        config = self._scheduler.config
        if num_inference_steps == 1 and config.get("shift_terminal"):
            # The stretch to `shift_terminal` divides by zero for a single sigma in diffusers
            # 0.42; one Euler step from noise to picture is what remains.
            return Schedule(torch.ones(1), torch.tensor([1.0, 0.0]))
        self._scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / num_inference_steps, num_inference_steps),
            mu=shift(
                image_tokens,
                config.get("base_image_seq_len", 256),
                config.get("max_image_seq_len", 4096),
                config.get("base_shift", 0.5),
                config.get("max_shift", 1.15),
            ),
        )
        # Times 1000 and back, as the pipeline does: the rounding is part of the result.
        return Schedule(self._scheduler.timesteps / 1000, self._scheduler.sigmas)


def shift(
    image_tokens: int, base_tokens: int, max_tokens: int, base_shift: float, max_shift: float
) -> float:
    """Returns mu, linear in the image's tokens (diffusers, `calculate_shift` of Qwen-Image)."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return image_tokens * slope + (base_shift - slope * base_tokens)
