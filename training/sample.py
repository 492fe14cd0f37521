"""Pictures for prompts in batches, as QwenImagePipeline computes them one by one.

    python -m training.sample STATE --out sheet.png [--count 48 --steps 20 --guidance 4]

For looking at a training's state on the machine that trains; the served model is measured with
`make quality`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quality.judge import judge
from quality.sheet import contact_sheet
from quality.world import LANGUAGES, PICTURE_SIZES, describe, random_scene
from training.flow import TextEncoder, pack, prefix_ids, prompt_ids, shift, unpack
from training.layout import scheduler
from training.models import Models
from training.vae import latent_statistics


@torch.no_grad()
def generate(
    models: Models,
    tokenizer: Any,
    prompts: list[str],
    size: tuple[int, int],
    seeds: list[int],
    steps: int = 20,
    guidance: float = 4.0,
    negative: str = " ",
) -> np.ndarray:
    """uint8 [B, H, W, 3] for prompts, `size` as (width, height); without guidance at 1 or less."""
    device = next(models.transformer.parameters()).device
    width, height = size[0] // 8, size[1] // 8
    tokens = (height // 2) * (width // 2)
    text = TextEncoder(models.text_encoder, prefix_ids(tokenizer), device)

    def conditioning(texts: list[str]) -> dict[str, Any]:
        ids, mask = prompt_ids(tokenizer, texts, device)
        hidden = text(ids) * mask[..., None]
        shapes = [[(1, height // 2, width // 2)]] * len(texts)
        return {
            "encoder_hidden_states": hidden,
            "encoder_hidden_states_mask": None if mask.all() else mask,
            "img_shapes": shapes,
            "return_dict": False,
        }

    positive = conditioning(prompts)
    blank = conditioning([negative] * len(prompts)) if guidance > 1 else None
    noise = [
        torch.randn(1, 1, 16, height, width, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    latents = pack(torch.cat(noise)[:, 0]).to(device)
    schedule = scheduler()
    schedule.set_timesteps(
        sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift(tokens, schedule.config)
    )
    sigmas = schedule.sigmas.tolist()
    for i, timestep in enumerate(schedule.timesteps.to(device)):
        level = (timestep / 1000).expand(len(prompts))
        velocity = models.transformer(latents, timestep=level, **positive)[0]
        if blank is not None:
            other = models.transformer(latents, timestep=level, **blank)[0]
            combined = other + guidance * (velocity - other)
            length = velocity.norm(dim=-1, keepdim=True)
            velocity = combined * (length / combined.norm(dim=-1, keepdim=True))
        latents = latents + (sigmas[i + 1] - sigmas[i]) * velocity
    mean, std = latent_statistics(models.vae, device)
    z = unpack(latents, height, width)[:, :, None] * std + mean
    pictures = models.vae.decoder(models.vae.post_quant_conv(z))[:, :, 0].clamp(-1, 1)
    pictures = ((pictures / 2 + 0.5) * 255).round().to(torch.uint8)
    return pictures.permute(0, 2, 3, 1).cpu().numpy()


def sample(
    models: Models,
    tokenizer: Any,
    count: int,
    seed: int = 1,
    steps: int = 20,
    guidance: float = 4.0,
    batch: int = 128,
) -> tuple[list[str], list[np.ndarray], list[str]]:
    """(prompts, pictures, report lines): languages in turn, sizes in turn."""
    rng = np.random.default_rng([seed, 2])
    sizes = [PICTURE_SIZES[i // 2 % len(PICTURE_SIZES)] for i in range(count)]
    prompts = [
        describe(random_scene(rng, size), LANGUAGES[i % 2], rng) for i, size in enumerate(sizes)
    ]
    pictures: dict[int, np.ndarray] = {}
    for size in dict.fromkeys(sizes):
        of_size = [i for i in range(count) if sizes[i] == size]
        for start in range(0, len(of_size), batch):
            group = of_size[start : start + batch]
            made = generate(
                models, tokenizer, [prompts[i] for i in group], size, group, steps, guidance
            )
            pictures.update(zip(group, made, strict=True))
    ordered = [pictures[i] for i in range(count)]
    return prompts, ordered, score(prompts, ordered)


def score(prompts: list[str], pictures: list[np.ndarray]) -> list[str]:
    """Mean scores of `quality.judge`, by language, size of the picture and aspect."""
    values: dict[str, list[float]] = defaultdict(list)
    for i, (prompt, picture) in enumerate(zip(prompts, pictures, strict=True)):
        verdict = judge(prompt, picture)
        height, width = picture.shape[:2]
        for key in ("all", LANGUAGES[i % 2], f"{width}x{height}"):
            values[key].append(float(verdict.score))
        for part, value in verdict.parts.items():
            if value is not None:
                values[part].append(float(value))
    return [f"{key}: {np.mean(items):.3f} ({len(items)})" for key, items in values.items()]


def main(arguments: list[str] | None = None) -> None:
    from training.store import load_trained

    parser = argparse.ArgumentParser(prog="python -m training.sample", description=__doc__)
    parser.add_argument("state", type=Path)
    parser.add_argument("--out", type=Path, default=Path("sheet.png"))
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    models, tokenizer, _ = load_trained(options.state)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for _, model in models.items():
        model.to(device).eval()
    prompts, pictures, lines = sample(
        models, tokenizer, options.count, options.seed, options.steps, options.guidance
    )
    contact_sheet(pictures[:96]).save(options.out)
    print("\n".join([*prompts[:12], *lines]))


if __name__ == "__main__":
    main()
