"""A Qwen-Image checkpoint directory in diffusers layout, checked and read tensor by tensor.

Opening one reads the configs and the headers of the safetensors files, no weights, and raises
`CheckpointError` (one sentence) for anything the export cannot handle. Weights are read as fp32 in
pieces of at most `CHUNK` elements, so memory depends neither on a shard's size nor on a tensor's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLTextModel

PIPELINES = ("QwenImagePipeline",)
# The class of each component, as model_index.json names it. Tokenizers have had two names.
COMPONENTS = {
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    "transformer": ("QwenImageTransformer2DModel",),
    "vae": ("AutoencoderKLQwenImage",),
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
}
WEIGHTS_STEM = {
    "text_encoder": "model",
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
# Config fields of related models whose computation differs from the exported one.
REQUIRED_VALUES: dict[str, dict[str, Any]] = {
    "transformer": {
        "guidance_embeds": False,
        "zero_cond_t": False,
        "use_additional_t_cond": False,
        "use_layer3d_rope": False,
        "patch_size": 2,
    },
    "vae": {"attn_scales": [], "input_channels": 3},
}
# Fields that name where or by what a config was written.
PROVENANCE = ("_name_or_path", "_diffusers_version", "transformers_version")
CHUNK = 8 * 2**20  # elements
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class CheckpointError(Exception):
    """The checkpoint cannot be exported; the message is one sentence that says why."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` in bytes from the start of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def chunks(self) -> Iterator[np.ndarray]:
        """The elements in order as flat FP32 arrays of at most `CHUNK` elements."""
        left = int(np.prod(self.shape))
        with self.file.open("rb") as file:
            file.seek(self.offset)
            while left:
                count = min(left, CHUNK)
                raw = np.fromfile(file, DTYPES[self.dtype], count)
                if raw.size != count:
                    raise CheckpointError(f"{self.file} became shorter while it was read")
                if self.dtype == "BF16":  # the upper half of an fp32
                    yield (raw.astype(np.uint32) << 16).view(np.float32)
                else:
                    yield raw.astype(np.float32, copy=False)
                left -= count

    def read(self) -> np.ndarray:
        """The whole tensor, FP32."""
        result = np.empty(int(np.prod(self.shape)), np.float32)
        done = 0
        for chunk in self.chunks():
            result[done : done + chunk.size] = chunk
            done += chunk.size
        return result.reshape(self.shape)


class Checkpoint:
    """An opened checkpoint directory.

    Attributes: `configs` (component → parsed config), `tensors` (component → name → StoredTensor;
    the text encoder's names are those of its language model, without a prefix), `text_config` (the
    language model's config object), `pipeline` (an empty instance of the pipeline class, which
    holds the prompt template and the default size).
    Raises CheckpointError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a directory with a diffusers checkpoint")
        self.index = read_json(self.path / "model_index.json")
        self._check_index()
        self.pipeline = getattr(diffusers, self.index["_class_name"])(None, None, None, None, None)
        self.configs = {
            "text_encoder": read_json(self.path / "text_encoder" / "config.json"),
            "transformer": read_json(self.path / "transformer" / "config.json"),
            "vae": read_json(self.path / "vae" / "config.json"),
            "scheduler": read_json(self.path / "scheduler" / "scheduler_config.json"),
        }
        self._check_configs()
        self.weight_files = {name: weight_files(self.path / name, WEIGHTS_STEM[name]) for name in WEIGHTS_STEM}
        self.tensors = {name: self._open_tensors(name) for name in WEIGHTS_STEM}
        self._check_relations()
        self.tokenizer = self._open_tokenizer()

    # ------------------------------------------------------------------ checks

    def _check_index(self) -> None:
        name = self.index.get("_class_name")
        if name not in PIPELINES:
            raise CheckpointError(
                f"model_index.json names the pipeline class {name!r}, but this export knows only "
                f"{', '.join(PIPELINES)}"
            )
        for component, classes in COMPONENTS.items():
            entry = self.index.get(component)
            found = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
            if found not in classes:
                raise CheckpointError(
                    f"model_index.json names {found!r} as {component}, but {classes[0]} is needed"
                )
            if not (self.path / component).is_dir():
                raise CheckpointError(f"{self.path} has no folder {component}")

    def _check_configs(self) -> None:
        for component, values in REQUIRED_VALUES.items():
            for field, needed in values.items():
                found = self.configs[component].get(field, needed)
                if found != needed:
                    raise CheckpointError(
                        f"{component}/config.json has {field}={found!r}, but only {needed!r} is "
                        "supported"
                    )
        self.transformer = self._build("transformer", QwenImageTransformer2DModel.from_config)
        self.vae = self._build("vae", AutoencoderKLQwenImage.from_config)
        self.text_config = Qwen2_5_VLConfig.from_dict(dict(self.configs["text_encoder"])).text_config
        self.language_model = self._build("text_encoder", lambda _: Qwen2_5_VLTextModel(self.text_config))

    def _build(self, component: str, build: Any) -> Any:
        """The stock module of a component on the meta device."""
        try:
            with torch.device("meta"):
                return build(dict(self.configs[component])).eval()
        except Exception as error:
            raise CheckpointError(
                f"{component}/config.json does not make a {COMPONENTS[component][0]}: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error

    def _check_relations(self) -> None:
        """Sizes that two configs, or two fields, must agree on."""

    def _open_tensors(self, component: str) -> dict[str, StoredTensor]:
        stored: dict[str, StoredTensor] = {}
        for file in self.weight_files[component]:
            stored |= read_header(file)
        if component == "text_encoder":
            stored = language_model_tensors(stored)
        module = {
            "text_encoder": self.language_model,
            "transformer": self.transformer,
            "vae": self.vae,
        }[component]
        expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        for name, shape in expected.items():
            if name not in stored:
                raise CheckpointError(f"{component} has no tensor {name}, which its config asks for")
            if stored[name].shape != shape:
                raise CheckpointError(
                    f"tensor {name} of {component} has the shape {stored[name].shape}, but its "
                    f"config asks for {shape}"
                )
        for name in stored:
            if name not in expected:
                raise CheckpointError(
                    f"{component} has a tensor {name}, which {COMPONENTS[component][0]} does not know"
                )
        return stored

    def _open_tokenizer(self) -> Any:
        try:
            return transformers.Qwen2Tokenizer.from_pretrained(self.path / "tokenizer")
        except Exception as error:
            raise CheckpointError(
                f"{self.path / 'tokenizer'} holds no readable Qwen2 tokenizer: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error

    # ------------------------------------------------------------------ what serving needs

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of each component's content (hex), whatever its path and file times."""
        result = {}
        for component in COMPONENTS:
            folder = self.path / component
            digest = hashlib.sha256()
            if component == "tokenizer":
                files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".txt"))
            else:
                files = self.weight_files.get(component, [])
                config = {k: v for k, v in self.configs[component].items() if k not in PROVENANCE}
                digest.update(json.dumps(config, sort_keys=True).encode())
            for file in files:
                digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
                with file.open("rb") as stream:
                    while block := stream.read(4 * 2**20):
                        digest.update(block)
            result[component] = digest.hexdigest()
        return result

    def describe(self) -> dict[str, Any]:
        """checkpoint.json: all that serving must know about the checkpoint."""
        vae_factor = 2 ** len(self.vae.config.temperal_downsample)
        sample_size = self.index.get("_default_sample_size", self.pipeline.default_sample_size)
        transformer = self.transformer.config
        components = self.fingerprints
        template = self.pipeline.prompt_template_encode
        whole = json.dumps([self.index["_class_name"], template, components], sort_keys=True)
        return {
            "format": 1,
            "name": self.path.resolve().name,
            "pipeline_class": self.index["_class_name"],
            "fingerprint": hashlib.sha256(whole.encode()).hexdigest(),
            "components": components,
            "prompt_template": template,
            "prompt_template_dropped_tokens": self.dropped_tokens,
            "max_prompt_tokens": self.pipeline.tokenizer_max_length,
            "pad_token_id": self.tokenizer.pad_token_id,
            "default_height": sample_size * vae_factor,
            "default_width": sample_size * vae_factor,
            "size_multiple": vae_factor * transformer.patch_size,
            "text_encoder": {
                "hidden_size": self.text_config.hidden_size,
                "num_hidden_layers": self.text_config.num_hidden_layers,
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
                "z_dim": self.vae.config.z_dim,
                "scale_factor": vae_factor,
                "latents_mean": list(self.vae.config.latents_mean),
                "latents_std": list(self.vae.config.latents_std),
            },
            "scheduler": {k: v for k, v in self.configs["scheduler"].items() if k not in PROVENANCE},
        }

    @property
    def dropped_tokens(self) -> int:
        """How many of the template's tokens the pipeline drops from the encoder's output."""
        return int(self.pipeline.prompt_template_encode_start_idx)

    def save_tokenizer(self, file: Path) -> None:
        """Writes the tokenizer in the `tokenizers` library's format; nothing truncates or pads."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.save(str(file))


# ---------------------------------------------------------------------- files


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError if the file is missing or holds something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return value


def weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of a component: whole or shards, of the main or the only variant."""
    whole = sorted(folder.glob(f"{stem}.safetensors")) or sorted(folder.glob(f"{stem}.*.safetensors"))
    indices = sorted(folder.glob(f"{stem}.safetensors.index.json")) or sorted(
        folder.glob(f"{stem}.safetensors.index.*.json")
    )
    if indices:
        weight_map = read_json(indices[0]).get("weight_map", {})
        files = sorted({folder / name for name in weight_map.values()})
    else:
        files = whole[:1]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, though {indices[0].name} names it")
    if not files:
        raise CheckpointError(f"{folder} has no {stem}.safetensors and no {stem}.safetensors.index.json")
    return files


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file: 8 bytes of header length, JSON header, data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise CheckpointError(f"{file} is not a safetensors file: its header does not fit in it")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: (e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{file} is not a safetensors file: its header is no valid JSON") from None
    tensors = {}
    for name, (dtype, shape, start, end) in entries.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name} in {file} is {dtype}, but only {', '.join(DTYPES)} can be exported"
            )
        if end - start != int(np.prod(shape)) * DTYPES[dtype].itemsize:
            raise CheckpointError(f"tensor {name} in {file} has a length that is not that of its shape")
        if 8 + length + end > size:
            raise CheckpointError(
                f"{file} is cut off: tensor {name} ends at byte {8 + length + end} of {size}"
            )
        tensors[name] = StoredTensor(file, dtype, shape, 8 + length + start)
    return tensors


def language_model_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The language model's tensors without their prefix.

    Published files say `model.layers…`, `visual…`; transformers ≥ 4.52 writes
    `model.language_model.layers…`, `model.visual…`. The vision tower and the head, which the
    prompt's hidden states do not pass, are left out.
    """
    result = {}
    for name, tensor in stored.items():
        if name.startswith(("visual.", "model.visual.", "lm_head.")):
            continue
        for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model."):
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        result[name] = tensor
    return result
