"""Qwen2.5-VL's language model up to its last norm. B batch, S tokens, H heads of size D."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hopper.linear import Linear, linear
from hopper.replay import Replayed
from runtimes import EngineError

BUCKET = 32  # tokens; prompts are padded to multiples, so that few lengths are recorded
USUAL = 256  # tokens of most prompts, with the template's: these lengths are recorded at the start


class Layer(NamedTuple):
    input_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class TextEncoder:
    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """config: the language model's, with `dropped_tokens` of the template."""
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.eps, self.dropped_tokens = config["rms_norm_eps"], config["dropped_tokens"]
        self.embeddings, self.norm = weights["embed_tokens.weight"], weights["norm.weight"]
        self.size = self.embeddings.shape[1] // self.heads
        self.theta = config["rope_theta"]
        self.layers = [
            Layer(
                weights[f"layers.{i}.input_layernorm.weight"],
                linear(weights, f"layers.{i}.qkv"),
                linear(weights, f"layers.{i}.self_attn.o_proj"),
                weights[f"layers.{i}.post_attention_layernorm.weight"],
                linear(weights, f"layers.{i}.gate_up"),
                linear(weights, f"layers.{i}.mlp.down_proj"),
            )
            for i in range(config["num_hidden_layers"])
        ]
        self.replayed = Replayed(self.encode)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """INT64 [B, S] → BF16 [B, S − dropped, width].

        Raises:
            EngineError: nothing follows the template's tokens, or the vocabulary lacks an id.
        """
        tokens, vocabulary = input_ids.shape[1], len(self.embeddings)
        if tokens <= self.dropped_tokens:
            raise EngineError(
                f"input_ids holds {tokens} tokens; it must be the template's "
                f"{self.dropped_tokens} and at least one more"
            )
        least, most = (int(bound) for bound in input_ids.aminmax())
        if least < 0 or most >= vocabulary:
            raise EngineError(
                f"input_ids holds ids from {least} to {most}; the text encoder knows 0 to "
                f"{vocabulary - 1}"
            )
        padded = functional.pad(input_ids, (0, -tokens % BUCKET)).to(self.embeddings.device)
        embedded = functional.embedding(padded, self.embeddings).to(self.norm.device)
        return self.replayed(embedded)[:, : tokens - self.dropped_tokens]

    def warm_up(self, device: torch.device) -> None:
        """Records the usual lengths, which takes two calls each."""
        for tokens in range(2 * BUCKET, USUAL + 1, BUCKET):
            hidden = torch.zeros(1, tokens, len(self.norm), dtype=self.norm.dtype, device=device)
            for _ in range(2):
                self.replayed(hidden)

    def encode(self, hidden: Tensor) -> Tensor:
        """BF16 [B, S, width]. Attention is causal: right padding needs no mask."""
        cos, sin = self.angles(hidden.shape[1], hidden.device)
        for layer in self.layers:
            hidden = hidden + self.attention(layer, self.normed(hidden, layer.input_norm), cos, sin)
            gate, up = layer.gate_up(self.normed(hidden, layer.mlp_norm)).chunk(2, -1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        return self.normed(hidden[:, self.dropped_tokens :], self.norm)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.eps)

    def angles(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, BF16 [S, D]. A prompt has no images, so that the three axes of the
        multimodal positions are equal and the rotary embedding is the ordinary one."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.float32, device=device) / self.size
        positions = torch.arange(tokens, dtype=torch.float32, device=device)
        angles = positions[:, None] * self.theta**-exponents
        angles = torch.cat([angles, angles], 1)
        return angles.cos().to(self.norm.dtype), angles.sin().to(self.norm.dtype)

    def attention(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = layer.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)  # [B, heads, S, D]
        counts = [self.heads, self.kv_heads, self.kv_heads]
        queries_keys, v = heads.split([self.heads + self.kv_heads, self.kv_heads], 1)
        half = self.size // 2
        turned = torch.cat([-queries_keys[..., half:], queries_keys[..., :half]], -1)
        q, k = (queries_keys * cos + turned * sin).split(counts[:2], 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return layer.out(out.transpose(1, 2).flatten(2))
