"""Makes a small random Qwen-Image checkpoint in diffusers layout.

    python -m tests.make_checkpoint OUT [--blocks 4 --heads 4 --head-size 32 ...]

The classes, file names and configs are those of the published checkpoints; only the sizes and the
weights are not. Every tensor is drawn from its own generator, seeded by the checkpoint's seed and
the tensor's name, and goes to disk shard by shard: a checkpoint of many gigabytes needs the memory
of one shard.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import save_file
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from training import layout
from training.layout import (
    load_tokenizer,
    scheduler,
    split_words,
    text_encoder_config,
    write_json,
    write_tokenizer,
)

CACHE = Path(__file__).resolve().parent.parent / "artifacts" / "checkpoints"

# Words that become one token besides those of the template. Everything else falls into pieces, so
# that token counts vary as they do with the real tokenizer.
WORDS = (
    "assistant\n\n a an in on at with under over near from is are it its to for two three red blue "
    "green yellow white black small big old new cat dog bird house tree city sea sky sun moon "
    "night day street mountain river flower photo painting portrait light dark style high quality "
    "detail man woman child car boat "
    "的 一 一只 猫 狗 在 上 中 下 红色 蓝色 天空 城市 山 水 花 人 ， 。"
)


@dataclass(frozen=True)
class CheckpointConfig:
    """Sizes of a checkpoint. The defaults give 10 MB.

    `rope_axes` are head dimensions (frame, height, width): even, their sum is `head_size`.
    `default_sample_size` is in latent pixels (×8 for pixels). `max_shard_size` is in bytes.
    """

    blocks: int = 4
    heads: int = 4
    head_size: int = 32
    rope_axes: tuple[int, int, int] = (8, 12, 12)
    text_width: int = 96
    text_layers: int = 2
    text_heads: int = 4
    text_kv_heads: int = 2
    vae_width: int = 8
    seed: int = 0
    dtype: str = "float32"
    max_shard_size: int = 256 * 2**20
    default_sample_size: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope_axes", tuple(self.rope_axes))
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "int"}
        for name, value in sizes.items():
            if name != "seed" and value < 1:
                raise ValueError(f"{name} is {value}, but it must be at least 1")
        if len(self.rope_axes) != 3 or any(axis < 2 or axis % 2 for axis in self.rope_axes):
            raise ValueError(f"rope_axes is {self.rope_axes}, but it must be three even numbers")
        if sum(self.rope_axes) != self.head_size:
            raise ValueError(
                f"rope_axes add up to {sum(self.rope_axes)}, but they must add up to head_size "
                f"({self.head_size})"
            )
        if self.text_heads % self.text_kv_heads:
            raise ValueError(
                f"text_heads is {self.text_heads}, but it must be a multiple of text_kv_heads "
                f"({self.text_kv_heads})"
            )
        if self.text_width % (2 * self.text_heads) or self.text_width < 8 * self.text_heads:
            raise ValueError(
                f"text_width is {self.text_width}, but it must be an even multiple of text_heads "
                f"({self.text_heads}) with at least 8 per head"
            )
        for name in ("vae_width", "default_sample_size"):
            if sizes[name] % 2:
                raise ValueError(f"{name} is {sizes[name]}, but it must be even")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}, but it must be float32 or bfloat16")


# ------------------------------------------------------------------------------------- models


def words_to_learn() -> list[str]:
    """`WORDS` as Qwen2 splits text, and the words of other scripts once more without the space."""
    words = split_words(WORDS)
    return words + [word for word in WORDS.split() if not word.isascii()]


def build_models(config: CheckpointConfig, tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    """The pipeline's three models with the real classes, without memory for their weights."""
    with torch.device("meta"):
        return {
            "text_encoder": Qwen2_5_VLForConditionalGeneration(
                text_encoder_config(
                    tokenizer,
                    config.text_width,
                    config.text_layers,
                    config.text_heads,
                    config.text_kv_heads,
                )
            ),
            "transformer": QwenImageTransformer2DModel(
                num_layers=config.blocks,
                attention_head_dim=config.head_size,
                num_attention_heads=config.heads,
                joint_attention_dim=config.text_width,
                axes_dims_rope=config.rope_axes,
            ),
            "vae": AutoencoderKLQwenImage(base_dim=config.vae_width),
        }


# ------------------------------------------------------------------------------------ weights

DRAWN = 2**22 + 1  # numbers at most; odd, so that a matrix's rows are shifted and differ

# With default initialisation a wrong pipeline makes nearly the right picture: gates and modulation
# are close to 0, attention is uniform, the decoder shows its biases. These gains let every input
# show, and stay far from chaos: 1e-5 of noise in the latents moves a picture by less than 0.1
# of 255.
#
# (component, pattern of the tensor's name, mean, gain). A vector is drawn with standard deviation
# `gain`, a matrix with gain/√fan-in. The first match counts.
GAINS: list[tuple[str, str, float, float]] = [
    # The modulation varies by its whole size from one timestep to the next: steps show.
    ("transformer", r"timestep_embedder\.linear_[12]\.weight", 0.0, 2.0),
    # RMS-normed q and k of size 1.8²: attention logits spread by about 3, so that a head picks a
    # few tokens. Positions, padding and single words show.
    ("transformer", r"attn\.norm_(added_)?[qk]\.weight", 1.8, 0.2),
    # An average over tokens is small; this makes up for it.
    ("transformer", r"attn\.to_(add_)?out.*weight", 0.0, 2.5),
    # The predicted velocity is larger than the noise that the loop starts from.
    ("transformer", r"proj_out\.weight", 0.0, 2.0),
    # A changed word reaches the tokens behind it: picky attention, and large residual updates.
    ("text_encoder", r"[qk]_proj\.weight", 0.0, 2.0),
    ("text_encoder", r"(o_proj|down_proj)\.weight", 0.0, 2.0),
    # Contrast of about 50 of 255 (standard deviation) with few saturated pixels.
    ("vae", r"decoder\.conv_out\.weight", 0.0, 1.8),
    ("vae", r"decoder\..*\.bias$", 0.0, 0.1),
    ("", r"(norm[^.]*|ln_q)\.(weight|gamma)$", 1.0, 0.2),
    ("", r"\.bias$", 0.0, 0.2),
    ("", r"", 0.0, 1.0),
]

# Of a block's modulation: (shift, scale, gate). A shift depends on the timestep alone and drowns
# the prompt when it is large. Gates have a mean, or else many steps cancel each other.
MODULATION_GAIN = (0.5, 0.5, 1.0)
GATE_MEAN = 0.7
FINAL_MODULATION_GAIN = 0.5

# Added to image queries and text keys alike, in every second head and in the slower half of each
# RoPE axis (which hardly turns within a picture): those heads look at the text, few tokens though
# it has beside thousands of the image.
TEXT_BIAS = 1.2

# Kernels of the VAE decoder that follow a SiLU.
AFTER_SILU = re.compile(r"decoder\..*(conv1|conv2|conv_out)\.weight$")


def draw(component: str, name: str, shape: torch.Size, config: CheckpointConfig) -> torch.Tensor:
    """One tensor of the checkpoint, FP32; independent of what was drawn before."""
    digest = hashlib.sha256(f"{config.seed}/{component}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    numbers = torch.randn(min(shape.numel(), DRAWN), generator=generator)
    # Larger tensors repeat them: a checkpoint of 40 GB takes minutes, not a quarter of an hour.
    tensor = numbers.repeat(-(-shape.numel() // DRAWN))[: shape.numel()].view(shape)
    mean, gain = next(
        (mean, gain)
        for owner, pattern, mean, gain in GAINS
        if owner in ("", component) and re.search(pattern, name)
    )
    fan_in = tensor[0].numel() if tensor.ndim > 1 else 1
    if name.endswith("embed_tokens.weight"):
        fan_in = 1
    elif component == "vae" and tensor.ndim == 5:
        # A single frame meets the last temporal tap only, the others see padding.
        fan_in //= shape[2]
    tensor.mul_(gain / fan_in**0.5).add_(mean)

    if component == "transformer":
        structure_transformer(name, tensor, config)
    elif AFTER_SILU.search(name):
        # SiLU's output has a positive mean, which through random kernels would give every latent
        # nearly the same features. Kernels that sum to zero over channels take it away; in the
        # last one, over space too, so that colours are spread around grey.
        tensor -= tensor.mean(dim=1, keepdim=True)
        if "conv_out" in name:
            tensor -= tensor.mean(dim=(3, 4), keepdim=True)
    return tensor


def structure_transformer(name: str, tensor: torch.Tensor, config: CheckpointConfig) -> None:
    """Changes a tensor of the transformer in place where its rows differ in meaning."""
    # Many blocks together add as much as three: at full size sixty would be chaotic.
    depth = min(1.0, (3 / config.blocks) ** 0.5)
    if name == "norm_out.linear.weight":
        tensor.mul_(FINAL_MODULATION_GAIN)
    elif name.endswith("_mod.1.weight"):
        for part, gain in zip(tensor.chunk(6), MODULATION_GAIN * 2, strict=True):
            part.mul_(gain)
        for gate in tensor.chunk(6)[2::3]:
            gate.mul_(depth)
    elif name.endswith("_mod.1.bias"):
        for gate in tensor.chunk(6)[2::3]:
            gate.add_(GATE_MEAN).mul_(depth)
    elif name.endswith(("attn.to_q.bias", "attn.add_k_proj.bias")):
        slow = [pair >= axis // 4 for axis in config.rope_axes for pair in range(axis // 2)]
        tensor.view(config.heads, -1)[::2] += TEXT_BIAS * torch.tensor(slow).repeat_interleave(2)


def disk_name(component: str, name: str) -> str:
    """The published text encoders keep the names that transformers used before it nested them."""
    if component == "text_encoder":
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    return name


def plan_shards(sizes: dict[str, int], max_shard_size: int) -> list[list[str]]:
    """The tensors' names in order, in groups of at most `max_shard_size` bytes where possible."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_weights(folder: Path, component: str, model: Any, config: CheckpointConfig) -> None:
    """Writes the model's safetensors, one file or shards with an index, one shard in memory."""
    dtype = getattr(torch, config.dtype)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    shards = plan_shards(sizes, config.max_shard_size)
    stem = "model" if component == "text_encoder" else "diffusion_pytorch_model"
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        part = f"-{i:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = f"{stem}{part}.safetensors"
        shard = {}
        for name in names:
            tensor = draw(component, name, shapes[name], config)
            shard[disk_name(component, name)] = tensor.to(dtype)
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        del shard, tensor  # before the next one is drawn
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / f"{stem}.safetensors.index.json", index)


# ----------------------------------------------------------------------------------- the whole


def make_checkpoint(out: Path, **config: Any) -> Path:
    """Writes a checkpoint to the new or empty folder `out`; `config` as in `CheckpointConfig`.

    Raises ValueError for an impossible config and FileExistsError if `out` holds files.
    """
    settings = CheckpointConfig(**config)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder")
    out.mkdir(parents=True, exist_ok=True)

    write_tokenizer(out / "tokenizer", words_to_learn())
    tokenizer = load_tokenizer(out / "tokenizer")
    models = build_models(settings, tokenizer)
    pipeline = QwenImagePipeline(scheduler=scheduler(), tokenizer=tokenizer, **models)
    pipeline.save_config(out)
    # from_pretrained ignores keys with a leading underscore.
    index = json.loads((out / "model_index.json").read_text())
    write_json(
        out / "model_index.json",
        {**index, "_default_sample_size": settings.default_sample_size},
    )

    pipeline.scheduler.save_config(out / "scheduler")
    pipeline.transformer.save_config(out / "transformer")
    pipeline.vae.save_config(out / "vae")
    text_encoder = pipeline.text_encoder
    text_encoder.config.architectures = [type(text_encoder).__name__]
    text_encoder.config.dtype = settings.dtype
    text_encoder.config.save_pretrained(out / "text_encoder")
    text_encoder.generation_config.save_pretrained(out / "text_encoder")
    for component, model in models.items():
        write_weights(out / component, component, model, settings)
    return out


def cached_checkpoint(**config: Any) -> Path:
    """The checkpoint of this config under artifacts/checkpoints, made if it is not there yet.

    The name holds a hash of the config and of the code. Safe for concurrent callers: each writes
    its own temporary folder, and the first to rename it wins.
    """
    settings = CheckpointConfig(**config)
    key = json.dumps(asdict(settings), sort_keys=True).encode()
    key += Path(__file__).read_bytes() + Path(layout.__file__).read_bytes()
    target = CACHE / hashlib.sha256(key).hexdigest()[:16]
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=CACHE))
    try:
        make_checkpoint(temporary, **config)
        temporary.chmod(0o755)  # mkdtemp makes it private
        try:
            temporary.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def axes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.make_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    for field in fields(CheckpointConfig):
        kind: Any = {"int": int, "str": str}.get(str(field.type), axes)
        flag = "--" + field.name.replace("_", "-")
        default = field.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        parser.add_argument(flag, type=kind, default=default, help=f"default {shown}")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    try:
        make_checkpoint(out, **options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
