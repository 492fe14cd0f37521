"""The torch modules that are traced: an engine's prologue, one block, its epilogue.

They are made of the stock modules; only what ONNX cannot hold or what the split changes is
replaced. Parameter names are the checkpoint's own, with `block.` for the prefix of any one block.
Dimensions in the comments: B batch, T text tokens, L image tokens, S = T + L, H heads, D head size,
d = H·D, N blocks.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageAttentionBlock,
    QwenImageCausalConv3d,
    QwenImageResample,
    QwenImageRMS_norm,
)
from torch import Tensor, nn

# float16's lowest value: after softmax exactly 0 in every precision, and never inf − inf.
MASKED = -65504.0
ROPE_THETA = 10000  # QwenImageTransformer2DModel has it as a literal


# ---------------------------------------------------------------------- dit


class DitPrologue(nn.Module):
    """Embeds both streams; what all blocks share: key mask and rotary angles."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.img_in, self.txt_norm, self.txt_in = model.img_in, model.txt_norm, model.txt_in
        for axis, dim in enumerate(model.config.axes_dims_rope):
            exponent = torch.arange(0, dim, 2).to(torch.float32).div(dim)
            self.register_buffer(f"frequencies_{axis}", 1.0 / torch.pow(ROPE_THETA, exponent))

    def forward(
        self,
        hidden_states: Tensor,  # [B, L, in_channels]
        encoder_hidden_states: Tensor,  # [B, T, text width]
        text_mask: Tensor,  # BOOL [B, T]
        position_ids: Tensor,  # INT32 [B, S, 3]
    ) -> tuple[Tensor, ...]:
        image = self.img_in(hidden_states)
        text = self.txt_in(self.txt_norm(encoder_hidden_states))
        image_mask = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
        keys = torch.cat([text_mask, image_mask], dim=1)
        key_bias = torch.where(keys, 0.0, MASKED)[:, None, None]  # [B, 1, 1, S]
        positions = position_ids.to(torch.float32)
        angles = torch.cat(
            [positions[..., i : i + 1] * getattr(self, f"frequencies_{i}") for i in range(3)], dim=-1
        )[:, :, None]  # [B, S, 1, D/2]
        return image, text, key_bias, angles.cos(), angles.sin()


class PickModulation(nn.Module):
    """Stands for `img_mod` or `txt_mod`: takes its output from the engine's input."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row

    def forward(self, modulation: Tensor) -> Tensor:  # [B, 2, 6d] → [B, 6d]
        return modulation[:, self.row]


class JointAttention:
    """QwenDoubleStreamAttnProcessor2_0 in real arithmetic, with the mask as an additive bias."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor,  # here the key bias [B, 1, 1, S]
        image_rotary_emb: tuple[Tensor, Tensor],
        attention_mask: None = None,
    ) -> tuple[Tensor, Tensor]:
        cos, sin = image_rotary_emb
        head_size = attn.inner_dim // attn.heads

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (attn.heads, head_size))

        def rotate(x: Tensor) -> Tensor:  # adjacent pairs are the complex numbers
            real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
            pairs = [real * cos - imaginary * sin, real * sin + imaginary * cos]
            return torch.stack(pairs, dim=-1).flatten(-2)

        image, text = hidden_states, encoder_hidden_states
        query = torch.cat(
            [attn.norm_added_q(heads(attn.add_q_proj(text))), attn.norm_q(heads(attn.to_q(image)))], 1
        )
        key = torch.cat(
            [attn.norm_added_k(heads(attn.add_k_proj(text))), attn.norm_k(heads(attn.to_k(image)))], 1
        )
        value = torch.cat([heads(attn.add_v_proj(text)), heads(attn.to_v(image))], dim=1)
        query = rotate(query) * head_size**-0.5
        scores = query.transpose(1, 2) @ rotate(key).permute(0, 2, 3, 1) + encoder_hidden_states_mask
        joint = (scores.softmax(dim=-1) @ value.transpose(1, 2)).transpose(1, 2).flatten(2)
        text_out, image_out = joint.split([text.shape[1], image.shape[1]], dim=1)
        return attn.to_out[0](image_out), attn.to_add_out(text_out)


class DitBlock(nn.Module):
    """One QwenImageTransformerBlock; its modulation is row `index` of the engine's input."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = copy.copy(block)  # shallow, with its own table of submodules
        self.block._modules = dict(block._modules)
        self.block.img_mod, self.block.txt_mod = PickModulation(0), PickModulation(1)
        self.block.attn = copy.copy(block.attn)
        self.block.attn.processor = JointAttention()

    def forward(
        self,
        image: Tensor,  # [B, L, d]
        text: Tensor,  # [B, T, d]
        key_bias: Tensor,
        cos: Tensor,
        sin: Tensor,
        block_modulation: Tensor,  # [B, N, 2, 6d]
        index: Tensor,  # INT64 [1]
    ) -> tuple[Tensor, Tensor]:
        modulation = block_modulation.index_select(1, index).squeeze(1)
        text, image = self.block(image, text, key_bias, modulation, (cos, sin))
        return image, text


class DitEpilogue(nn.Module):
    """`norm_out`, without the linear that makes its modulation, and `proj_out`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm_out = copy.copy(model.norm_out)
        self.norm_out._modules = dict(model.norm_out._modules)
        self.norm_out.silu, self.norm_out.linear = nn.Identity(), nn.Identity()
        self.proj_out = model.proj_out

    def forward(self, image: Tensor, final_modulation: Tensor) -> Tensor:
        return self.proj_out(self.norm_out(image, final_modulation))


# ---------------------------------------------------------------------- modulation


class ModulationPrologue(nn.Module):
    """sigma → the embedding that every modulation is made from."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.time_text_embed = nn.Module()
        self.time_text_embed.timestep_embedder = model.time_text_embed.timestep_embedder
        projection = model.time_text_embed.time_proj
        half = projection.num_channels // 2
        # As in diffusers' get_timestep_embedding; here a constant, since exp differs in its last
        # bit between libraries and the angle multiplies that by up to 1000.
        exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32) / half
        self.register_buffer("frequencies", torch.exp(exponent))
        self.scale = projection.scale

    def forward(self, timestep: Tensor) -> Tensor:  # [B, 1] → [B, d]
        angles = self.scale * (timestep * self.frequencies)
        projected = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.time_text_embed.timestep_embedder(projected)


class ModulationBlock(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.img_mod, self.block.txt_mod = block.img_mod, block.txt_mod

    def forward(self, embedding: Tensor) -> Tensor:  # [B, d] → [B, 1, 2, 6d]
        return torch.stack([self.block.img_mod(embedding), self.block.txt_mod(embedding)], 1)[:, None]


class ModulationEpilogue(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm_out = nn.Module()
        self.norm_out.silu, self.norm_out.linear = model.norm_out.silu, model.norm_out.linear

    def forward(self, embedding: Tensor) -> Tensor:  # [B, d] → [B, 2d]
        return self.norm_out.linear(self.norm_out.silu(embedding))


# ---------------------------------------------------------------------- text encoder


class TextPrologue(nn.Module):
    """Token embeddings; what all layers share. A prompt has no images, so that the three axes of
    the multimodal positions are equal and the rotary embedding is the ordinary one."""

    def __init__(self, model: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.embed_tokens = model.embed_tokens
        self.register_buffer("frequencies", frequencies)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:  # INT64 [B, S]
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        causal = position[:, None] >= position[None, :]
        key_bias = torch.where(causal, 0.0, MASKED)[None, None]  # [1, 1, S, S]
        angles = position.to(torch.float32)[None, :, None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)  # [1, S, D]
        return self.embed_tokens(input_ids), key_bias, angles.cos(), angles.sin()


class TextBlock(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.block = layer

    def forward(self, hidden: Tensor, key_bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.block(hidden, attention_mask=key_bias, position_embeddings=(cos, sin))


class TextEpilogue(nn.Module):
    def __init__(self, model: Any, dropped_tokens: int) -> None:
        super().__init__()
        self.norm = model.norm
        self.dropped_tokens = dropped_tokens

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden[:, self.dropped_tokens :])


# ---------------------------------------------------------------------- vae decoder


class PixelNorm(nn.Module):
    """QwenImageRMS_norm over the channels of [B, C, h, w]."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.scale = norm.scale
        self.gamma = nn.Parameter(torch.empty(len(norm.gamma), 1, 1, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-12)
        return x * (self.scale / length) * self.gamma


class PixelAttention(nn.Module):
    """QwenImageAttentionBlock on [B, C, h, w]: one head, every pixel attends to every pixel."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.to_qkv, self.proj = PixelNorm(block.norm), block.to_qkv, block.proj
        self.scale = block.dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.to_qkv(self.norm(x)).flatten(2).chunk(3, dim=1)  # [B, C, h·w]
        weights = ((query * self.scale).transpose(1, 2) @ key).softmax(dim=-1)
        mixed = (weights @ value.transpose(1, 2)).transpose(1, 2)
        return x + self.proj(mixed.unflatten(2, x.shape[2:]))


class PixelResample(nn.Module):
    """QwenImageResample on [B, C, h, w]; its time convolution never runs for a single frame."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.resample = module.resample

    def forward(self, x: Tensor) -> Tensor:
        return self.resample(x)


class VaeDecoder(nn.Module):
    """The decoder for a single frame: only the last tap of a causal convolution sees it."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.post_quant_conv = single_frame(vae.post_quant_conv)
        self.decoder = single_frame(vae.decoder)

    def forward(self, latents: Tensor) -> Tensor:  # [B, z, h, w] → UINT8 [B, 8h, 8w, 3]
        image = self.decoder(self.post_quant_conv(latents))
        pixels = (image * 0.5 + 0.5).clamp(0, 1) * 255
        return pixels.round().to(torch.uint8).permute(0, 2, 3, 1)


def single_frame(module: Any) -> Any:
    """A copy of a stock VAE module that takes [B, C, h, w] instead of [B, C, 1, h, w]."""
    if isinstance(module, QwenImageCausalConv3d):
        left, _, top, _, _, _ = module._padding
        return nn.Conv2d(
            module.in_channels,
            module.out_channels,
            module.kernel_size[1:],
            padding=(top, left),
            device="meta",
        )
    if isinstance(module, QwenImageRMS_norm):
        return PixelNorm(module)
    if isinstance(module, QwenImageAttentionBlock):
        return PixelAttention(module)
    if isinstance(module, QwenImageResample):
        return PixelResample(module)
    result = copy.copy(module)
    result._modules = {
        name: child if child is None else single_frame(child) for name, child in module._modules.items()
    }
    return result
