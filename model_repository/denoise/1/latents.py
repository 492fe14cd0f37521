"""Latents and their positions: noise, packing into tokens, RoPE position ids.

The transformer sees 2×2 patches of the latent image as tokens of 64 numbers; h and w are the
latent height and width (pixels / 8), so that a picture has h/2 · w/2 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def initial_noise(seeds: Sequence[int], channels: int, h: int, w: int) -> torch.Tensor:
    """Returns packed noise, FP32 [n, h/2 · w/2, channels · 4].

    Each image has a CPU generator of its own, as diffusers draws for a list of generators.
    """
    return pack(
        torch.cat(
            [
                torch.randn(
                    (1, channels, h, w),
                    generator=torch.Generator("cpu").manual_seed(seed),
                    dtype=torch.float32,
                )
                for seed in seeds
            ]
        )
    )


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[n, c, h, w] → [n, h/2 · w/2, c · 4]."""
    n, c, h, w = latents.shape
    patches = latents.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(n, (h // 2) * (w // 2), c * 4)


def unpack(tokens: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """[n, h/2 · w/2, c · 4] → [n, c, h, w]."""
    n, _, width = tokens.shape
    patches = tokens.view(n, h // 2, w // 2, width // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(n, width // 4, h, w)


def position_ids(text_tokens: int, rows: int, columns: int) -> torch.Tensor:
    """Returns (frame, height, width) of every token, INT32 [text_tokens + rows · columns, 3].

    The text comes first, on the diagonal behind the image's largest coordinate; the image's
    coordinates are centred (diffusers, `QwenEmbedRope` with `scale_rope`).
    """
    start = max(rows // 2, columns // 2)
    text = torch.arange(start, start + text_tokens, dtype=torch.int32)[:, None].expand(-1, 3)
    y = torch.arange(rows, dtype=torch.int32) - (rows - rows // 2)
    x = torch.arange(columns, dtype=torch.int32) - (columns - columns // 2)
    image = torch.stack(
        [
            torch.zeros(rows, columns, dtype=torch.int32),
            y[:, None].expand(rows, columns),
            x[None, :].expand(rows, columns),
        ],
        dim=-1,
    )
    return torch.cat([text, image.reshape(-1, 3)])
