"""Latents → pixels. The video decoder for a single frame: of a causal convolution only the last tap
sees it, so that all of them are convolutions of pictures. Channels-last throughout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hopper.ops import norm_silu


class VaeDecoder:
    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """config: the VAE's, as in the checkpoint."""
        self.weights = {
            name: tensor.contiguous(memory_format=torch.channels_last)
            if tensor.ndim == 4
            else tensor.flatten()
            for name, tensor in weights.items()
        }
        self.levels = len(config["dim_mult"])
        self.resnets = config["num_res_blocks"] + 1

    def __call__(self, latents: Tensor) -> Tensor:
        """FP32 [B, z, h, w] → UINT8 [B, 8h, 8w, 3]."""
        x = latents.bfloat16().contiguous(memory_format=torch.channels_last)
        x = self.convolve(self.convolve(x, "post_quant_conv"), "decoder.conv_in")
        x = self.residual(x, "decoder.mid_block.resnets.0")
        x = self.attention(x, "decoder.mid_block.attentions.0")
        x = self.residual(x, "decoder.mid_block.resnets.1")
        for level in range(self.levels):
            block = f"decoder.up_blocks.{level}"
            for i in range(self.resnets):
                x = self.residual(x, f"{block}.resnets.{i}")
            if level < self.levels - 1:
                x = functional.interpolate(x, scale_factor=2, mode="nearest")
                x = self.convolve(x, f"{block}.upsamplers.0.resample.1")
        x = norm_silu(x, self.weights["decoder.norm_out.gamma"])
        image = self.convolve(x, "decoder.conv_out").float()
        pixels = (image * 0.5 + 0.5).clamp(0, 1) * 255
        return pixels.permute(0, 2, 3, 1).round().to(torch.uint8)

    def warm_up(self, device: torch.device) -> None:
        """Loads the libraries."""
        channels = self.weights["post_quant_conv.weight"].shape[1]
        self(torch.zeros(1, channels, 16, 16, device=device))

    def convolve(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return functional.conv2d(
            x, weight, self.weights[f"{name}.bias"], padding=weight.shape[-1] // 2
        )

    def residual(self, x: Tensor, name: str) -> Tensor:
        shortcut = f"{name}.conv_shortcut"
        start = self.convolve(x, shortcut) if f"{shortcut}.weight" in self.weights else x
        for i in (1, 2):
            x = norm_silu(x, self.weights[f"{name}.norm{i}.gamma"])
            x = self.convolve(x, f"{name}.conv{i}")
        return x + start

    def attention(self, x: Tensor, name: str) -> Tensor:
        """One head; every pixel attends to every pixel."""
        normed = norm_silu(x, self.weights[f"{name}.norm.gamma"], silu=False)
        qkv = self.convolve(normed, f"{name}.to_qkv").flatten(2).transpose(1, 2)  # [B, h·w, 3C]
        q, k, v = (part[:, None] for part in qkv.chunk(3, dim=2))
        mixed = functional.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.convolve(mixed.transpose(1, 2).unflatten(2, x.shape[2:]), f"{name}.proj")
