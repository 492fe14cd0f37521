"""The trained checkpoint draws what its world's captions say."""

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline

from export.checkpoint import Checkpoint
from quality.judge import judge
from tests.conftest import ROOT

TINY = ROOT / "checkpoints" / "tiny"
PROMPTS = {
    "en": [
        "a red circle on the left and a blue square on the right, white background",
        "a large green star in the centre, yellow background",
    ],
    "zh": [
        "左边有一个红色圆形，右边有一个蓝色正方形，白色背景",
        "中间有一个大的绿色星形，黄色背景",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def pipeline():
    loaded = QwenImagePipeline.from_pretrained(TINY, dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_it_is_small_and_can_be_exported():
    assert sum(path.stat().st_size for path in TINY.rglob("*.safetensors")) <= 16_000_000
    description = Checkpoint(TINY).describe()
    assert description["pipeline_class"] == "QwenImagePipeline"
    assert (description["default_height"], description["default_width"]) == (128, 128)
    assert description["prompt_template_dropped_tokens"] == 34


@pytest.mark.parametrize("language", ["en", "zh"])
def test_it_draws_what_the_caption_says(pipeline, language):
    scores, wrong = [], []
    prompts = PROMPTS[language]
    for number, prompt in enumerate(prompts):
        (picture,) = pipeline(
            prompt,
            negative_prompt=" ",
            height=128,
            width=128,
            num_inference_steps=20,
            max_sequence_length=1024,
            generator=torch.Generator("cpu").manual_seed(number),
            output_type="np",
        ).images
        pixels = (picture * 255).round().astype(np.uint8)
        scores.append(judge(prompt, pixels).score)
        wrong.append(judge(prompts[number - 1], pixels).score)
    assert np.mean(scores) >= 0.8
    assert np.mean(wrong) < 0.4
