"""A training's state: few small files, so that it travels between machines.

    state.json            sizes, the tokenizer's words, steps, loss curves
    vae.safetensors       FP32
    weights.safetensors   text encoder and DiT, bf16
    ema.safetensors       their moving average, bf16: what is exported

The optimizer's moments are not kept: they come back within the warm-up after a resume.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Tokenizer

from training.flow import Average, trained
from training.layout import load_tokenizer, split_words, write_tokenizer
from training.models import Models, Sizes, build
from training.progress import Progress
from training.scenes import captions_to_learn_words_from, common_words


def tokenizer_of(words: list[str]) -> Qwen2Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder) / "tokenizer", words)
        return load_tokenizer(Path(folder) / "tokenizer")


def start(progress: Progress, sizes: Sizes, seed: int) -> tuple[Models, Qwen2Tokenizer]:
    """New models, or those of the state that `progress` has read; the state's sizes then count."""
    state = progress.state
    if "words" not in state:
        state["words"] = common_words(captions_to_learn_words_from(seed), split_words)
        state["sizes"] = sizes.to_json()
    tokenizer = tokenizer_of(state["words"])
    models = build(Sizes.of(state["sizes"]), tokenizer, seed)
    for stage, names in (("vae", ["vae"]), ("dit", ["weights", "ema"])):
        steps = state["stages"].get(stage, {}).get("steps", 0)
        for name in names:
            if steps and not (progress.folder / f"{name}.safetensors").exists():
                raise SystemExit(
                    f"{progress.folder} has {steps} steps of {stage}, but its {name}.safetensors "
                    "is missing"
                )
    file = progress.folder / "vae.safetensors"
    if file.exists():
        models.vae.load_state_dict(load_file(file))
    if "latents" in state:
        models.vae.register_to_config(**state["latents"])
    file = progress.folder / "weights.safetensors"
    if file.exists():
        put(trained(models), load_file(file))
    return models, tokenizer


def put(parameters: list[Any], values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            parameter.copy_(values[str(i)])


def load_average(folder: Path, average: Average) -> None:
    if (folder / "ema.safetensors").exists():
        put(average.values, load_file(folder / "ema.safetensors"))


def save_vae(progress: Progress, vae: Any) -> None:
    tensors = {name: tensor.contiguous().cpu() for name, tensor in vae.state_dict().items()}
    save_file(tensors, progress.folder / "vae.safetensors")


def save_flow(progress: Progress, average: Average) -> None:
    for name, tensors in (("weights", average.parameters), ("ema", average.values)):
        stored = {str(i): tensor.detach().bfloat16().cpu() for i, tensor in enumerate(tensors)}
        save_file(stored, progress.folder / f"{name}.safetensors")


def load_trained(folder: Path) -> tuple[Models, Qwen2Tokenizer, Progress]:
    """The averaged models of a saved state, FP32 on the CPU."""
    if not (folder / "ema.safetensors").exists():
        raise SystemExit(f"{folder} holds no trained DiT (ema.safetensors)")
    progress = Progress(folder, 0)
    models, tokenizer = start(progress, Sizes(), 0)
    put(trained(models), load_file(folder / "ema.safetensors"))
    return models, tokenizer, progress
