"""Calibration: the range of every activation that a recipe may quantize, over real denoising loops.

The result (see `export.calibration`) is replaced after every prompt; the same call goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import QwenImagePipeline
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from export.calibration import FORMAT, Calibration, read_calibration, save_calibration
from export.checkpoint import Checkpoint
from export.engines import engines
from export.graph import ExportError
from export.progress import Progress, ignore_progress
from export.quiet import quiet
from export.write import plan_weights

TRUE_CFG_SCALE = 4.0
NEGATIVE_PROMPT = " "


# ---------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Prompt:
    text: str
    seed: int
    height: int | None = None
    width: int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a text file, one a line, or a `.jsonl` file, an object a line with `prompt` and
    maybe `height`, `width` and `seed` (its other fields do not count). Empty lines are skipped.

    Raises ExportError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ExportError(f"{path} is no text in UTF-8") from None
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            prompts.append(parse_prompt(f"{path}, line {number}", line, len(prompts)))
        else:
            prompts.append(Prompt(line.strip(), len(prompts)))
    if not prompts:
        raise ExportError(f"{path} holds no prompts")
    return prompts


def parse_prompt(where: str, line: str, seed: int) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ExportError(f"{where} is no JSON") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise ExportError(f"{where} must be an object whose prompt is a text")
    numbers = {name: fields[name] for name in ("seed", "height", "width") if name in fields}
    for name, value in numbers.items():
        lowest = 0 if name == "seed" else 1
        if type(value) is not int or not lowest <= value < 2**63:
            raise ExportError(
                f"{where}: {name} is {value!r}, but it must be a whole number from {lowest}"
            )
    return Prompt(fields["prompt"], **{"seed": seed} | numbers)


def check_prompts(
    prompts: list[Prompt],
    checkpoint: Checkpoint,
    height: int | None = None,
    width: int | None = None,
) -> list[Prompt]:
    """The prompts with a size each: their own, else `height` and `width`, else the checkpoint's.

    Raises ExportError for a size or a length that the pipeline would change silently.
    """
    description = checkpoint.describe()
    multiple, limit = description["size_multiple"], description["max_prompt_tokens"]
    height = height or description["default_height"]
    width = width or description["default_width"]
    result = []
    for number, prompt in enumerate(prompts, 1):
        prompt = replace(prompt, height=prompt.height or height, width=prompt.width or width)
        for name, value in (("height", prompt.height), ("width", prompt.width)):
            if value % multiple:
                raise ExportError(
                    f"{name} {value} of prompt {number} must be a multiple of {multiple}"
                )
        text = description["prompt_template"].format(prompt.text)
        tokens = len(checkpoint.tokenizer(text).input_ids) - checkpoint.dropped_tokens
        if tokens > limit:
            raise ExportError(f"prompt {number} has {tokens} tokens, but at most {limit} are read")
        result.append(prompt)
    return result


# ---------------------------------------------------------------------- recording


@dataclass
class Recorded:
    """Of each channel of an activation: the largest absolute value, and the sum of squares of
    `count` values."""

    largest: Tensor
    squares: Tensor
    count: int


class Recorder:
    """How large the values were that `record` saw of each name's channels, kept where they were
    computed: nothing waits for the device until `take`."""

    def __init__(self) -> None:
        self.found: dict[str, Recorded] = {}

    def record(self, name: str, value: Tensor, axis: int | tuple[int, ...]) -> None:
        """`axis`: where `value` has its channels."""
        kept = [axis] if isinstance(axis, int) else axis
        others = tuple(set(range(value.ndim)) - {i % value.ndim for i in kept})
        # Norms: max(abs) and sums of squares without a copy, and NaN where there is one.
        largest = torch.linalg.vector_norm(value, torch.inf, others).flatten()
        squares = torch.linalg.vector_norm(value, 2, others, dtype=torch.float32).flatten() ** 2
        count = value.numel() // largest.numel()
        if name in self.found:
            known = self.found[name]
            largest = torch.maximum(known.largest, largest)
            squares, count = known.squares + squares, known.count + count
        self.found[name] = Recorded(largest, squares, count)

    def take(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """name → the largest absolute values and the mean squares, FP32 [channels]; begins anew."""
        result = {
            name: (
                found.largest.float().cpu().numpy(),
                (found.squares / found.count).cpu().numpy(),
            )
            for name, found in self.found.items()
        }
        self.found.clear()
        return result


class RecordedAttention(QwenDoubleStreamAttnProcessor2_0):
    """The stock processor of one block; records what it hands to scaled_dot_product_attention."""

    _attention_backend = "native"  # whatever the environment prefers: the one that is watched

    def __init__(self, name: str, recorder: Recorder) -> None:
        super().__init__()
        self.watch = AttentionWatch(name, recorder)

    def __call__(  # diffusers reads the names of the arguments
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        with self.watch:
            return super().__call__(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                image_rotary_emb,
            )


class AttentionWatch(TorchFunctionMode):
    def __init__(self, name: str, recorder: Recorder) -> None:
        super().__init__()
        self.name, self.recorder = name, recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            for part in ("query", "key", "value"):  # [B, heads, tokens, head size]
                self.recorder.record(f"{self.name}.{part}", kwargs[part], (1, 3))
        return function(*args, **kwargs)


def layers(checkpoint: Checkpoint, pipeline: Any) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every matrix product and convolution of the engines that are quantized.

    `modulation` is none of them: it depends on the timestep alone, and runs once a schedule.
    """
    roots = {
        "text_encoder": pipeline.text_encoder.model.language_model,
        "dit": pipeline.transformer,
        "vae_decoder": pipeline.vae,
    }
    for engine in engines(checkpoint):
        if engine.name in roots:
            for weight in plan_weights(engine, checkpoint):
                owner, _, parameter = weight.rpartition(".")
                module = roots[engine.name].get_submodule(owner)
                if parameter == "weight" and isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
                    yield f"{engine.name}/{owner}", module


def attach(recorder: Recorder, checkpoint: Checkpoint, pipeline: Any) -> None:
    """Lets `recorder` see the pipeline's activations."""

    def record(name: str, axis: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        recorder.record(name, inputs[0], axis)

    for name, module in layers(checkpoint, pipeline):
        axis = -1 if isinstance(module, nn.Linear) else 1
        module.register_forward_pre_hook(partial(record, name, axis))
    for i, block in enumerate(pipeline.transformer.transformer_blocks):
        block.attn.set_processor(RecordedAttention(f"dit/transformer_blocks.{i}.attn", recorder))


# ---------------------------------------------------------------------- the run


def calibrate(
    checkpoint: Checkpoint,
    out: Path,
    prompts: Sequence[Prompt],
    steps: int,
    device: str = "cpu",
    offload: bool = False,
    progress: Progress = ignore_progress,
) -> Calibration:
    """Runs the prompts (see `check_prompts`) and writes `out`, or goes on with it.

    FP32 on a CPU, BF16 on CUDA; `offload` keeps only the model that runs on the GPU. Raises
    ExportError, also if `out` was begun with something else; CheckpointError, OSError.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    settings = {
        "format": FORMAT,
        "checkpoint": checkpoint.describe()["fingerprint"],
        "prompts": hashlib.sha256(json.dumps([asdict(p) for p in prompts]).encode()).hexdigest(),
        "steps": steps,
        "true_cfg_scale": TRUE_CFG_SCALE,
        "negative_prompt": NEGATIVE_PROMPT,
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")},
        "done": 0,
        "total": len(prompts),
    }
    calibration = resume(out, settings)
    done = calibration.settings["done"]
    if done == len(prompts):
        return calibration

    progress("load", 0, 1)
    pipeline = load_pipeline(checkpoint, dtype, device, offload)
    progress("load", 1, 1)
    recorder = Recorder()
    attach(recorder, checkpoint, pipeline)
    channels = {name: calibration.channels(name) for name in calibration.names}
    squares = {name: calibration.squares(name) for name in calibration.names}
    total = len(prompts) * steps
    progress("calibrate", done * steps, total)

    def step_done(prompts_done: int, pipeline: Any, step: int, timestep: Any, values: Any) -> Any:
        progress("calibrate", prompts_done * steps + step + 1, total)
        return values

    for i, prompt in enumerate(prompts[done:], done):
        pipeline(
            prompt.text,
            negative_prompt=NEGATIVE_PROMPT,
            true_cfg_scale=TRUE_CFG_SCALE,
            height=prompt.height,
            width=prompt.width,
            num_inference_steps=steps,
            generator=torch.Generator("cpu").manual_seed(prompt.seed),
            output_type="pt",
            max_sequence_length=1024,
            callback_on_step_end=partial(step_done, i),
        )
        for name, (largest, mean) in recorder.take().items():
            if not np.isfinite(largest).all():
                raise ExportError(f"prompt {i + 1}: {name} is not finite in {settings['dtype']}")
            channels[name] = np.maximum(channels.get(name, 0), largest)
            known = squares.get(name, 0)
            squares[name] = (known + (mean - known) / (i + 1)).astype(np.float32)
        calibration = save_calibration(out, settings | {"done": i + 1}, channels, squares)
    return calibration


def resume(out: Path, settings: dict[str, Any]) -> Calibration:
    """What `out` holds, or an empty calibration. Raises ExportError, OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):  # now, not after the first prompt
        raise ExportError(f"{out.parent} is not writable")
    if not out.exists():
        return Calibration(out, settings, {})
    found = read_calibration(out)
    for name, value in settings.items():
        before = found.settings.get(name)
        if name != "done" and before != value:
            if name == "checkpoint":
                what = f"another checkpoint ({str(before)[:12]}…, now {value[:12]}…)"
            elif name == "prompts":
                what = "other prompts, sizes or seeds"
            else:
                what = f"{name} = {before!r}, which is now {value!r}"
            raise ExportError(f"{out} was begun with {what}: remove it to start anew")
    return found


def load_pipeline(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str, offload: bool
) -> QwenImagePipeline:
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    with quiet():
        pipeline = QwenImagePipeline.from_pretrained(checkpoint.path, dtype=dtype)
        if offload:
            pipeline.enable_model_cpu_offload()
        else:
            pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
