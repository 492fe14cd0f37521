"""Stage 2: text encoder and DiT learn the velocity from pictures to noise, together."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers import transformer_qwenimage
from torch import nn
from torch.nn import functional

from training.graph import Graphed
from training.layout import DROPPED_TOKENS, TEMPLATE_PREFIX, TEMPLATE_SUFFIX
from training.models import Models, in_bf16, text_parameters
from training.pool import Pool
from training.progress import Progress
from training.settings import Settings


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[B, 16, h, w] → [B, h·w/4, 64], as the pipeline packs 2×2 latent pixels into a token."""
    batch, channels, height, width = latents.shape
    latents = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return latents.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * 4)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[B, h·w/4, 64] → [B, 16, h, w]; `height` and `width` in latent pixels."""
    batch, _, channels = tokens.shape
    tokens = tokens.view(batch, height // 2, width // 2, channels // 4, 2, 2)
    return tokens.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)


def shift(image_tokens: int, config: Any) -> float:
    """mu of the scheduler's time shift."""
    slope = (config.max_shift - config.base_shift) / (
        config.max_image_seq_len - config.base_image_seq_len
    )
    return config.base_shift + slope * (image_tokens - config.base_image_seq_len)


class TextEncoder(nn.Module):
    """Prompts' tokens → what the DiT sees of them, as the pipeline computes it.

    `prefix` are the ids of the template's dropped tokens. Padding is on the right, and attention
    is causal, so that it needs no mask here.
    """

    def __init__(self, text_encoder: Any, prefix: list[int], device: torch.device) -> None:
        super().__init__()
        self.model = text_encoder.model.language_model
        self.prefix = torch.tensor(prefix, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [B, L] → [B, L, width], final-normed."""
        whole = torch.cat([self.prefix.expand(len(ids), -1), ids], dim=1)
        positions = torch.arange(whole.shape[1], device=ids.device).expand(3, len(ids), -1)
        # No mask, also while a CUDA graph is captured: then transformers would make one.
        masks: Any = {"full_attention": None, "sliding_attention": None}
        out = self.model(
            input_ids=whole, attention_mask=masks, position_ids=positions, use_cache=False
        )
        return out.last_hidden_state[:, len(self.prefix) :]


def prefix_ids(tokenizer: Any) -> list[int]:
    return tokenizer(TEMPLATE_PREFIX).input_ids


def prompt_ids(tokenizer: Any, prompts: list[str], device: torch.device) -> Any:
    """(ids int64 [B, L], mask bool [B, L]) of prompts, without the dropped tokens."""
    rows = [
        tokenizer(TEMPLATE_PREFIX + prompt + TEMPLATE_SUFFIX).input_ids[DROPPED_TOKENS:]
        for prompt in prompts
    ]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids.to(device), mask.to(device)


def rotate(
    x: torch.Tensor, freqs: torch.Tensor, use_real: bool = False, use_real_unbind_dim: int = -1
) -> torch.Tensor:
    """diffusers' `apply_rotary_emb_qwen` for freqs as real pairs, [S, D/2, 2]."""
    cos, sin = freqs[:, None].unbind(-1)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(x)


def use_real_rotation(transformer: Any) -> None:
    """Rotates in real numbers for as long as this process lives: complex ones do not compile."""
    positions = transformer.pos_embed.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return tuple(torch.view_as_real(freqs) for freqs in positions(*args, **kwargs))

    transformer.pos_embed.forward = forward
    transformer_qwenimage.apply_rotary_emb_qwen = rotate


def noise_levels(count: int, mu: float, device: torch.device) -> torch.Tensor:
    """FP32 [count] in (0, 1): logit-normal, a quarter of them uniform, shifted by the scheduler.

    The uniform ones see to the two ends: at the upper one the layout is decided.
    """
    logits = torch.randn(count, device=device)
    uniform = torch.rand(count, device=device).clamp(1e-4, 1 - 1e-4)
    logits = torch.where(torch.rand(count, device=device) < 0.25, uniform.logit(), logits)
    return (logits + mu).sigmoid()  # = exp(mu) / (exp(mu) + 1/t − 1) of t = sigmoid(logits)


class Average:
    """Exponential moving average of parameters, FP32."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters = parameters
        self.decay = decay
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.values, self.parameters, 1 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Puts the averages into the parameters, for good."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            parameter.copy_(value)


def trained(models: Models) -> list[nn.Parameter]:
    return [*text_parameters(models.text_encoder), *models.transformer.parameters()]


def make_optimizer(parameters: list[nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    matrices = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0},
    ]
    cuda = device.type == "cuda"
    rate = torch.tensor(0.0, device=device)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), fused=cuda, capturable=cuda)


def loss(
    models: Models,
    text: TextEncoder,
    latents: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
    config: Any,
) -> torch.Tensor:
    """Mean squared error of the velocity. Latents normalised, [B, 16, h, w]."""
    height, width = latents.shape[2] // 2, latents.shape[3] // 2
    target = pack(latents.float())
    noise = torch.randn_like(target)
    level = noise_levels(len(latents), shift(height * width, config), latents.device)
    noisy = torch.lerp(target, noise, level[:, None, None])
    velocity = models.transformer(
        hidden_states=noisy,
        timestep=level,
        encoder_hidden_states=text(ids),
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, height, width)]] * len(latents),
        return_dict=False,
    )[0]
    return functional.mse_loss(velocity.float(), noise - target)


def drop_prompts(
    ids: torch.Tensor, mask: torch.Tensor, blanks: list[tuple[float, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts other prompts, (share, ids), in the place of some."""
    chance = torch.rand(len(ids), device=ids.device)[:, None]
    low = 0.0
    for share, blank in blanks:
        row = torch.zeros_like(ids[0])
        row[: len(blank)] = blank
        valid = torch.arange(len(row), device=ids.device) < len(blank)
        chosen = (chance >= low) & (chance < low + share)
        ids, mask = torch.where(chosen, row, ids), torch.where(chosen, valid, mask)
        low += share
    return ids, mask


def train(
    models: Models,
    average: Average,
    tokenizer: Any,
    config: Any,
    pool: Pool,
    progress: Progress,
    settings: Settings,
) -> bool:
    """Trains until settings.dit_steps or the time is up; says whether the stage is complete."""
    device = pool.device
    text = TextEncoder(models.text_encoder, prefix_ids(tokenizer), device)
    blocks = [*text.model.layers, *models.transformer.transformer_blocks]
    for block in blocks:
        in_bf16(block, device, settings.compile)
    if settings.compile:
        use_real_rotation(models.transformer)
    blanks = [
        (
            share,
            torch.tensor(
                tokenizer(TEMPLATE_PREFIX + prompt + TEMPLATE_SUFFIX).input_ids[DROPPED_TOKENS:],
                device=device,
            ),
        )
        for share, prompt in ((settings.drop_to_space, " "), (settings.drop_to_empty, ""))
    ]
    models.text_encoder.train()
    models.transformer.train()
    parameters = average.parameters
    optimizer = make_optimizer(parameters, device)

    def update(latents: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = loss(models, text, latents, ids, mask, config)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return value.detach(), norm

    # It copies a number to the GPU for a length that nobody uses; a graph cannot have that.
    transformer_qwenimage.compute_text_seq_len_from_mask = lambda hidden, mask: (
        hidden.shape[1],
        None,
        mask,
    )
    run = Graphed(update)
    steps = settings.dit_steps
    for step in progress.remaining("dit", steps, optimizer, settings.dit_rate, settings.warmup):
        if step % settings.grow_every == 0:
            pool.grow()
        batch = pool.batch(settings.dit_batch, round_text_to=64)
        ids, mask = drop_prompts(batch.ids, batch.mask, blanks)
        value, norm = run(batch.items, ids, mask)
        average.update(step)
        progress.add("dit", step + 1, steps, loss=value, norm=norm)
    return progress.steps("dit") >= steps
