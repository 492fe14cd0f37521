"""Timesteps → the modulations of all blocks. B batch, d width, N blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hopper.linear import linear

CHANNELS = 256  # of the sinusoids; diffusers' QwenTimestepProjEmbeddings has it as a literal


class Modulation:
    """Computes where its input is; weights elsewhere are copied there when they are needed."""

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """config: the transformer's, as in the checkpoint."""
        embedder = "time_text_embed.timestep_embedder"
        self.embedder = [linear(weights, f"{embedder}.linear_{i}") for i in (1, 2)]
        self.blocks = [
            linear(weights, f"transformer_blocks.{i}.modulation")
            for i in range(config["num_layers"])
        ]
        self.final = linear(weights, "norm_out.linear")
        # On the CPU: exp differs in its last bit between devices, and angles multiply it by 1000.
        half = CHANNELS // 2
        exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32) / half
        self.frequencies = exponents.exp()

    def __call__(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """FP32 [B, 1] (sigma) → BF16 [B, N, 2, 6d], BF16 [B, 2d]."""
        device = timestep.device
        angles = 1000 * (timestep * self.frequencies.to(device))
        projected = torch.cat([angles.cos(), angles.sin()], 1).to(self.final.weight.dtype)
        first, second = (layer.to(device) for layer in self.embedder)
        embedding = functional.silu(second(functional.silu(first(projected))))
        blocks = torch.stack([block.to(device)(embedding) for block in self.blocks], 1)
        return blocks.unflatten(2, (2, -1)), self.final.to(device)(embedding)

    def warm_up(self, device: torch.device) -> None:
        """Loads the libraries."""
        self(torch.zeros(1, 1, device=device))
