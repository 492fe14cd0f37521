"""The small checkpoint is a real one in miniature, and a wrong pipeline shows in its pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from safetensors.torch import load_file

from tests import make_checkpoint
from tests.make_checkpoint import cached_checkpoint
from training import layout

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "other": {
        "blocks": 3,
        "heads": 2,
        "head_size": 48,
        "rope_axes": (16, 16, 16),
        "text_width": 64,
        "vae_width": 12,
    },
}
# (prompt, the same with another word, seed, height, width)
REQUESTS = [
    ("a red cat on the street", "a blue cat on the street", 0, 64, 64),
    ("一只猫在红色的天空", "一只狗在红色的天空", 1, 64, 96),
    ("", " ", 2, 96, 64),
]


def load(folder: Path) -> Any:
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads wait for each other: ten times slower when busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=CONFIGS)
def pipeline(request: pytest.FixtureRequest) -> Any:
    return load(cached_checkpoint(**CONFIGS[request.param]))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return layout.load_tokenizer(cached_checkpoint() / "tokenizer")


def paint(
    pipeline: Any,
    prompt: str = REQUESTS[0][0],
    seed: int = 0,
    height: int = 64,
    width: int = 64,
    negative_prompt: str = " ",
    guidance: float = 4.0,
    steps: int = 4,
    noise: float = 0.0,
    step_noise: float = 0.0,
    **embeds: torch.Tensor,
) -> np.ndarray:
    """A picture, INT16 [height, width, 3] in 0 … 255.

    `noise` is added to the initial latents; `step_noise`, relative to them, after every step.
    """
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, height * width // 256, 64, generator=generator)
    latents += noise * torch.randn(latents.shape, generator=generator)

    def disturb(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        old = tensors["latents"]
        return {"latents": old * (1 + step_noise * torch.randn(old.shape, generator=generator))}

    prompts = {} if embeds else {"prompt": prompt, "negative_prompt": negative_prompt}
    with torch.no_grad():
        image = pipeline(
            **prompts,
            **embeds,
            height=height,
            width=width,
            latents=latents,
            true_cfg_scale=guidance,
            num_inference_steps=steps,
            max_sequence_length=1024,
            callback_on_step_end=disturb if step_noise else None,
            output_type="pil",
        ).images[0]
    return np.asarray(image).astype(np.int16)


def assert_moved(picture: np.ndarray, other: np.ndarray, what: str) -> None:
    difference = np.abs(picture - other)
    assert difference.max() >= 20 and difference.mean() >= 1, what


# ------------------------------------------------------------------------------ sensitivities


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("steps", [2, 4, 20])
def test_every_input_shows_and_noise_does_not(pipeline: Any, steps: int, guidance: float) -> None:
    for prompt, other_prompt, seed, height, width in REQUESTS:

        def again(
            prompt: str = prompt,
            seed: int = seed,
            height: int = height,
            width: int = width,
            **changes: Any,
        ) -> np.ndarray:
            changes = {"steps": steps, "guidance": guidance, **changes}
            return paint(pipeline, prompt, seed, height, width, **changes)

        picture = again()
        assert ((picture == 0) | (picture == 255)).mean() < 0.2, "saturated"
        assert picture.std() > 30, "flat"
        assert np.abs(again(noise=1e-5) - picture).max() <= 1, "chaotic"
        assert np.abs(again(step_noise=1e-6) - picture).max() <= 1, "chaotic"

        assert_moved(again(prompt=other_prompt), picture, "one word of the prompt")
        assert_moved(again(steps=steps + 1), picture, "steps")
        if guidance > 1:
            assert_moved(again(negative_prompt="ugly"), picture, "negative prompt")
            assert_moved(again(negative_prompt=""), picture, "negative prompt left out")
            assert_moved(again(guidance=3.0), picture, "guidance")
            assert_moved(again(guidance=1.0), picture, "guidance dropped")


@pytest.mark.parametrize("steps", [4, 20])
def test_wrong_positions_show(pipeline: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = paint(pipeline, steps=steps)
    forward = QwenEmbedRope.forward

    def shifted(self: Any, shapes: Any, device: Any, max_txt_seq_len: int) -> tuple[Any, Any]:
        image, text = forward(self, shapes, device, max_txt_seq_len + 1)
        return image, text[1:]

    monkeypatch.setattr(QwenEmbedRope, "forward", shifted)
    assert_moved(paint(pipeline, steps=steps), picture, "text positions shifted by one")


@pytest.mark.parametrize("steps", [4, 20])
def test_a_missing_rescale_shows(
    pipeline: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = paint(pipeline, steps=steps)
    norm: Callable[..., torch.Tensor] = torch.norm

    def no_norm(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The guidance names its arguments, the VAE's norms (through Tensor.norm) do not.
        return norm(tensor, *args, **kwargs) if args else torch.ones_like(tensor[..., :1])

    monkeypatch.setattr(torch, "norm", no_norm)
    assert_moved(paint(pipeline, steps=steps), picture, "guidance without its rescale")


@pytest.mark.parametrize("steps", [4, 20])
def test_an_ignored_mask_shows(pipeline: Any, steps: int) -> None:
    def padded(valid: int) -> dict[str, torch.Tensor]:
        """Both prompts with eight tokens of junk behind, for which the mask says `valid`."""
        embeds = {}
        for name, prompt in (("prompt", REQUESTS[0][0]), ("negative_prompt", " ")):
            real, _ = pipeline.encode_prompt(prompt)
            generator = torch.Generator().manual_seed(7)
            junk = torch.randn(1, 8, real.shape[2], generator=generator)
            mask = torch.ones(1, real.shape[1] + 8, dtype=torch.long)
            mask[:, real.shape[1] :] = valid
            embeds[f"{name}_embeds"] = torch.cat([real, junk], dim=1)
            embeds[f"{name}_embeds_mask"] = mask
        return embeds

    picture = paint(pipeline, steps=steps)
    assert np.abs(paint(pipeline, steps=steps, **padded(0)) - picture).max() <= 1
    assert_moved(paint(pipeline, steps=steps, **padded(1)), picture, "mask ignored")


# ---------------------------------------------------------------------------------- tokenizer


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("", 0),
        (" ", 1),
        ("a red cat", 3),
        (" cat", 1),
        ("1 cat", 2),
        ("2026", 4),
        ("一只猫", 2),
        ("🙂", 4),
        ("{}<|im_start|>{x}", 6),
        ("\x00\x7fé\U0010ffff", None),
    ],
)
def test_the_template_is_34_tokens_before_any_prompt(
    tokenizer: Any, prompt: str, count: int | None
) -> None:
    prefix = tokenizer(layout.TEMPLATE_PREFIX).input_ids
    suffix = tokenizer("<|im_end|>\n<|im_start|>assistant\n").input_ids
    text = layout.TEMPLATE_PREFIX + prompt + "<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert len(prefix) == 34 and len(suffix) == 5
    assert ids[:34] == prefix and ids[-5:] == suffix
    assert tokenizer.decode(ids) == text
    if count is not None:
        assert len(ids) == 34 + count + 5


def test_the_template_is_the_pipelines(pipeline: Any) -> None:
    assert pipeline.prompt_template_encode_start_idx == layout.DROPPED_TOKENS
    assert pipeline.prompt_template_encode == (
        layout.TEMPLATE_PREFIX + "{}<|im_end|>\n<|im_start|>assistant\n"
    )


# ------------------------------------------------------------------------------------- layout


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_layout_is_that_of_the_published_checkpoints(pipeline: Any) -> None:
    assert type(pipeline).__name__ == "QwenImagePipeline"
    assert type(pipeline.transformer).__name__ == "QwenImageTransformer2DModel"
    assert type(pipeline.text_encoder).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(pipeline.vae).__name__ == "AutoencoderKLQwenImage"
    assert "Qwen2Tokenizer" in type(pipeline.tokenizer).__name__
    assert pipeline.default_sample_size == 128, "_default_sample_size is not ignored"
    expected = {
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 8192,
        "max_shift": 0.9,
        "num_train_timesteps": 1000,
        "shift": 1.0,
        "shift_terminal": 0.02,
        "time_shift_type": "exponential",
        "use_dynamic_shifting": True,
    }
    assert {key: pipeline.scheduler.config[key] for key in expected} == expected

    files = digests(Path(pipeline.config["_name_or_path"]))
    assert set(files) == {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/generation_config.json",
        "text_encoder/model.safetensors",
        "tokenizer/added_tokens.json",
        "tokenizer/merges.txt",
        "tokenizer/special_tokens_map.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/vocab.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    }


def test_every_weight_is_in_the_files(pipeline: Any, tmp_path: Path) -> None:
    folder = Path(pipeline.config["_name_or_path"])
    for component, file in (
        ("text_encoder", "model.safetensors"),
        ("transformer", "diffusion_pytorch_model.safetensors"),
        ("vae", "diffusion_pytorch_model.safetensors"),
    ):
        getattr(pipeline, component).save_pretrained(tmp_path / component)
        saved = load_file(tmp_path / component / file)
        ours = load_file(folder / component / file)
        assert saved.keys() == ours.keys()
        assert all(torch.equal(saved[name], ours[name]) for name in ours)


TINY: dict[str, Any] = {"blocks": 1, "heads": 2, "head_size": 16, "rope_axes": (4, 6, 6)}


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    first = digests(make_checkpoint.make_checkpoint(tmp_path / "1", **TINY))
    assert digests(make_checkpoint.make_checkpoint(tmp_path / "2", **TINY)) == first
    other = digests(make_checkpoint.make_checkpoint(tmp_path / "3", seed=1, **TINY))
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {name for name in first if name.endswith(".safetensors")}


def test_shards_hold_the_same_weights_in_bfloat16_too(tmp_path: Path) -> None:
    whole = make_checkpoint.make_checkpoint(tmp_path / "whole", **TINY)
    options = {"dtype": "bfloat16", "max_shard_size": 100_000, "default_sample_size": 8}
    sharded = make_checkpoint.make_checkpoint(tmp_path / "sharded", **TINY, **options)

    index_file = sharded / "transformer/diffusion_pytorch_model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shards = [load_file(path) for path in sorted(sharded.glob("transformer/*.safetensors"))]
    assert len(shards) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for s in shards for t in s.values())
    expected = load_file(whole / "transformer/diffusion_pytorch_model.safetensors")
    assert index["weight_map"].keys() == expected.keys()
    assert json.loads((sharded / "model_index.json").read_text())["_default_sample_size"] == 8

    pipeline = load(sharded)
    pipeline.to(torch.bfloat16)
    for name, tensor in pipeline.transformer.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16())
    assert paint(pipeline).std() > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_axes": (8, 8, 8)}, "rope_axes add up to 24"),
        ({"rope_axes": (9, 11, 12)}, "even"),
        ({"text_kv_heads": 3}, "multiple of text_kv_heads"),
        ({"text_width": 100, "text_heads": 8}, "text_width is 100"),
        ({"vae_width": 7}, "even"),
        ({"default_sample_size": 9}, "even"),
        ({"dtype": "float64"}, "float32 or bfloat16"),
        ({"blocks": 0}, "at least 1"),
    ],
)
def test_an_impossible_config_is_one_sentence(
    options: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "out")]
    for name, value in options.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        arguments += ["--" + name.replace("_", "-"), text]
    assert make_checkpoint.main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        make_checkpoint.make_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_cache_is_safe_for_concurrent_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_checkpoint, "CACHE", tmp_path)
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: cached_checkpoint(**TINY), range(3)))
    assert len(set(folders)) == 1
    assert list(tmp_path.iterdir()) == folders[:1], "temporary folders are left behind"
    assert cached_checkpoint(**TINY, seed=1) != folders[0]
