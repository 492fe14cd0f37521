"""The checkpoint's three models: their sizes, how they start, and how many parameters they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    AutoencoderKLQwenImage,
    QwenImageCausalConv3d,
)
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import nn
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from training.layout import text_encoder_config


@dataclass(frozen=True)
class Sizes:
    """Widths and depths, chosen for 16 MB in bf16: 8.0 M parameters in all.

    Two thirds of a block of the DiT are at work at a token (24 of 36·width²: the modulation sees
    only the timestep), half of those in each stream. Depth is worth more than width here: a
    picture has 64 tokens, and what is hard is to bind words to places. Of a kernel of the VAE a
    single frame meets one of three taps.
    """

    blocks: int = 6
    heads: int = 5
    head_size: int = 32
    rope_axes: tuple[int, int, int] = (8, 12, 12)
    text_width: int = 128
    text_layers: int = 4
    text_heads: int = 4
    text_kv_heads: int = 2
    vae_width: int = 12
    vae_blocks: int = 1

    @staticmethod
    def of(values: dict[str, Any]) -> Sizes:
        names = {field.name for field in fields(Sizes)}
        known = {name: values[name] for name in names & values.keys()}
        if "rope_axes" in known:
            known["rope_axes"] = tuple(known["rope_axes"])
        return Sizes(**known)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Models:
    text_encoder: Any
    transformer: Any
    vae: Any

    def items(self) -> list[tuple[str, Any]]:
        return list(vars(self).items())


def build(sizes: Sizes, tokenizer: Qwen2Tokenizer, seed: int) -> Models:
    """New models, FP32 on the CPU, initialised for training."""
    torch.manual_seed(seed)
    models = Models(
        Qwen2_5_VLForConditionalGeneration(
            text_encoder_config(
                tokenizer,
                sizes.text_width,
                sizes.text_layers,
                sizes.text_heads,
                sizes.text_kv_heads,
                tied=True,
                initializer_range=0.06,
            )
        ),
        QwenImageTransformer2DModel(
            num_layers=sizes.blocks,
            attention_head_dim=sizes.head_size,
            num_attention_heads=sizes.heads,
            joint_attention_dim=sizes.text_width,
            axes_dims_rope=sizes.rope_axes,
        ),
        AutoencoderKLQwenImage(base_dim=sizes.vae_width, num_res_blocks=sizes.vae_blocks),
    )
    start_transformer(models.transformer)
    start_vae(models.vae)
    return models


def start_transformer(transformer: nn.Module) -> None:
    """As DiT starts: every block does nothing at first, and the prediction is zero."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            if name.endswith(("_mod.1", "norm_out.linear", "proj_out")):
                nn.init.zeros_(module.weight)
            elif "timestep_embedder" in name:
                nn.init.normal_(module.weight, std=0.02)
            else:
                nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


def start_vae(vae: nn.Module) -> None:
    """No weight at the taps that see earlier frames: pictures do not train them."""
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, QwenImageCausalConv3d):
                module.weight[:, :, :-1] = 0


def use_image_convolutions(vae: nn.Module) -> None:
    """Makes the VAE compute single frames with 2-D convolutions: the same result, three times less.

    Only for frames without a cache (`vae.encoder(x)`, `vae.decoder(x)`).
    """

    def convolve(conv: QwenImageCausalConv3d) -> Callable[..., torch.Tensor]:
        padding = (conv._padding[2], conv._padding[0])
        stride = conv.stride[1:]

        def forward(x: torch.Tensor, cache_x: None = None) -> torch.Tensor:
            weight = conv.weight[:, :, -1]
            out = functional.conv2d(x.squeeze(2), weight, conv.bias, stride, padding)
            return out.unsqueeze(2)

        return forward

    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.forward = convolve(module)


def in_bf16(module: nn.Module, device: torch.device, compiled: bool = False) -> None:
    """Runs a module under bf16 autocast on a GPU; what is around it stays FP32.

    The whole DiT under autocast would round the timestep to bf16, which serving does not.
    """
    if device.type != "cuda":
        return
    # Modules of a class share what is compiled, as the weights are its inputs.
    forward = torch.compile(module.forward, dynamic=False) if compiled else module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return forward(*args, **kwargs)

    module.forward = run


def text_parameters(text_encoder: Any) -> list[nn.Parameter]:
    """What of the text encoder the pictures depend on: no vision tower, no output table."""
    return list(text_encoder.model.language_model.parameters())


def parameter_table(models: Models) -> str:
    """Parameters by part, in Markdown."""

    def count(*modules: nn.Module) -> int:
        parameters = {id(p): p.numel() for module in modules for p in module.parameters()}
        return sum(parameters.values())

    text, dit, vae = models.text_encoder.model, models.transformer, models.vae
    blocks = dit.transformer_blocks
    modulation = [m for block in blocks for m in (block.img_mod, block.txt_mod)]
    rows: Sequence[tuple[str, int]] = (
        ("text encoder: embedding (tied)", count(text.language_model.embed_tokens)),
        ("text encoder: layers", count(text.language_model.layers, text.language_model.norm)),
        ("text encoder: vision tower (unused)", count(text.visual)),
        ("DiT: attention", count(*[block.attn for block in blocks])),
        ("DiT: MLPs", count(*[m for block in blocks for m in (block.img_mlp, block.txt_mlp)])),
        ("DiT: modulation", count(*modulation)),
        ("DiT: input, time, output", count(dit) - count(blocks)),
        ("VAE: encoder", count(vae.encoder, vae.quant_conv)),
        ("VAE: decoder", count(vae.decoder, vae.post_quant_conv)),
    )
    total = sum(n for _, n in rows)
    lines = [f"| {name} | {n:,} | {2 * n / 1e6:.2f} |" for name, n in (*rows, ("all", total))]
    return "\n".join(["| part | parameters | MB in bf16 |", "|---|---:|---:|", *lines])
