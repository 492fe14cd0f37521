"""A repository of the profile h200-torch at Qwen-Image's full size, with random weights.

    python -m bench.hopper_repository REPOSITORY [--recipe fp8-rows]

It is the trained small checkpoint's, with engines of the real sizes in place of its own: no
checkpoint of 57 GB is written first. What its pictures show is noise. Needs 43 GB of disk, and 100
GB of GPU memory while it is made.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bench import hopper_engines as full
from bench.common import check_space
from bench.gpu_timing import gpu_machine
from build import manifest
from build.assemble import assemble
from build.profile import BuildError, load_profile
from build.tiny import CALIBRATION, CHECKPOINT
from export import CheckpointError, ExportError
from export.packed import PACKED, unpackable
from export.recipe import EngineRecipe, load_recipe

PROFILE = "h200-torch"
DISK_GB = 43


def make(target: Path, recipe: str | None = None, stages: Path | None = None) -> None:
    """Writes the repository.

    recipe: the DiT's, by default that of the profile. stages: where the small checkpoint's export
    keeps its own, by default beside the repository.
    """
    profile = load_profile(PROFILE)
    chosen = of_dit(recipe or profile.engines["dit"].precision)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BuildError(f"{target} is there already: name a folder that is empty or not there")
    assemble(CHECKPOINT, profile, target, calibration=CALIBRATION, onnx=stages)
    write_transformer(target, chosen, ["dit", "modulation"])
    texts = full.in_fp8(profile.engines["text_encoder"].precision, "text_encoder")
    for engine, module, quantized in (
        ("text_encoder", full.language_model, texts),
        ("vae_decoder", full.vae, full.no_fp8),
    ):
        replace(target, engine, full.packed(engine, module(), quantized))
        torch.cuda.empty_cache()
    describe(target, chosen)


def of_dit(recipe: str) -> EngineRecipe:
    """Raises ExportError if there is none, or the profile's engine cannot be made by it."""
    chosen = load_recipe(recipe).get("dit")
    if chosen is None:
        raise ExportError(f"the recipe {recipe!r} has nothing for the DiT")
    if why := unpackable(chosen):
        raise ExportError(f"{chosen.where}: {why}")
    return chosen


def change_dit(target: Path, recipe: str) -> None:
    """Puts a DiT by another recipe into a repository of `make`, of the same weights."""
    chosen = of_dit(recipe)
    write_transformer(target, chosen, ["dit"])
    describe(target, chosen)


@torch.inference_mode()
def write_transformer(target: Path, chosen: EngineRecipe, engines: list[str]) -> None:
    """Those of modulation and DiT that `engines` names, of one transformer."""
    models = full.Models(quantized=full.in_fp8(chosen.name))
    if chosen.attention:
        models.use_fp8_attention(full.edges(chosen.name))
    for engine in engines:
        weights = (
            models.weights if engine == "dit" else full.packed(engine, models.stock, full.no_fp8)
        )
        replace(target, engine, weights)
    del models
    gc.collect()  # an engine refers to itself
    torch.cuda.empty_cache()


def replace(target: Path, engine: str, tensors: dict[str, Tensor]) -> None:
    """Puts tensors of the real size into the engine's place."""
    file = packed_file(target, engine)
    description = described(file)
    description["config"] = config_of(engine)
    shapes = shapes_of(engine)
    for border in ("inputs", "outputs"):
        for name, tensor in description[border].items():
            tensor["shape"] = shapes.get(name, tensor["shape"])
    file.unlink()  # it may be a hard link
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        file,
        {"description": json.dumps(description)},
    )


def packed_file(target: Path, engine: str) -> Path:
    return target / "model_repository" / engine / "1" / PACKED


def described(file: Path) -> dict[str, Any]:
    """What the export wrote of an engine into its file."""
    with safe_open(file, "pt") as packed:
        description: dict[str, Any] = json.loads(packed.metadata()["description"])
    return description


def shapes_of(engine: str) -> dict[str, list[int]]:
    """Those inputs and outputs whose shapes tell a model's size; −1 is any size."""
    text = [-1, -1, full.TEXT_CONFIG.hidden_size]
    if engine == "text_encoder":
        return {"hidden_states": text}
    width = full.TRANSFORMER["num_attention_heads"] * full.TRANSFORMER["attention_head_dim"]
    return {
        "encoder_hidden_states": text,
        "block_modulation": [-1, full.TRANSFORMER["num_layers"], 2, 6 * width],
        "final_modulation": [-1, 2 * width],
    }


def config_of(engine: str) -> dict[str, Any]:
    """What the forward pass is told of the real sizes."""
    configs = {"text_encoder": full.TEXT, "vae_decoder": full.VAE_CONFIG}
    return configs.get(engine, full.DIT_CONFIG)


def describe(target: Path, chosen: EngineRecipe) -> None:
    """Says the real sizes in checkpoint.json, and those of the files in the manifest."""
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    edit(
        target / "model_repository" / "checkpoint.json",
        default_height=1024,
        default_width=1024,
        text_encoder={name: getattr(full.TEXT_CONFIG, name) for name in names},
    )
    known = {
        file.relative_to(target).as_posix(): {"bytes": file.stat().st_size, "sha256": ""}
        for file in target.rglob(PACKED)
        if file.stat().st_size > manifest.HASHED_BYTES  # a start compares samples of these
    }
    found = manifest.read(target)
    assert found is not None
    engines = found["engines"]
    for engine, said in engines.items():
        description = described(packed_file(target, engine))
        said |= {border: description[border] for border in ("inputs", "outputs")}
    engines["dit"] |= {"precision": chosen.name, "attention": chosen.attention, "layers": {}}
    edit(
        target / manifest.NAME,
        engines=engines,
        files=manifest.list_files(target, known),
    )


def edit(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | values, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hopper_repository")
    parser.add_argument("repository", type=Path, help="a folder that is empty or not there")
    parser.add_argument("--recipe", help="the DiT's; by default that of the profile")
    options = parser.parse_args()
    gpu_machine()
    check_space(parser, options.repository.absolute().parent, DISK_GB)
    try:
        make(options.repository, options.recipe)
    except (BuildError, CheckpointError, ExportError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
