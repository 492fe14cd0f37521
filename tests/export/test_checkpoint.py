"""Opening checkpoints: what is refused and with which words, names, shards, fingerprints."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from export import Checkpoint, CheckpointError, stored
from tests.make_checkpoint import cached_checkpoint

WEIGHTS = "diffusion_pytorch_model.safetensors"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def small() -> Path:
    """A checkpoint with one file of weights a component."""
    return cached_checkpoint(blocks=1, heads=2, head_size=16, rope_axes=(4, 6, 6), text_width=64)


def edit(file: str, **fields: Any) -> Damage:
    """Sets fields of a JSON file; None removes one."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / file).read_text(encoding="utf-8"))
        config |= fields
        config = {name: value for name, value in config.items() if value is not None}
        (folder / file).write_text(json.dumps(config), encoding="utf-8")

    return damage


def edit_weights(component: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        (file,) = (folder / component).glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return damage


def remove(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def cut_off(folder: Path) -> None:
    os.truncate(
        folder / "transformer" / WEIGHTS, (folder / "transformer" / WEIGHTS).stat().st_size - 8
    )


def no_header(folder: Path) -> None:
    (folder / "vae" / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)


def bad_index(weight_map: Any) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "transformer" / WEIGHTS).unlink()
        index = folder / "transformer" / f"{WEIGHTS}.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))

    return damage


TEXT = "text_encoder/config.json"
DIT = "transformer/config.json"
NORM = "transformer_blocks.0.attn.norm_q.weight"

REFUSED: dict[str, tuple[Damage, str]] = {
    "no index": (remove("model_index.json"), "model_index.json is missing"),
    "index no JSON": (
        lambda f: (f / "model_index.json").write_text("{"),
        "model_index.json is no JSON: Expecting",
    ),
    "index a list": (
        lambda f: (f / "model_index.json").write_text("[]"),
        "model_index.json must hold a JSON object",
    ),
    "pipeline": (
        edit("model_index.json", _class_name="QwenImageEditPipeline"),
        "names the pipeline class QwenImageEditPipeline, but only QwenImagePipeline can be",
    ),
    "scheduler class": (
        edit("model_index.json", scheduler=["diffusers", "UniPCMultistepScheduler"]),
        "names UniPCMultistepScheduler as the scheduler, but it must be FlowMatchEulerDiscrete",
    ),
    "no component": (
        edit("model_index.json", vae=None),
        "names None as the vae, but it must be AutoencoderKLQwenImage",
    ),
    "no folder": (lambda f: shutil.rmtree(f / "vae"), "vae/config.json is missing"),
    "guidance": (
        edit(DIT, guidance_embeds=True),
        "has guidance_embeds = True, but only models with guidance_embeds = False can be exported",
    ),
    "2511": (edit(DIT, zero_cond_t=True), "zero_cond_t = True"),
    "layered": (edit(DIT, use_additional_t_cond=True), "use_additional_t_cond = True"),
    "layered rope": (edit(DIT, use_layer3d_rope=True), "use_layer3d_rope = True"),
    "vae attention": (edit("vae/config.json", attn_scales=[1.0]), r"attn_scales = \[1.0\]"),
    "rgba": (edit("vae/config.json", input_channels=4), "input_channels = 4"),
    "stochastic": (
        edit("scheduler/scheduler_config.json", stochastic_sampling=True),
        "scheduler/scheduler_config.json has stochastic_sampling = True, but only models with",
    ),
    "nonsense": (
        edit(DIT, num_layers="two"),
        "transformer/config.json does not make a QwenImageTransformer2DModel: ",
    ),
    "text nonsense": (
        edit(TEXT, text_config={"hidden_size": 63, "num_attention_heads": 4}),
        "text_encoder/config.json does not make a Qwen2_5_VLForConditionalGeneration: ",
    ),
    "axes": (
        edit(DIT, axes_dims_rope=[4, 6, 8]),
        r"axes_dims_rope of the transformer is \[4, 6, 8\], but it must be three even numbers",
    ),
    "means": (
        edit("vae/config.json", latents_mean=[0.0]),
        "have 1 and 16 numbers, but z_dim is 16",
    ),
    **{
        f"{field} {value}": (
            edit("vae/config.json", **{field: value}),
            f"{field} of the VAE is .*, but it must list finite numbers",
        )
        for field in ("latents_mean", "latents_std")
        for value in (3, ["a"] * 16, [True] * 16, [math.nan] * 16, [math.inf] * 16, [10**400] * 16)
    },
    "no deviation": (
        edit("vae/config.json", latents_std=[0.0] * 16),
        "latents_std of the VAE is .*, but all of it must be above 0",
    ),
    **{
        f"scheduler {change}": (
            edit("scheduler/scheduler_config.json", **change),
            "scheduler_config.json gives (no schedule|a schedule with NaN)",
        )
        for change in (
            {"max_shift": math.nan},
            {"max_shift": 1e9},
            {"base_shift": "x"},
            {"max_image_seq_len": 256, "base_image_seq_len": 256},
        )
    },
    "huge sample size": (
        edit("model_index.json", _default_sample_size=10**7),
        "_default_sample_size in model_index.json is 10000000, but it must be .* at most 512",
    ),
    "sample size": (
        edit("model_index.json", _default_sample_size=-1),
        "_default_sample_size in model_index.json is -1, but it must be",
    ),
    "more layers": (
        edit(DIT, num_layers=2),
        "transformer has no tensor transformer_blocks.1.img_mod.1.weight, but its config.json asks",
    ),
    "other width": (
        edit(DIT, joint_attention_dim=96),
        r"tensor txt_norm.weight in .* has the shape \[64\], but config.json asks for \[96\]",
    ),
    "missing tensor": (
        edit_weights("transformer", lambda tensors: tensors.pop(NORM)),
        f"transformer has no tensor {NORM}, but its config.json asks for one of shape",
    ),
    "unknown tensor": (
        edit_weights("vae", lambda tensors: tensors.update(lora=torch.zeros(1))),
        "has a tensor lora, but the AutoencoderKLQwenImage of this config.json has none",
    ),
    "dtype": (
        edit_weights(
            "transformer",
            lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.float8_e4m3fn)}),
        ),
        f"tensor {NORM} in .* is F8_E4M3, but only F32, F16, BF16 can be exported",
    ),
    "cut off": (cut_off, r"safetensors is cut off: tensor .* ends at byte \d+, the file at \d+"),
    "pointer file": (no_header, "is no safetensors file: its header is not valid"),
    "empty file": (
        lambda f: (f / "vae" / WEIGHTS).write_bytes(b""),
        "is no safetensors file: its header is not valid",
    ),
    "pickles": (
        lambda f: (f / "vae" / WEIGHTS).rename(f / "vae" / "diffusion_pytorch_model.bin"),
        "vae has neither diffusion_pytorch_model.safetensors nor .*; other formats",
    ),
    "missing shard": (
        bad_index({"a": "one.safetensors"}),
        "one.safetensors is missing, but .* names",
    ),
    "no weight map": (bad_index(None), "has no weight_map with the names of the shards"),
    "two sets": (
        lambda f: (f / "vae" / f"{WEIGHTS}.index.json").write_text("{}"),
        "vae has .* and .*, but there may be only one",
    ),
    "no tokenizer": (
        lambda f: shutil.rmtree(f / "tokenizer"),
        "tokenizer has neither vocab.json with merges.txt nor tokenizer.json",
    ),
    "broken tokenizer": (
        lambda f: (f / "tokenizer" / "vocab.json").write_text("{"),
        "tokenizer holds no readable Qwen2 tokenizer: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(small: Path, copy_of: Callable[[Path], Path], name: str) -> None:
    damage, sentence = REFUSED[name]
    folder = copy_of(small)
    damage(folder)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder with a diffusers checkpoint"):
        Checkpoint(tmp_path / "nothing")


def test_values_and_pieces(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 in shards, read in pieces smaller than a tensor, is what safetensors reads."""
    opened = Checkpoint(checkpoint)
    assert len(opened.weight_files["transformer"]) == 4
    monkeypatch.setattr(stored, "CHUNK", 1000)
    names = ("img_in.weight", "transformer_blocks.11.img_mlp.net.2.weight", "norm_out.linear.bias")
    for name in names:
        tensor = opened.tensors["transformer"][name]
        assert tensor.dtype == "BF16"
        with safe_open(tensor.file, "pt") as file:
            expected = file.get_tensor(name).float().numpy()
        pieces = list(tensor.chunks())
        assert max(piece.size for piece in pieces) <= 1000
        np.testing.assert_array_equal(np.concatenate(pieces), expected.ravel())
        np.testing.assert_array_equal(tensor.read(), expected)


def test_half_precision(small: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(small)
    (file,) = (folder / "transformer").glob("*.safetensors")
    tensors = {name: tensor.half() for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    tensor = Checkpoint(folder).tensors["transformer"]["proj_out.weight"]
    np.testing.assert_array_equal(tensor.read(), tensors["proj_out.weight"].float().numpy())


@pytest.mark.parametrize("style", ["old", "new", "tied"])
def test_text_encoder_names(small: Path, copy_of: Callable[[Path], Path], style: str) -> None:
    """Names of before and after transformers nested the language model; with and without a head."""
    folder = copy_of(small)
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    tensors = load_file(file)
    assert "model.layers.0.input_layernorm.weight" in tensors
    expected = tensors["model.layers.0.input_layernorm.weight"].numpy()
    if style == "new":
        tensors = {
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name.replace("visual.", "model.visual.", 1): tensor
            for name, tensor in tensors.items()
        }
    if style == "tied":
        del tensors["lm_head.weight"]
        edit(TEXT, tie_word_embeddings=True)(folder)
    save_file(tensors, file)
    opened = Checkpoint(folder).tensors["text_encoder"]
    np.testing.assert_array_equal(opened["layers.0.input_layernorm.weight"].read(), expected)
    assert "embed_tokens.weight" in opened
    assert not any(name.startswith(("visual", "lm_head")) for name in opened)


def test_flat_text_config(small: Path, copy_of: Callable[[Path], Path]) -> None:
    """Configs of transformers before 4.52 have the language model's fields at the top."""
    folder = copy_of(small)
    config = json.loads((folder / TEXT).read_text())
    rope = config["text_config"].pop("rope_parameters")
    flat = {
        **config.pop("text_config"),
        **config,
        "model_type": "qwen2_5_vl",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (folder / TEXT).write_text(json.dumps(flat))
    opened = Checkpoint(folder).text_config
    assert opened.hidden_size == 64
    assert opened.rope_parameters["rope_theta"] == 1e6
    assert opened.rope_parameters["mrope_section"] == rope["mrope_section"]


@pytest.mark.parametrize("sections", ["x", [], ["a"], [4.0, 4.0], [-4, 12], [8, 8, 8], None])
def test_odd_sections_are_refused(
    small: Path, copy_of: Callable[[Path], Path], sections: Any
) -> None:
    folder = copy_of(small)
    config = json.loads((folder / TEXT).read_text())["text_config"]
    config["rope_parameters"]["mrope_section"] = sections
    edit(TEXT, text_config=config)(folder)
    with pytest.raises(CheckpointError, match=r"mrope_section of the text encoder is .*whole numb"):
        Checkpoint(folder)


def test_sliding_windows_are_refused(small: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(small)
    config = json.loads((folder / TEXT).read_text())["text_config"]
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config.pop("layer_types", None)
    edit(TEXT, text_config=config)(folder)
    with pytest.raises(CheckpointError, match="the text encoder uses sliding windows"):
        Checkpoint(folder)


def test_a_variant_is_taken_where_there_is_nothing_else(
    small: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(small)
    variant = folder / "vae" / "diffusion_pytorch_model.fp16.safetensors"
    (folder / "vae" / WEIGHTS).rename(variant)
    assert Checkpoint(folder).weight_files["vae"] == [variant]
    shutil.copy(variant, folder / "vae" / WEIGHTS)
    assert Checkpoint(folder).weight_files["vae"] == [folder / "vae" / WEIGHTS]
    (folder / "vae" / WEIGHTS).rename(folder / "vae" / "diffusion_pytorch_model.bf16.safetensors")
    with pytest.raises(CheckpointError, match=r"bf16.safetensors and .*fp16.safetensors, but"):
        Checkpoint(folder)


def test_default_size_is_the_pipelines_where_the_checkpoint_names_none(
    small: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(small)
    edit("model_index.json", _default_sample_size=None)(folder)
    description = Checkpoint(folder).describe()
    assert (description["default_height"], description["default_width"]) == (1024, 1024)


def test_fingerprints(small: Path, copy_of: Callable[[Path], Path]) -> None:
    """They follow the content and nothing else."""
    first = Checkpoint(small).describe()
    folder = copy_of(small)
    for file in folder.rglob("*.*"):
        os.utime(file, (0, 0))
    edit(DIT, _name_or_path="/elsewhere", _diffusers_version="0.99")(folder)
    second = Checkpoint(folder).describe()
    assert second["components"] == first["components"]
    assert second["fingerprint"] == first["fingerprint"]

    def changed(damage: Damage) -> set[str]:
        """The components whose fingerprint is another after one more damage."""
        before = Checkpoint(folder).describe()
        damage(folder)
        after = Checkpoint(folder).describe()
        assert after["fingerprint"] != before["fingerprint"]
        found = after["components"].items() - before["components"].items()
        return {component for component, _ in found}

    def flip_one_bit(folder: Path) -> None:
        file = folder / "transformer" / WEIGHTS
        content = bytearray(file.read_bytes())
        content[-1000] ^= 1
        file.write_bytes(content)

    assert changed(flip_one_bit) == {"transformer"}
    assert changed(edit("scheduler/scheduler_config.json", shift_terminal=0.03)) == {"scheduler"}
    assert changed(edit("vae/config.json", latents_mean=[0.0] * 16)) == {"vae"}
    assert changed(edit("tokenizer/tokenizer_config.json", errors="strict")) == {"tokenizer"}
