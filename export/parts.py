"""The torch modules that are traced: an engine's prologue, one block, its epilogue.

They are made of the stock modules; only what ONNX cannot hold or what the split changes is
replaced. Parameter names are the checkpoint's own, with `block.` for the prefix of any one block.
Dimensions in the comments: B batch, T text tokens, L image tokens, S = T + L, H heads, D head size,
d = H·D, N blocks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageAttentionBlock,
    QwenImageCausalConv3d,
    QwenImageResample,
    QwenImageRMS_norm,
)
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.nn import functional
from torch.onnx.ops import attention, rotary_embedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm

# float16's lowest value: after softmax exactly 0 in every precision, and never inf − inf.
MASKED = -65504.0
ROPE_THETA = 10000  # QwenImageTransformer2DModel has it as a literal


class RmsNorm(nn.Module):
    """diffusers' and transformers' RMS norms (FP32 inside), as one ONNX operator."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (len(self.weight),), self.weight, self.eps)


def rebuilt(module: Any, replace: dict[type, Callable[[Any], nn.Module]]) -> Any:
    """A copy of a module that shares its parameters, with some types of submodules replaced."""
    if type(module) in replace:
        return replace[type(module)](module)
    result = copy.copy(module)
    result._modules = {
        name: None if child is None else rebuilt(child, replace)
        for name, child in module._modules.items()
    }
    return result


# ---------------------------------------------------------------------- dit


class DitPrologue(nn.Module):
    """Embeds both streams; what all blocks share: key mask and rotary angles."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.img_in, self.txt_norm, self.txt_in = (
            model.img_in,
            RmsNorm(model.txt_norm),
            model.txt_in,
        )
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
        # Attention may broadcast its mask over the queries, but ONNX Runtime's does not.
        bias = torch.where(keys, 0.0, MASKED)[:, None, None].expand(-1, -1, keys.shape[1], -1)
        positions = position_ids.to(torch.float32)
        angles = torch.cat(
            [positions[..., i : i + 1] * getattr(self, f"frequencies_{i}") for i in range(3)],
            dim=-1,
        )  # [B, S, D/2]
        return image, text, bias, angles.cos(), angles.sin()


class PickModulation(nn.Module):
    """Stands for `img_mod` or `txt_mod`: takes its output from the engine's input."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row

    def forward(self, modulation: Tensor) -> Tensor:  # [B, 2, 6d] → [B, 6d]
        return modulation[:, self.row]


class JointAttention:
    """QwenDoubleStreamAttnProcessor2_0 in real arithmetic, with ONNX's own operators.

    On a CPU they take half the time of their parts written out. TensorRT fuses Attention in 16 bits
    only: an FP32 graph has to be cast before it is built there.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,  # the image, [B, L, d]
        encoder_hidden_states: Tensor,  # the text, [B, T, d]
        encoder_hidden_states_mask: Tensor,  # here the attention bias [B, 1, S, S]
        image_rotary_emb: tuple[Tensor, Tensor],  # cos and sin [B, S, D/2]
        attention_mask: None = None,
    ) -> tuple[Tensor, Tensor]:
        image, text, heads = hidden_states, encoder_hidden_states, attn.heads

        def normed(norm: Any, x: Tensor) -> Tensor:  # each head apart
            return norm(x.unflatten(-1, (heads, -1))).flatten(-2)

        def rotate(x: Tensor) -> Tensor:  # adjacent pairs are the complex numbers
            return rotary_embedding(x, *image_rotary_emb, interleaved=True, num_heads=heads)

        query = rotate(
            torch.cat(
                [
                    normed(attn.norm_added_q, attn.add_q_proj(text)),
                    normed(attn.norm_q, attn.to_q(image)),
                ],
                dim=1,
            )
        )
        key = rotate(
            torch.cat(
                [
                    normed(attn.norm_added_k, attn.add_k_proj(text)),
                    normed(attn.norm_k, attn.to_k(image)),
                ],
                dim=1,
            )
        )
        value = torch.cat([attn.add_v_proj(text), attn.to_v(image)], dim=1)
        bias = encoder_hidden_states_mask
        joint = attention(query, key, value, bias, q_num_heads=heads, kv_num_heads=heads)[0]
        text_out, image_out = joint.split([text.shape[1], image.shape[1]], dim=1)
        return attn.to_out[0](image_out), attn.to_add_out(text_out)


class DitBlock(nn.Module):
    """One QwenImageTransformerBlock; its modulation is row `index` of the engine's input."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = rebuilt(block, {RMSNorm: RmsNorm})
        self.block.img_mod, self.block.txt_mod = PickModulation(0), PickModulation(1)
        self.block.attn.processor = JointAttention()

    def forward(
        self,
        image: Tensor,  # [B, L, d]
        text: Tensor,  # [B, T, d]
        bias: Tensor,  # [B, 1, S, S]
        cos: Tensor,  # [B, S, D/2]
        sin: Tensor,
        block_modulation: Tensor,  # [B, N, 2, 6d]
        index: Tensor,  # INT64 [1]
    ) -> tuple[Tensor, Tensor]:
        modulation = block_modulation.index_select(1, index).squeeze(1)
        text, image = self.block(image, text, bias, modulation, (cos, sin))
        return image, text


class DitEpilogue(nn.Module):
    """`norm_out`, without the linear that makes its modulation, and `proj_out`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm_out = rebuilt(model.norm_out, {})
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
        return torch.stack([self.block.img_mod(embedding), self.block.txt_mod(embedding)], 1)[
            :, None
        ]


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
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        angles = positions.to(torch.float32)[None, :, None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)  # [1, S, D]
        return self.embed_tokens(input_ids), angles.cos(), angles.sin()


class TextBlock(nn.Module):
    """A decoder layer; without a mask its attention is causal, so right padding needs none."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.block = rebuilt(layer, {Qwen2_5_VLRMSNorm: RmsNorm})

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.block(hidden, attention_mask=None, position_embeddings=(cos, sin))


class TextEpilogue(nn.Module):
    def __init__(self, model: Any, dropped_tokens: int) -> None:
        super().__init__()
        self.norm = RmsNorm(model.norm)
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
        upsample, conv = module.resample
        # At factor 2 "nearest" is "nearest-exact", but exports as one Resize instead of a gather.
        assert upsample.scale_factor == (2.0, 2.0) and upsample.mode == "nearest-exact"
        self.resample = nn.Sequential(nn.Upsample(scale_factor=2.0, mode="nearest"), conv)

    def forward(self, x: Tensor) -> Tensor:
        return self.resample(x)


class VaeDecoder(nn.Module):
    """The decoder for a single frame: only the last tap of a causal convolution sees it."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.post_quant_conv = rebuilt(vae.post_quant_conv, SINGLE_FRAME)
        self.decoder = rebuilt(vae.decoder, SINGLE_FRAME)

    def forward(self, latents: Tensor) -> Tensor:  # [B, z, h, w] → UINT8 [B, 8h, 8w, 3]
        image = self.decoder(self.post_quant_conv(latents))
        pixels = ((image * 0.5 + 0.5).clamp(0, 1) * 255).permute(0, 2, 3, 1)
        return pixels.round().to(torch.uint8)  # last: TensorRT takes uint8 at a border only


def pixel_convolution(conv: Any) -> nn.Conv2d:
    left, _, top, _, _, _ = conv._padding
    sizes = (conv.in_channels, conv.out_channels, conv.kernel_size[1:])
    return nn.Conv2d(*sizes, padding=(top, left), device="meta")


# Stock modules that take [B, C, 1, h, w] → the same for [B, C, h, w].
SINGLE_FRAME: dict[type, Callable[[Any], nn.Module]] = {
    QwenImageCausalConv3d: pixel_convolution,
    QwenImageRMS_norm: PixelNorm,
    QwenImageAttentionBlock: PixelAttention,
    QwenImageResample: PixelResample,
}
