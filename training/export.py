"""Stage 3: the trained models in diffusers layout, in bf16, with a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from training.layout import load_tokenizer, scheduler, write_json, write_tokenizer
from training.models import Models, Sizes, parameter_table
from training.progress import Progress

LIMIT = 16_000_000  # bytes of safetensors
# Latent pixels, ×8 for pixels: 128×128 unless a request says otherwise. The pipeline class holds
# 1024×1024, and from_pretrained ignores keys with a leading underscore.
DEFAULT_SAMPLE_SIZE = 16


def export(models: Models, progress: Progress, out: Path) -> int:
    """Writes the checkpoint to the folder `out`; returns the bytes of its safetensors."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} exists and is not empty")
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(out / "tokenizer", progress.state["words"])
    load_tokenizer(out / "tokenizer")  # checks the template's 34 tokens
    for name, model in models.items():
        model.to("cpu", torch.bfloat16).save_pretrained(out / name)
    keep_published_names(out / "text_encoder" / "model.safetensors")
    scheduler().save_config(out / "scheduler")
    write_json(
        out / "model_index.json",
        {
            "_class_name": "QwenImagePipeline",
            "_diffusers_version": diffusers.__version__,
            "_default_sample_size": DEFAULT_SAMPLE_SIZE,
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
            "tokenizer": ["transformers", "Qwen2Tokenizer"],
            "transformer": ["diffusers", "QwenImageTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLQwenImage"],
        },
    )
    size = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    (out / "README.md").write_text(model_card(models, progress, size), encoding="utf-8")
    if size > LIMIT:
        raise SystemExit(f"the safetensors take {size:,} bytes, more than {LIMIT:,}")
    return size


def keep_published_names(file: Path) -> None:
    """The published text encoders keep the names that transformers used before it nested them."""
    from safetensors.torch import load_file, save_file

    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def model_card(models: Models, progress: Progress, size: int) -> str:
    state = progress.state
    sizes = Sizes.of(state["sizes"])
    stages: dict[str, Any] = state["stages"]
    steps = "\n".join(
        f"| {name} | {stage['steps']:,} | {stage['seconds'] / 60:.1f} | {stage['log'][-1][1]:.4f} |"
        for name, stage in stages.items()
        if stage["log"]
    )
    scores = "\n".join(f"- {line}" for line in state.get("scores", ["not measured"]))
    settings = json.dumps(state.get("settings", {}), sort_keys=True)
    return f"""---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
---
# Qwen-Image, tiny

Qwen-Image's classes at about 1/3,600 of its size, trained from scratch on a synthetic world
(`quality/world.py`): one to three coloured shapes and perhaps a number on a plain background, from
captions in English and Chinese, at 128×128, 112×144 and 144×112. It stands in for the real model
where changes of the serving code are judged. It knows nothing else.

## Architecture
`QwenImageTransformer2DModel` of {sizes.blocks} blocks, {sizes.heads} heads × {sizes.head_size};
`Qwen2_5_VLForConditionalGeneration` of {sizes.text_layers} layers, width {sizes.text_width}
(the vision tower is untrained); `AutoencoderKLQwenImage` of width {sizes.vae_width}, its taps for
earlier frames zero. Stored in bf16 ({size / 1e6:.1f} MB), trained in FP32 with bf16 autocast.

{parameter_table(models)}

## Training
`python -m training` with scenes rendered on the fly; rectified flow with the published scheduler's
time shift, prompts dropped for guidance, a moving average of the weights.

| stage | steps | minutes | last loss |
|---|---:|---:|---:|
{steps}

Settings: `{settings}`. Versions: torch {torch.__version__}, diffusers {diffusers.__version__},
transformers {transformers.__version__}.

## Scores
By `quality.judge` at 20 steps, guidance 4, the negative prompt `" "`, weights as stored:
{scores}

## Limits
Prompts beyond the world, other picture sizes and longer texts give arbitrary pictures. Small
details (edges, digits) are as sharp as a latent position for 8×8 pixels allows.
"""
