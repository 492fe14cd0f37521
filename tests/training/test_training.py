"""What is trained is what the pipeline computes, and a training can be stopped at any time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

from export import Checkpoint
from tests.conftest import ROOT
from training import flow, store, vae
from training.export import export
from training.layout import DROPPED_TOKENS, TEMPLATE_PREFIX, TEMPLATE_SUFFIX, scheduler
from training.models import Sizes, build, use_image_convolutions
from training.pool import Pool
from training.progress import Progress, learning_rate
from training.sample import generate
from training.scenes import Scenes, make_scenes, start_worker
from training.settings import Settings

SIZES = Sizes(blocks=2, heads=2, text_width=64, text_layers=1, text_heads=2, vae_width=8)
SETTINGS = Settings(vae_batch=4, dit_batch=8, warmup=4, vae_rate=3e-3, dit_rate=3e-3, ema=0.9)
PROMPTS = ["a red circle on the left, white background", "左边有一个红色的圆", " "]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return store.tokenizer_of([" red", " circle", " left", "a", *"左边有一个红色的圆"])


class FakeRenderer:
    """Chunks made in this process, once for each seed."""

    def __init__(self, tokenizer: Any) -> None:
        start_worker(tokenizer.backend_tokenizer.to_str())
        self.chunks = 0

    def ready(self, wait: bool = False) -> list[Scenes]:
        self.chunks += 1
        template = (TEMPLATE_PREFIX, TEMPLATE_SUFFIX)
        return make_scenes((0, self.chunks), template, DROPPED_TOKENS) if wait else []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """An export of models that no training has touched but for noise where they start at zero."""
    folder = tmp_path_factory.mktemp("state")
    progress = Progress(folder, 1)
    progress.state["words"] = [" red", " circle", " left", "a", *"左边有一个红色的圆"]
    progress.state["sizes"] = SIZES.to_json()
    models = build(SIZES, tokenizer, 0)
    torch.manual_seed(0)
    for parameter in models.transformer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    models.vae.register_to_config(latents_mean=[0.1] * 16, latents_std=[0.7] * 16)
    export(models, progress, folder / "checkpoint")
    return folder / "checkpoint"


@pytest.mark.parametrize("size", [(64, 48), (48, 64)])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_generate_is_the_pipeline(
    checkpoint: Path, tokenizer: Any, size: tuple[int, int], guidance: float
) -> None:
    pipeline = QwenImagePipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    parts = vars(build(SIZES, tokenizer, 1))
    for name in parts:
        parts[name].load_state_dict(getattr(pipeline, name).state_dict())
    models = build(SIZES, tokenizer, 1)
    models.text_encoder, models.transformer = parts["text_encoder"], parts["transformer"]
    models.vae = parts["vae"]
    models.vae.register_to_config(**{k: pipeline.vae.config[k] for k in STATISTICS})
    use_image_convolutions(models.vae)
    made = generate(models, tokenizer, PROMPTS, size, [3, 4, 5], steps=3, guidance=guidance)
    for i, prompt in enumerate(PROMPTS):
        expected = pipeline(
            prompt,
            negative_prompt=" ",
            width=size[0],
            height=size[1],
            num_inference_steps=3,
            true_cfg_scale=guidance,
            generator=torch.Generator().manual_seed(3 + i),
            output_type="np",
        ).images[0]
        assert np.abs(made[i] / 255 - expected).max() < 2 / 255
    assert np.abs(made[0].astype(int) - made[1]).max() > 2  # the prompts matter


STATISTICS = ("latents_mean", "latents_std")


def test_export(checkpoint: Path) -> None:
    assert QwenImagePipeline.from_pretrained(checkpoint).vae.config.latents_std == [0.7] * 16
    assert "| DiT: modulation |" in (checkpoint / "README.md").read_text()


def test_the_real_sizes_fit_into_16_mb(tmp_path: Path) -> None:
    words = [f" word{i}" for i in range(200)]  # more than the world's captions have
    progress = Progress(tmp_path, 1)
    progress.state.update(words=words, sizes=Sizes().to_json())
    models = build(Sizes(), store.tokenizer_of(words), 0)
    assert export(models, progress, tmp_path / "out") <= 16_000_000


def test_pack(tokenizer: Any) -> None:
    latents = torch.randn(2, 16, 6, 8)
    packed = QwenImagePipeline._pack_latents(latents[:, None], 2, 16, 6, 8)
    assert torch.equal(flow.pack(latents), packed)
    assert torch.equal(flow.unpack(packed, 6, 8), latents)


def test_real_rotation_is_the_complex_one() -> None:
    x, angles = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
    freqs = torch.polar(torch.ones_like(angles), angles)
    expected = apply_rotary_emb_qwen(x, freqs, use_real=False)
    assert torch.allclose(flow.rotate(x, torch.view_as_real(freqs)), expected, atol=1e-6)


def test_noise_levels_follow_the_scheduler() -> None:
    torch.manual_seed(0)
    levels = flow.noise_levels(20_000, 0.4, CPU)
    plain = flow.noise_levels(20_000, 0.0, CPU)
    shifted = scheduler().time_shift(0.4, 1.0, plain.quantile(torch.tensor([0.1, 0.5, 0.9])))
    assert torch.allclose(levels.quantile(torch.tensor([0.1, 0.5, 0.9])), shifted, atol=0.02)
    assert 0 < levels.min() < 0.01 and 0.99 < levels.max() < 1


def test_dropped_prompts(tokenizer: Any) -> None:
    torch.manual_seed(0)
    ids, mask = flow.prompt_ids(tokenizer, PROMPTS[:1] * 2000, CPU)
    blank = flow.prompt_ids(tokenizer, [" "], CPU)[0][0]
    new, valid = flow.drop_prompts(ids, mask, [(0.25, blank)])
    replaced = (new != ids).any(1)
    assert 0.2 < replaced.float().mean() < 0.3
    row = int(replaced.nonzero()[0])
    assert torch.equal(new[row][valid[row]], blank)


def test_image_convolutions_are_exact(tokenizer: Any) -> None:
    model = build(SIZES, tokenizer, 0).vae
    picture = torch.rand(1, 3, 1, 32, 48) * 2 - 1
    with torch.no_grad():
        expected = model.encode(picture).latent_dist.mean
        decoded = model.decode(expected).sample
        use_image_convolutions(model)
        mean, _ = vae.encode(model, picture)
        output = model.decoder(model.post_quant_conv(mean)).clamp(-1, 1)
    assert torch.allclose(mean, expected, atol=1e-5)
    assert torch.allclose(output, decoded, atol=1e-5)


def test_learning_rate() -> None:
    rates = [learning_rate(step, 0, 100, 1.0, 10) for step in range(100)]
    assert rates[0] == 0.1 and rates[10] == rates[60] == 1.0 and rates[-1] < 0.04
    assert learning_rate(50, 50, 100, 1.0, 10) < 1.0  # warms up again after a resume


def test_losses_fall_and_a_training_resumes(tmp_path: Path, tokenizer: Any) -> None:
    progress = Progress(tmp_path, 60)
    progress.state["words"] = [" red", " circle", " left", "a", *"左边有一个红色的圆"]
    progress.state["sizes"] = SIZES.to_json()
    models, words = store.start(progress, SIZES, 0)
    average = flow.Average(flow.trained(models), SETTINGS.ema)
    torch.manual_seed(0)
    latents = torch.randn(3, 16, 4, 4)  # a world of three pictures
    ids, mask = flow.prompt_ids(words, PROMPTS, CPU)
    text = flow.TextEncoder(models.text_encoder, flow.prefix_ids(words), CPU)
    optimizer = flow.make_optimizer(average.parameters, CPU)
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    losses = []
    for step in range(80):
        value = flow.loss(models, text, latents, ids, mask, scheduler().config)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(step)
        progress.add("dit", step + 1, 80, loss=value)
        losses.append(value.item())
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    store.save_flow(progress, average)
    store.save_vae(progress, models.vae)
    progress.save()

    again = Progress(tmp_path, 60)
    assert again.steps("dit") == 80
    resumed, _ = store.start(again, Sizes(), 1)  # the state's sizes count
    for a, b in zip(flow.trained(resumed), average.parameters, strict=True):
        assert torch.equal(a, b.bfloat16().float())
    trained, _, _ = store.load_trained(tmp_path)
    for a, b in zip(flow.trained(trained), average.values, strict=True):
        assert torch.equal(a, b.bfloat16().float())


def test_pool_replaces_the_oldest_and_batches_are_whole(tokenizer: Any) -> None:
    pool = Pool(FakeRenderer(tokenizer), 200, CPU)  # type: ignore[arg-type]
    pool.fill(500)
    assert all(bucket.count <= 200 for bucket in pool.buckets.values())
    pool.grow(wait=True)
    batch = pool.batch(16)
    assert batch.items.shape[0] == 16 and batch.items.dtype == torch.uint8
    end = tokenizer(TEMPLATE_SUFFIX).input_ids
    for ids, mask in zip(batch.ids, batch.mask, strict=True):
        assert ids[mask][-len(end) :].tolist() == end


def test_vae_loss_falls(tokenizer: Any, tmp_path: Path) -> None:
    model = build(SIZES, tokenizer, 0).vae
    use_image_convolutions(model)
    torch.manual_seed(0)
    pictures = vae.to_signed(torch.full((2, 32, 32, 3), 200, dtype=torch.uint8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        value, _ = vae.loss(model, pictures, SETTINGS)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[-1] < 0.6 * losses[0]


def test_the_command_trains_resumes_and_exports(tmp_path: Path) -> None:
    """In processes of their own: the command changes diffusers for as long as it lives."""
    sizes = "--blocks 1 --heads 2 --head-size 24 --rope-axes 8 8 8 --text-layers 1 --text-width 64"
    sizes += " --text-heads 2"
    small = "--vae-width 4 --vae-batch 4 --dit-batch 4 --scenes 120 --first-scenes 100 --workers 1"
    command = [sys.executable, "-m", "training", str(tmp_path / "state"), *sizes.split()]
    command += [*small.split(), "--vae-steps", "3", "--dit-steps", "3", "--samples", "2"]

    def train(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state() -> dict[str, Any]:
        stages = json.loads((tmp_path / "state" / "state.json").read_text())["stages"]
        return {name: stage["steps"] for name, stage in stages.items()}

    train("--minutes", "0")
    assert state() == {"vae": 0}
    train("--stage", "vae")
    assert state() == {"vae": 3}
    assert "bytes of safetensors" in train("--out", str(tmp_path / "out"))
    assert state() == {"vae": 3, "dit": 3}
    assert (tmp_path / "state" / "curves.png").stat().st_size > 0
    description = Checkpoint(tmp_path / "out").describe()
    assert description["pipeline_class"] == "QwenImagePipeline"
    assert len(description["vae"]["latents_mean"]) == 16
