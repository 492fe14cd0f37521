"""Stage 1: the VAE learns to reconstruct pictures of the world."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from training.graph import Graphed
from training.pool import Pool
from training.progress import Progress
from training.settings import Settings

# Of the latents' spread. The decoder learns to live with latents that are a little off, as those
# of the DiT are, and neighbouring latents come to mean similar pictures, which are easier to learn.
LATENT_NOISE = 0.2


def to_signed(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 [B, H, W, 3] → FP32 [B, 3, 1, H, W] in [−1, 1]."""
    return (pictures.permute(0, 3, 1, 2).float() / 127.5 - 1)[:, :, None]


def encode(vae: Any, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, log variance) of the posterior of pictures as `to_signed` gives them."""
    mean, log_variance = vae.quant_conv(vae.encoder(pictures)).float().chunk(2, dim=1)
    return mean, log_variance.clamp(-30.0, 20.0)


def edges(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pictures.diff(dim=-1), pictures.diff(dim=-2)


def loss(vae: Any, pictures: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, L1 distance of the reconstruction in [−1, 1])."""
    mean, log_variance = encode(vae, pictures)
    spread = mean.detach().std(dim=(0, 2, 3, 4), keepdim=True)
    amount = LATENT_NOISE * torch.rand(len(mean), 1, 1, 1, 1, device=mean.device)
    sigma = ((0.5 * log_variance).exp() ** 2 + (amount * spread) ** 2).sqrt()
    latents = mean + sigma * torch.randn_like(mean)
    output = vae.decoder(vae.post_quant_conv(latents)).float()
    distance = functional.l1_loss(output, pictures)
    edge = sum(
        functional.l1_loss(a, b) for a, b in zip(edges(output), edges(pictures), strict=True)
    )
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return distance + settings.edge_weight * edge + settings.kl_weight * kl, distance


def train(vae: Any, pool: Pool, progress: Progress, settings: Settings) -> bool:
    """Trains until settings.vae_steps or the time is up; says whether the stage is complete."""
    device = pool.device
    vae.train().to(device, memory_format=torch.preserve_format)
    forward = loss
    optimizer = torch.optim.AdamW(
        vae.parameters(),
        betas=(0.9, 0.99),
        weight_decay=0.0,
        fused=device.type == "cuda",
        lr=torch.tensor(0.0, device=device),
        capturable=device.type == "cuda",
    )

    def update(images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(
            device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
        ):
            value, distance = forward(vae, to_signed(images), settings)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        return value.detach(), distance.detach(), norm

    run = Graphed(update)
    steps = settings.vae_steps
    for step in progress.remaining(
        "vae", steps, optimizer, settings.vae_rate, settings.warmup // 2
    ):
        if step % settings.grow_every == 0:
            pool.grow()
        value, distance, norm = run(pool.batch(settings.vae_batch).items)
        progress.add("vae", step + 1, steps, loss=value, l1=distance, norm=norm)
    return progress.steps("vae") >= steps


@torch.no_grad()
def measure_latents(vae: Any, pool: Pool, batches: int = 64) -> None:
    """Writes the mean and standard deviation of each latent channel into the VAE's config."""
    total = torch.zeros(3, vae.config.z_dim, dtype=torch.float64, device=pool.device)
    for _ in range(min(batches, 1 + pool.count // 128)):
        mean, _ = encode(vae, to_signed(pool.batch(128).items))
        values = mean.double().transpose(0, 1).flatten(1)
        total += torch.stack(
            [
                values.sum(1),
                values.square().sum(1),
                values.new_tensor(values.shape[1]).expand(len(values)),
            ]
        )
    mean, square = total[0] / total[2], total[1] / total[2]
    std = (square - mean.square()).sqrt()
    vae.register_to_config(
        latents_mean=[round(x, 6) for x in mean.tolist()],
        latents_std=[round(x, 6) for x in std.tolist()],
    )


def latent_statistics(vae: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, std) as FP32 [1, 16, 1, 1, 1]."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean, std = (
        torch.tensor(x, dtype=torch.float32, device=device).view(shape)
        for x in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


@torch.no_grad()
def latents_of(vae: Any, pictures: torch.Tensor) -> torch.Tensor:
    """uint8 [B, H, W, 3] → normalised latents, bf16 [B, 16, H/8, W/8]."""
    mean, std = latent_statistics(vae, pictures.device)
    return ((encode(vae, to_signed(pictures))[0] - mean) / std)[:, :, 0].bfloat16()
