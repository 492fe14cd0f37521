"""The stock diffusers and transformers modules with the checkpoint's weights, as the reference.

Their weights are loaded when a submodule runs and dropped when it has run, or, those of a block,
when all cases have passed it: a model of any size needs the memory of one block.

A reference has `cases` (inputs of the engine's graph), `whole()` (the engine's outputs for each
case, from the whole stock model) and, for engines with blocks, `stages()` (the same block by
block). The cases differ in one kind of dimension at a time, so that a failing one points at it.
"""

from __future__ import annotations

import contextlib
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

from export.checkpoint import Checkpoint
from export.parts import MASKED, ROPE_THETA
from export.stored import StoredTensor

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Stage:
    """What one stage of an engine has to compute: inputs and outputs by its part's names, one
    entry a case."""

    name: str
    inputs: list[Values]
    outputs: list[Values]


def joined(left: list[Values], right: list[Values]) -> list[Values]:
    return [a | b for a, b in zip(left, right, strict=True)]


def streamed(module: nn.Module, tensors: dict[str, StoredTensor]) -> Any:
    """A copy of `module` whose parameters are there only while their submodule runs, or while a
    module that holds it is `resident`."""

    def load(names: dict[str, str], child: Any, args: Any) -> None:
        for attribute, name in names.items():
            if child._parameters[attribute].is_meta:
                value = torch.from_numpy(tensors[name].read())
                child._parameters[attribute] = nn.Parameter(value, requires_grad=False)

    def drop(names: dict[str, str], child: Any) -> None:
        for attribute, name in names.items():
            empty = torch.empty(tensors[name].shape, device="meta")
            child._parameters[attribute] = nn.Parameter(empty, requires_grad=False)

    def drop_unless_resident(child: Any, args: Any, result: Any) -> None:
        if not child.is_resident:
            child.drop()

    module = copy.deepcopy(module)
    child: Any
    for prefix, child in module.named_modules():
        names = {
            attribute: f"{prefix}.{attribute}" if prefix else attribute
            for attribute, value in child._parameters.items()
            if value is not None
        }
        child.is_resident, child.drop = False, partial(drop, names, child)
        if names:
            child.register_forward_pre_hook(partial(load, names))
            child.register_forward_hook(drop_unless_resident)
    return module


@contextlib.contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Loads each weight of a part of a streamed module once, however often it runs."""
    children: list[Any] = list(module.modules())
    for child in children:
        child.is_resident = True
    yield
    for child in children:
        child.is_resident = False
        child.drop()


class TextEncoderReference:
    SIZES = ((2, 7), (1, 7), (2, 12), (3, 1))  # batch, tokens after the dropped ones

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.text_config
        self.dropped = checkpoint.dropped_tokens
        self.model = streamed(checkpoint.language_model, checkpoint.tensors["text_encoder"])
        self.model.rotary_emb = Qwen2_5_VLRotaryEmbedding(config)
        generator = torch.Generator().manual_seed(0)
        self.cases: list[Values] = []
        for batch, tokens in self.SIZES:
            size = (batch, self.dropped + tokens)
            ids = torch.randint(config.vocab_size, size, generator=generator)
            self.cases.append({"input_ids": ids})

    def whole(self) -> list[Values]:
        states = [self.model(**case).last_hidden_state for case in self.cases]
        return [{"hidden_states": state[:, self.dropped :]} for state in states]

    def stages(self) -> Iterator[Stage]:
        states = [{"hidden": self.model.embed_tokens(case["input_ids"])} for case in self.cases]
        angles = []
        for case in self.cases:
            positions = torch.arange(case["input_ids"].shape[1]).view(1, 1, -1)
            cos, sin = self.model.rotary_emb(torch.empty(0), positions)
            angles.append({"cos": cos, "sin": sin})
        yield Stage("prologue", self.cases, joined(states, angles))
        for i, layer in enumerate(self.model.layers):
            inputs = joined(states, angles)
            with resident(layer):
                states = [
                    {"hidden": layer(x["hidden"], position_embeddings=(x["cos"], x["sin"]))}
                    for x in inputs
                ]
            yield Stage(f"block.{i}", inputs, states)
        final = [self.model.norm(state["hidden"])[:, self.dropped :] for state in states]
        yield Stage("epilogue", states, [{"hidden_states": value} for value in final])


class ModulationReference:
    SIGMAS = ((0.7, 0.02), (1.0,), (0.0, 0.9897, 0.4311))

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = streamed(checkpoint.transformer, checkpoint.tensors["transformer"])
        self.cases: list[Values] = [
            {"timestep": torch.tensor(sigmas)[:, None]} for sigmas in self.SIGMAS
        ]

    def whole(self) -> list[Values]:
        return [modulate(self.model, case["timestep"]) for case in self.cases]

    def stages(self) -> Iterator[Stage]:
        states = [{"embedding": embed_time(self.model, case["timestep"])} for case in self.cases]
        yield Stage("prologue", self.cases, states)
        rows: list[list[Tensor]] = [[] for _ in states]
        for i, block in enumerate(self.model.transformer_blocks):
            with resident(block):
                for state, done in zip(states, rows, strict=True):
                    done.append(modulate_block(block, state["embedding"])[:, None])
            yield Stage(f"block.{i}", states, [{"block_modulation": done[-1]} for done in rows])
        final = [
            self.model.norm_out.linear(self.model.norm_out.silu(s["embedding"])) for s in states
        ]
        yield Stage("epilogue", states, [{"final_modulation": value} for value in final])


def embed_time(model: Any, timestep: Tensor) -> Tensor:  # [B, 1] → [B, d]
    return model.time_text_embed(timestep[:, 0], torch.empty(0, dtype=model.dtype))


def modulate_block(block: Any, embedding: Tensor) -> Tensor:  # [B, d] → [B, 2, 6d]
    return torch.stack([block.img_mod(embedding), block.txt_mod(embedding)], dim=1)


def modulate(model: Any, timestep: Tensor) -> Values:
    """The modulation engine's outputs, from the unsplit model's own modules; timestep [B, 1]."""
    embedding = embed_time(model, timestep)
    rows = [modulate_block(block, embedding) for block in model.transformer_blocks]
    final = model.norm_out.linear(model.norm_out.silu(embedding))
    return {"block_modulation": torch.stack(rows, dim=1), "final_modulation": final}


class DitReference:
    # batch, text tokens, image tokens down and across; valid text tokens of each row
    SIZES = (
        (2, 7, 3, 5, (7, 4)),
        (1, 7, 3, 5, (6,)),
        (2, 2, 3, 5, (1, 2)),
        (2, 7, 4, 2, (5, 7)),
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.transformer.config
        self.model = streamed(checkpoint.transformer, checkpoint.tensors["transformer"])
        self.model.pos_embed = QwenEmbedRope(
            ROPE_THETA, list(config.axes_dims_rope), scale_rope=True
        )
        generator = torch.Generator().manual_seed(0)
        batches = [size[0] for size in self.SIZES]
        timesteps = torch.rand(sum(batches), 1, generator=generator)
        modulation = {k: v.split(batches) for k, v in modulate(self.model, timesteps).items()}
        self.timesteps = timesteps.split(batches)
        self.cases: list[Values] = []
        for i, (batch, tokens, height, width, valid) in enumerate(self.SIZES):
            image = (batch, height * width, config.in_channels)
            text = (batch, tokens, config.joint_attention_dim)
            self.cases.append(
                {
                    "hidden_states": torch.randn(image, generator=generator),
                    "encoder_hidden_states": torch.randn(text, generator=generator),
                    "text_mask": torch.arange(tokens) < torch.tensor(valid)[:, None],
                    "position_ids": position_ids(height, width, tokens).expand(batch, -1, -1),
                    **{name: rows[i] for name, rows in modulation.items()},
                }
            )

    def whole(self) -> list[Values]:
        results = []
        for case, timestep, size in zip(self.cases, self.timesteps, self.SIZES, strict=True):
            (result,) = self.model(
                hidden_states=case["hidden_states"],
                encoder_hidden_states=case["encoder_hidden_states"],
                encoder_hidden_states_mask=case["text_mask"],
                timestep=timestep[:, 0],
                img_shapes=[[(1, size[2], size[3])]] * size[0],
                return_dict=False,
            )
            results.append({"noise_pred": result})
        return results

    def stages(self) -> Iterator[Stage]:
        model = self.model
        states, shared, rotary = [], [], []
        for case, size in zip(self.cases, self.SIZES, strict=True):
            image = model.img_in(case["hidden_states"])
            text = model.txt_in(model.txt_norm(case["encoder_hidden_states"]))
            states.append({"image": image, "text": text})
            mask = torch.cat([case["text_mask"], torch.ones(image.shape[:2]).bool()], dim=1)
            bias = torch.where(mask, 0.0, MASKED)[:, None, None].expand(-1, -1, mask.shape[1], -1)
            rotary.append(model.pos_embed([[(1, size[2], size[3])]], max_txt_seq_len=size[1]))
            angles = torch.cat(rotary[-1][::-1]).expand(size[0], -1, -1)
            shared.append({"bias": bias, "cos": angles.real, "sin": angles.imag})
        embeddings = [embed_time(model, timestep) for timestep in self.timesteps]
        yield Stage("prologue", self.cases, joined(states, shared))
        modulation = [{"block_modulation": case["block_modulation"]} for case in self.cases]
        for i, block in enumerate(model.transformer_blocks):
            inputs = joined(joined(states, shared), modulation)
            states = []
            with resident(block):
                for k, case in enumerate(self.cases):
                    text, image = block(
                        inputs[k]["image"],
                        inputs[k]["text"],
                        case["text_mask"],
                        embeddings[k],
                        rotary[k],
                    )
                    states.append({"image": image, "text": text})
            yield Stage(f"block.{i}", inputs, states)
        final = [
            model.proj_out(model.norm_out(state["image"], embedding))
            for state, embedding in zip(states, embeddings, strict=True)
        ]
        images = [
            {"image": state["image"], "final_modulation": case["final_modulation"]}
            for state, case in zip(states, self.cases, strict=True)
        ]
        yield Stage("epilogue", images, [{"noise_pred": value} for value in final])


def position_ids(height: int, width: int, text_tokens: int) -> Tensor:
    """The `dit` engine's position ids for one image: INT32 [T + height·width, 3], text first.

    `height` and `width` in image tokens. Image positions are centred on 0 in both directions; text
    positions go on from the image's largest, the same on all three axes.
    """
    text = torch.arange(text_tokens) + max(height // 2, width // 2)
    image = torch.stack(
        torch.meshgrid(
            torch.zeros(1, dtype=torch.int64),
            torch.arange(height) - (height - height // 2),
            torch.arange(width) - (width - width // 2),
            indexing="ij",
        ),
        dim=-1,
    )
    return torch.cat([text[:, None].expand(-1, 3), image.view(-1, 3)]).to(torch.int32)


class VaeDecoderReference:
    SIZES = ((2, 4, 6), (1, 4, 6), (2, 3, 6), (2, 4, 5))  # batch, latent height and width

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.vae.config
        self.model = streamed(checkpoint.vae, checkpoint.tensors["vae"])
        generator = torch.Generator().manual_seed(0)
        mean, std = (
            torch.tensor(v)[:, None, None] for v in (config.latents_mean, config.latents_std)
        )
        self.cases: list[Values] = []
        for batch, height, width in self.SIZES:
            noise = torch.randn(batch, config.z_dim, height, width, generator=generator)
            self.cases.append({"latents": noise * std + mean})

    def whole(self) -> list[Values]:
        results: list[Values] = []
        for case in self.cases:
            image = self.model.decode(case["latents"][:, :, None], return_dict=False)[0][:, :, 0]
            # VaeImageProcessor.postprocess
            pixels = (image * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
            results.append({"pixels": torch.from_numpy((pixels * 255).round().astype(np.uint8))})
        return results


REFERENCES: dict[str, Any] = {
    "text_encoder": TextEncoderReference,
    "modulation": ModulationReference,
    "dit": DitReference,
    "vae_decoder": VaeDecoderReference,
}
