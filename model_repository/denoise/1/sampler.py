"""From noise to latents: the maths of one denoising step. Pure torch."""

from __future__ import annotations

import torch


def guide(
    noise_pred: torch.Tensor, negative_noise_pred: torch.Tensor, true_cfg_scale: float
) -> torch.Tensor:
    """Classifier-free guidance with the norm of the conditional prediction kept per token.

    Args:
        noise_pred, negative_noise_pred: [n, L, 64].

    Returns:
        [n, L, 64] (diffusers, `QwenImagePipeline`).
    """
    combined = negative_noise_pred + true_cfg_scale * (noise_pred - negative_noise_pred)
    norm = torch.norm(noise_pred, dim=-1, keepdim=True)
    return combined * (norm / torch.norm(combined, dim=-1, keepdim=True))


def euler_step(
    latents: torch.Tensor, noise_pred: torch.Tensor, sigma: torch.Tensor, next_sigma: torch.Tensor
) -> torch.Tensor:
    """One step of the flow from `sigma` to `next_sigma`; latents, noise_pred: FP32 [n, L, 64]."""
    return latents + (next_sigma - sigma) * noise_pred
