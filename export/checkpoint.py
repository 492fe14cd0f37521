"""A Qwen-Image checkpoint directory in diffusers layout: checked and described.

Opening one reads the configs and the headers of the safetensors files, no weights, and raises
`CheckpointError` (one sentence) for anything the export cannot handle.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLTextModel, Qwen2Tokenizer

from export.files import write_whole
from export.quiet import quiet
from export.stored import (
    DTYPES,
    CheckpointError,
    StoredTensor,
    first_line,
    read_header,
    read_json,
    weight_files,
)

__all__ = ["Checkpoint", "CheckpointError"]

PIPELINES = ("QwenImagePipeline",)
# The classes of each component that model_index.json may name.
COMPONENTS = {
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    "transformer": ("QwenImageTransformer2DModel",),
    "vae": ("AutoencoderKLQwenImage",),
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
}
CONFIG_FILES = {
    "text_encoder": "config.json",
    "transformer": "config.json",
    "vae": "config.json",
    "scheduler": "scheduler_config.json",
}
WEIGHTS_STEMS = {
    "text_encoder": "model",
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
# Config fields with which related models compute something else than what is exported.
REQUIRED_VALUES: dict[str, dict[str, Any]] = {
    "transformer": {
        "guidance_embeds": False,
        "zero_cond_t": False,
        "use_additional_t_cond": False,
        "use_layer3d_rope": False,
        "patch_size": 2,
    },
    "vae": {"attn_scales": [], "input_channels": 3},
    "scheduler": {"stochastic_sampling": False, "invert_sigmas": False},
}
# A default size beyond this many latent pixels (4096 pixels) is a mistake.
MAX_SAMPLE_SIZE = 512
_LARGEST = torch.finfo(torch.float32).max
# Config fields that tell where, or with what, a config was written.
PROVENANCE = ("_name_or_path", "_diffusers_version", "transformers_version")


class Checkpoint:
    """An opened checkpoint directory. Raises CheckpointError.

    configs         component → its config file
    pipeline        an empty instance of the pipeline class, which holds what no file does: the
                    prompt template, how many of its tokens are dropped, the default size
    language_model, transformer, vae    the stock modules, without memory for their weights
    tensors         component → name in its module → StoredTensor
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder with a diffusers checkpoint")
        self.index = read_json(self.path / "model_index.json")
        self._check_index()
        self.configs = {
            component: read_json(self.path / component / file)
            for component, file in CONFIG_FILES.items()
        }
        self._check_required_values()
        with quiet(), torch.device("meta"):
            pipeline = getattr(diffusers, self.index["_class_name"])
            self.pipeline = pipeline(*[None] * len(COMPONENTS))
            self.transformer = self._build("transformer", QwenImageTransformer2DModel.from_config)
            self.vae = self._build("vae", AutoencoderKLQwenImage.from_config)
            self.language_model = self._build("text_encoder", language_model)
        self.text_config = self.language_model.config
        self.weight_files = {
            component: weight_files(self.path / component, stem)
            for component, stem in WEIGHTS_STEMS.items()
        }
        self.tensors = {
            "text_encoder": self._open_tensors("text_encoder", self.language_model),
            "transformer": self._open_tensors("transformer", self.transformer),
            "vae": self._open_tensors("vae", self.vae),
        }
        self.tokenizer = self._open_tokenizer()
        for problem in self._problems():
            raise CheckpointError(f"{self.path}: {problem}")

    # ---------------------------------------------------------------------- opening

    def _check_index(self) -> None:
        file = self.path / "model_index.json"
        name = self.index.get("_class_name")
        if name not in PIPELINES:
            raise CheckpointError(
                f"{file} names the pipeline class {name}, but only {', '.join(PIPELINES)} can be "
                "exported"
            )
        for component, classes in COMPONENTS.items():
            entry = self.index.get(component)
            found = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
            if found not in classes:
                raise CheckpointError(
                    f"{file} names {found} as the {component}, but it must be {classes[0]}"
                )

    def _check_required_values(self) -> None:
        for component, values in REQUIRED_VALUES.items():
            for field, needed in values.items():
                found = self.configs[component].get(field, needed)
                if found != needed:
                    file = self.path / component / CONFIG_FILES[component]
                    raise CheckpointError(
                        f"{file} has {field} = {found!r}, but only models with {field} = "
                        f"{needed!r} can be exported"
                    )

    def _build(self, component: str, build: Any) -> Any:
        try:
            return build(dict(self.configs[component])).eval()
        except Exception as error:  # whatever a strange config provokes inside the class
            raise CheckpointError(
                f"{self.path / component / 'config.json'} does not make a "
                f"{COMPONENTS[component][0]}: {first_line(error)}"
            ) from error

    def _open_tensors(self, component: str, module: Any) -> dict[str, StoredTensor]:
        folder, stored = self.path / component, dict[str, StoredTensor]()
        for file in self.weight_files[component]:
            for name, tensor in read_header(file).items():
                if name in stored:
                    raise CheckpointError(
                        f"tensor {name} is in both {stored[name].file} and {file}, but it must be "
                        "in one"
                    )
                stored[name] = tensor
        if component == "text_encoder":
            stored = language_model_tensors(stored)
        expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        for name, shape in expected.items():
            if name not in stored:
                raise CheckpointError(
                    f"{folder} has no tensor {name}, but its config.json asks for one of shape "
                    f"{list(shape)}"
                )
            tensor = stored[name]
            if tensor.shape != shape:
                raise CheckpointError(
                    f"tensor {name} in {tensor.file} has the shape {list(tensor.shape)}, but "
                    f"config.json asks for {list(shape)}"
                )
            if tensor.dtype not in DTYPES:
                raise CheckpointError(
                    f"tensor {name} in {tensor.file} is {tensor.dtype}, but only "
                    f"{', '.join(DTYPES)} can be exported"
                )
        for name, tensor in stored.items():
            if name not in expected:
                raise CheckpointError(
                    f"{tensor.file} has a tensor {name}, but the {COMPONENTS[component][0]} of "
                    "this config.json has none of that name"
                )
        return stored

    def _open_tokenizer(self) -> Any:
        folder = self.path / "tokenizer"
        if not (folder / "vocab.json").is_file() and not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder} has neither vocab.json with merges.txt nor tokenizer.json"
            )
        try:
            with quiet():
                return Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # OSError, ValueError and the tokenizers library's own
            raise CheckpointError(
                f"{folder} holds no readable Qwen2 tokenizer: {first_line(error)}"
            ) from error

    def _problems(self) -> Iterator[str]:
        """What two fields or two files must agree on, and no class checks."""
        transformer, vae, text = self.transformer.config, self.vae.config, self.text_config
        axes, head = list(transformer.axes_dims_rope), transformer.attention_head_dim
        if (
            len(axes) != 3
            or not _are_numbers(axes, int)
            or any(axis < 0 or axis % 2 for axis in axes)
            or sum(axes) != head
        ):
            yield (
                f"axes_dims_rope of the transformer is {axes}, but it must be three even numbers "
                f"whose sum is attention_head_dim ({head})"
            )
        if transformer.joint_attention_dim != text.hidden_size:
            yield (
                f"joint_attention_dim of the transformer is {transformer.joint_attention_dim}, but "
                f"it must be hidden_size of the text encoder ({text.hidden_size})"
            )
        if transformer.in_channels != 4 * vae.z_dim:
            yield (
                f"in_channels of the transformer is {transformer.in_channels}, but it must be 4 "
                f"times z_dim of the VAE ({vae.z_dim})"
            )
        if transformer.in_channels != 4 * self.transformer.out_channels:
            yield (
                f"out_channels of the transformer is {self.transformer.out_channels}, but it must "
                f"be a quarter of in_channels ({transformer.in_channels})"
            )
        for field in ("latents_mean", "latents_std"):
            if not _are_numbers(vae[field]):
                yield f"{field} of the VAE is {vae[field]!r}, but it must list finite numbers"
        if min(vae.latents_std, default=1) <= 0:
            yield f"latents_std of the VAE is {vae.latents_std}, but all of it must be above 0"
        if not len(vae.latents_mean) == len(vae.latents_std) == vae.z_dim:
            yield (
                f"latents_mean and latents_std of the VAE have {len(vae.latents_mean)} and "
                f"{len(vae.latents_std)} numbers, but z_dim is {vae.z_dim}"
            )
        if len(vae.temperal_downsample) != len(vae.dim_mult) - 1:
            yield (
                f"temperal_downsample of the VAE has {len(vae.temperal_downsample)} entries, but "
                f"it must have one less than dim_mult ({len(vae.dim_mult)})"
            )
        if "sliding_attention" in text.layer_types:
            yield "the text encoder uses sliding windows, but only full attention can be exported"
        if text.rope_parameters["rope_type"] != "default":
            yield (
                f"the rope type of the text encoder is {text.rope_parameters['rope_type']}, but it "
                "must be default or mrope"
            )
        sections = text.rope_parameters.get("mrope_section", [16, 24, 24])
        head = text.hidden_size // text.num_attention_heads
        if (
            not _are_numbers(sections, int)
            or min(sections, default=0) < 0
            or 2 * sum(sections) != head
        ):
            yield (
                f"mrope_section of the text encoder is {sections!r}, but it must be whole numbers "
                f"whose sum is half the head size ({head})"
            )
        if len(self.tokenizer) > text.vocab_size:
            yield (
                f"the tokenizer has {len(self.tokenizer)} tokens, but vocab_size of the text "
                f"encoder is {text.vocab_size}"
            )
        if self.tokenizer.pad_token_id is None:
            yield "the tokenizer has no pad token, but batches of prompts need one"
        try:
            with quiet():
                sound = _gives_schedules(self.configs["scheduler"], transformer.patch_size)
        except Exception as error:  # whatever diffusers' arithmetic makes of a wrong value
            yield f"scheduler_config.json gives no schedule: {first_line(error)}"
        else:
            if not sound:
                yield "scheduler_config.json gives a schedule with NaN or infinite sigmas"
        sample = self.index.get("_default_sample_size", 2)
        if not isinstance(sample, int) or not 2 <= sample <= MAX_SAMPLE_SIZE or sample % 2:
            yield (
                f"_default_sample_size in model_index.json is {sample!r}, but it must be a "
                f"positive even number of latent pixels, at most {MAX_SAMPLE_SIZE}"
            )

    # ---------------------------------------------------------------------- what serving needs

    @property
    def dropped_tokens(self) -> int:
        """How many of the template's tokens the pipeline drops from the encoder's output."""
        return int(self.pipeline.prompt_template_encode_start_idx)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 (hex) of each component's content; its path and its files' times do not count."""
        result = {}
        for component in COMPONENTS:
            digest = hashlib.sha256()
            if component in self.configs:
                config = without_provenance(self.configs[component])
                digest.update(json.dumps(config, sort_keys=True).encode())
                files = self.weight_files.get(component, [])
            else:
                folder = self.path / component
                files = sorted(
                    file for file in folder.iterdir() if file.suffix in (".json", ".txt")
                )
            for file in files:
                digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
                with file.open("rb") as stream:
                    while block := stream.read(2**22):
                        digest.update(block)
            result[component] = digest.hexdigest()
        return result

    def describe(self) -> dict[str, Any]:
        """checkpoint.json: all that serving has to know about the checkpoint."""
        transformer, vae, pipeline = self.transformer.config, self.vae.config, self.pipeline
        name, template = self.index["_class_name"], pipeline.prompt_template_encode
        factor = 2 ** len(vae.temperal_downsample)
        # Keys with an underscore are no components, so diffusers passes over this one.
        sample_size = self.index.get("_default_sample_size", pipeline.default_sample_size)
        whole = json.dumps([name, template, self.fingerprints], sort_keys=True)
        return {
            "format": 1,
            "name": Path(os.path.abspath(self.path)).name,  # noqa: PTH100 (keeps a link's name)
            "pipeline_class": name,
            "fingerprint": hashlib.sha256(whole.encode()).hexdigest(),
            "components": self.fingerprints,
            "prompt_template": template,
            "prompt_template_dropped_tokens": self.dropped_tokens,
            "max_prompt_tokens": pipeline.tokenizer_max_length,
            "pad_token_id": self.tokenizer.pad_token_id,
            "default_height": sample_size * factor,
            "default_width": sample_size * factor,
            "size_multiple": factor * transformer.patch_size,
            "text_encoder": {
                "hidden_size": self.text_config.hidden_size,
                "num_hidden_layers": self.text_config.num_hidden_layers,
                "vocab_size": self.text_config.vocab_size,
            },
            "transformer": {
                "num_layers": transformer.num_layers,
                "num_attention_heads": transformer.num_attention_heads,
                "attention_head_dim": transformer.attention_head_dim,
                "joint_attention_dim": transformer.joint_attention_dim,
                "in_channels": transformer.in_channels,
                "out_channels": self.transformer.out_channels,
                "patch_size": transformer.patch_size,
                "axes_dims_rope": list(transformer.axes_dims_rope),
            },
            "vae": {
                "z_dim": vae.z_dim,
                "scale_factor": factor,
                "latents_mean": list(vae.latents_mean),
                "latents_std": list(vae.latents_std),
            },
            "scheduler": without_provenance(self.configs["scheduler"]),
        }

    def save_tokenizer(self, file: Path) -> None:
        """Writes the tokenizer in the `tokenizers` library's format, without cutting or padding."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        write_whole(file, backend.to_str(pretty=True).encode())


# -------------------------------------------------------------------------- files


def _gives_schedules(config: dict[str, Any], patch_size: int) -> bool:
    """Whether the sigmas of the smallest and the largest picture are finite."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    config = scheduler.config
    finite = True
    for tokens in (1, (MAX_SAMPLE_SIZE // patch_size) ** 2):
        mu = calculate_shift(
            tokens,
            config["base_image_seq_len"],
            config["max_image_seq_len"],
            config["base_shift"],
            config["max_shift"],
        )
        scheduler.set_timesteps(sigmas=[1.0, 0.5], mu=mu)
        finite &= math.isfinite(mu) and bool(scheduler.sigmas.isfinite().all())
    return finite


def _are_numbers(values: Any, *types: type) -> bool:
    """Whether this lists finite numbers, of one of `types` if any are named."""
    return isinstance(values, list | tuple) and all(
        type(value) in (types or (int, float)) and abs(value) <= _LARGEST for value in values
    )


def without_provenance(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in PROVENANCE}


def language_model(config: dict[str, Any]) -> Any:
    """The language model of a Qwen2.5-VL config, nested or (as older files have it) flat."""
    text_config = Qwen2_5_VLConfig.from_dict(config).text_config
    text_config._attn_implementation = "sdpa"
    return Qwen2_5_VLTextModel(text_config)


def language_model_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The language model's tensors, without their prefix.

    Published files have `model.layers…`, `visual…`, newer ones `model.language_model.layers…`,
    `model.visual…`. The vision tower and the head are left out: no prompt's hidden state passes
    them.
    """
    result = {}
    for name, tensor in stored.items():
        if not name.startswith(("visual.", "model.visual.", "lm_head.")):
            result[name.removeprefix("model.").removeprefix("language_model.")] = tensor
    return result
