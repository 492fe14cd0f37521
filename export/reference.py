"""The stock diffusers and transformers modules with the checkpoint's weights, as the reference.

Their weights are loaded when a submodule runs and dropped when it has run, so that a model of any
size needs the memory of its largest layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

from export.checkpoint import Checkpoint, StoredTensor

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Stage:
    """What one part of an engine has to compute: inputs and outputs by the part's own names."""

    name: str
    inputs: list[Values]  # one a case
    outputs: list[Values]


def streamed(module: nn.Module, tensors: dict[str, StoredTensor]) -> Any:
    """A copy of `module` whose parameters are there only while their submodule runs."""

    def load(names: dict[str, str], child: nn.Module, args: Any) -> None:
        for attribute, name in names.items():
            value = torch.from_numpy(tensors[name].read())
            child._parameters[attribute] = nn.Parameter(value, requires_grad=False)

    def drop(names: dict[str, str], child: nn.Module, args: Any, result: Any) -> None:
        for attribute in names:
            empty = torch.empty_like(child._parameters[attribute], device="meta")
            child._parameters[attribute] = nn.Parameter(empty, requires_grad=False)

    module = copy.deepcopy(module).eval()
    for prefix, child in module.named_modules():
        names = {
            attribute: f"{prefix}.{attribute}" if prefix else attribute
            for attribute, value in child._parameters.items()
            if value is not None
        }
        if names:
            child.register_forward_pre_hook(partial(load, names))
            child.register_forward_hook(partial(drop, names))
    return module


class TextEncoderReference:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.text_config
        self.dropped = checkpoint.dropped_tokens
        self.model = streamed(checkpoint.language_model, checkpoint.tensors["text_encoder"])
        self.model.rotary_emb = Qwen2_5_VLRotaryEmbedding(self.config)
        generator = torch.Generator().manual_seed(0)
        self.cases: list[Values] = [
            {
                "input_ids": torch.randint(
                    self.config.vocab_size, (batch, self.dropped + tokens), generator=generator
                )
            }
            for batch, tokens in [(2, 7), (1, 7), (2, 12), (3, 1)]
        ]

    def whole(self) -> list[Values]:
        return [
            {"hidden_states": self.model(**case).last_hidden_state[:, self.dropped :]}
            for case in self.cases
        ]

    def stages(self) -> Iterator[Stage]:
        states, shared = [], []
        for case in self.cases:
            hidden = self.model.embed_tokens(case["input_ids"])
            length = hidden.shape[1]
            positions = torch.arange(length).view(1, 1, -1).expand(3, hidden.shape[0], -1)
            cos, sin = self.model.rotary_emb(hidden, positions)
            causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
            states.append(hidden)
            shared.append((cos, sin, causal))
        yield Stage("prologue", self.cases, [{"hidden": hidden} for hidden in states])
        for i, layer in enumerate(self.model.layers):
            after = [
                layer(hidden, attention_mask=causal, position_embeddings=(cos, sin))
                for hidden, (cos, sin, causal) in zip(states, shared, strict=True)
            ]
            inputs = [
                {
                    "hidden": hidden,
                    "cos": cos[:1],
                    "sin": sin[:1],
                    "key_bias": torch.where(causal, 0.0, torch.finfo(torch.float32).min),
                }
                for hidden, (cos, sin, causal) in zip(states, shared, strict=True)
            ]
            yield Stage(f"block.{i}", inputs, [{"hidden": hidden} for hidden in after])
            states = after
        yield Stage(
            "epilogue",
            [{"hidden": hidden} for hidden in states],
            [{"hidden_states": self.model.norm(hidden)[:, self.dropped :]} for hidden in states],
        )


class ModulationReference:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = streamed(checkpoint.transformer, checkpoint.tensors["transformer"])
        self.cases: list[Values] = [
            {"timestep": torch.tensor(sigmas).view(-1, 1)}
            for sigmas in ([0.7, 0.02], [1.0], [0.0, 0.9897, 0.4311])
        ]

    def whole(self) -> list[Values]:
        return [modulate(self.model, case["timestep"]) for case in self.cases]

    def stages(self) -> Iterator[Stage]:
        model = self.model
        states = [embed_time(model, case["timestep"]) for case in self.cases]
        inputs = [{"embedding": state} for state in states]
        yield Stage("prologue", self.cases, inputs)
        for i, block in enumerate(model.transformer_blocks):
            rows = [torch.stack([block.img_mod(s), block.txt_mod(s)], 1)[:, None] for s in states]
            yield Stage(f"block.{i}", inputs, [{"block_modulation": row} for row in rows])
        final = [model.norm_out.linear(model.norm_out.silu(state)) for state in states]
        yield Stage("epilogue", inputs, [{"final_modulation": value} for value in final])


def embed_time(model: Any, timestep: Tensor) -> Tensor:  # [B, 1] → [B, d]
    return model.time_text_embed(timestep[:, 0], torch.empty(0, dtype=torch.float32))


def modulate(model: Any, timestep: Tensor) -> Values:
    """What the modulation engine computes, by the unsplit model's modules."""
    embedding = embed_time(model, timestep)
    rows = [
        torch.stack([block.img_mod(embedding), block.txt_mod(embedding)], 1)
        for block in model.transformer_blocks
    ]
    final = model.norm_out.linear(model.norm_out.silu(embedding))
    return {"block_modulation": torch.stack(rows, 1), "final_modulation": final}


class DitReference:
    # (batch, text tokens, tokens down, tokens across); valid text tokens a row
    SIZES = (
        ((2, 7, 3, 5), (7, 4)),
        ((1, 7, 3, 5), (6,)),
        ((2, 2, 3, 5), (1, 2)),
        ((3, 5, 2, 8), (5, 1, 3)),
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.transformer.config
        self.model = streamed(checkpoint.transformer, checkpoint.tensors["transformer"])
        self.model.pos_embed = QwenEmbedRope(10000, list(config.axes_dims_rope), scale_rope=True)
        generator = torch.Generator().manual_seed(0)
        rows = sum(size[0] for size, _ in self.SIZES)
        self.timesteps = torch.rand(rows, 1, generator=generator)
        modulation = modulate(self.model, self.timesteps)
        self.cases: list[Values] = []
        self.timesteps_of: list[Tensor] = []
        for (batch, tokens, height, width), valid in self.SIZES:
            start = sum(len(case["text_mask"]) for case in self.cases)
            rows_of = slice(start, start + batch)
            self.timesteps_of.append(self.timesteps[rows_of, 0])
            self.cases.append(
                {
                    "hidden_states": torch.randn(
                        batch, height * width, config.in_channels, generator=generator
                    ),
                    "encoder_hidden_states": torch.randn(
                        batch, tokens, config.joint_attention_dim, generator=generator
                    ),
                    "text_mask": torch.arange(tokens) < torch.tensor(valid)[:, None],
                    "position_ids": position_ids(height, width, tokens).expand(batch, -1, -1),
                    **{name: value[rows_of] for name, value in modulation.items()},
                }
            )

    def shape(self, case: int) -> list[tuple[int, int, int]]:
        return [(1, *self.SIZES[case][0][2:])]

    def whole(self) -> list[Values]:
        return [
            {
                "noise_pred": self.model(
                    hidden_states=case["hidden_states"],
                    encoder_hidden_states=case["encoder_hidden_states"],
                    encoder_hidden_states_mask=case["text_mask"],
                    timestep=self.timesteps_of[i],
                    img_shapes=[self.shape(i)] * len(case["hidden_states"]),
                    return_dict=False,
                )[0]
            }
            for i, case in enumerate(self.cases)
        ]

    def stages(self) -> Iterator[Stage]:
        model = self.model
        states, shared = [], []
        for i, case in enumerate(self.cases):
            text = model.txt_in(model.txt_norm(case["encoder_hidden_states"]))
            rotary = model.pos_embed([self.shape(i)], max_txt_seq_len=text.shape[1])
            angles = torch.cat([rotary[1], rotary[0]])[None, :, None]
            states.append((model.img_in(case["hidden_states"]), text))
            shared.append((embed_time(model, self.timesteps_of[i][:, None]), rotary, angles))
        yield Stage(
            "prologue",
            self.cases,
            [
                {
                    "image": image,
                    "text": text,
                    "cos": angles.real.expand(len(image), -1, -1, -1),
                    "sin": angles.imag.expand(len(image), -1, -1, -1),
                }
                for (image, text), (_, _, angles) in zip(states, shared, strict=True)
            ],
        )
        for i, block in enumerate(model.transformer_blocks):
            inputs, outputs = [], []
            for case, (image, text), (embedding, rotary, angles) in zip(
                self.cases, states, shared, strict=True
            ):
                keys = torch.cat([case["text_mask"], torch.ones(image.shape[:2]).bool()], 1)
                new_text, new_image = block(image, text, case["text_mask"], embedding, rotary)
                inputs.append(
                    {
                        "image": image,
                        "text": text,
                        "key_bias": torch.where(keys, 0.0, -65504.0)[:, None, None],
                        "cos": angles.real.expand(len(image), -1, -1, -1),
                        "sin": angles.imag.expand(len(image), -1, -1, -1),
                        "block_modulation": case["block_modulation"],
                    }
                )
                outputs.append({"image": new_image, "text": new_text})
            yield Stage(f"block.{i}", inputs, outputs)
            states = [(values["image"], values["text"]) for values in outputs]
        yield Stage(
            "epilogue",
            [
                {"image": image, "final_modulation": case["final_modulation"]}
                for (image, _), case in zip(states, self.cases, strict=True)
            ],
            [
                {"noise_pred": model.proj_out(model.norm_out(image, embedding))}
                for (image, _), (embedding, _, _) in zip(states, shared, strict=True)
            ],
        )


def position_ids(height: int, width: int, text_tokens: int) -> Tensor:
    """The `dit` engine's position ids for one image: INT32 [T + height·width, 3], text first.

    `height` and `width` in image tokens. Image positions are centred on 0 in both directions; text
    positions go on from the image's largest, the same on all three axes.
    """
    text = torch.arange(text_tokens) + max(height // 2, width // 2)
    rows = torch.arange(height) - (height - height // 2)
    columns = torch.arange(width) - (width - width // 2)
    image = torch.stack(
        [
            torch.zeros(height, width, dtype=torch.int64),
            rows[:, None].expand(height, width),
            columns[None, :].expand(height, width),
        ],
        dim=-1,
    )
    return torch.cat([text[:, None].expand(-1, 3), image.flatten(0, 1)]).to(torch.int32)


class VaeDecoderReference:
    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.vae.config
        self.model = streamed(checkpoint.vae, checkpoint.tensors["vae"])
        generator = torch.Generator().manual_seed(0)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        self.cases: list[Values] = [
            {"latents": torch.randn(batch, config.z_dim, height, width, generator=generator) * std + mean}
            for batch, height, width in [(2, 4, 6), (1, 4, 6), (2, 3, 6), (2, 4, 5)]
        ]

    def whole(self) -> list[Values]:
        results: list[Values] = []
        for case in self.cases:
            image = self.model.decode(case["latents"][:, :, None], return_dict=False)[0][:, :, 0]
            pixels = (image * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
            # VaeImageProcessor.numpy_to_pil
            results.append({"pixels": torch.from_numpy((pixels * 255).round().astype(np.uint8))})
        return results


REFERENCES: dict[str, Any] = {
    "text_encoder": TextEncoderReference,
    "modulation": ModulationReference,
    "dit": DitReference,
    "vae_decoder": VaeDecoderReference,
}
