"""The served picture is the one that diffusers makes from the same checkpoint, prompt and seed."""

import numpy as np
import pytest

from serving.server import TritonServer
from tests.e2e.reference import largest_difference, reference_images
from tests.e2e.serving_helpers import generate, variant

CASES = {
    "english, square": {
        "prompt": "a red fox in the snow, early morning light",
        "height": 64,
        "width": 64,
        "num_inference_steps": 4,
        "seed": 1,
    },
    "chinese, portrait, no guidance": {
        "prompt": "一只红色的狐狸坐在雪地里，清晨的阳光",
        "height": 128,
        "width": 96,
        "num_inference_steps": 2,
        "true_cfg_scale": 1.0,
        "seed": 2,
    },
    "emoji, landscape, odd multiples, longer negative prompt": {
        "prompt": "🦊❄️👩‍👩‍👧",
        "negative_prompt": "blurry, low quality, watermark, text, and everything else that "
        "nobody wants to see in a picture of a fox",
        "height": 48,
        "width": 176,
        "num_inference_steps": 20,
        "seed": 2**62,
    },
    "empty prompt, smallest size": {
        "prompt": "",
        "height": 16,
        "width": 16,
        "num_inference_steps": 4,
        "seed": 4,
    },
    "special tokens and braces, three images": {
        "prompt": "a {sign} that says <|im_end|>{}{{}} <|im_start|>user\n<|endoftext|>",
        "height": 80,
        "width": 64,
        "num_inference_steps": 4,
        "num_images_per_prompt": 3,
        "seed": 5,
    },
    "near the token limit, strong guidance": {
        "prompt": "0123456789" * 101,
        "height": 64,
        "width": 96,
        "num_inference_steps": 4,
        "true_cfg_scale": 7.5,
        "seed": 6,
    },
    "leading line breaks, 20 steps": {
        "prompt": "\n\n  a lighthouse\tat night ",
        "height": 96,
        "width": 96,
        "num_inference_steps": 20,
        "seed": 7,
    },
    "one step": {
        "prompt": "a red fox",
        "height": 64,
        "width": 64,
        "num_inference_steps": 1,
        "seed": 8,
    },
}


@pytest.fixture(scope="module")
def other_server(other_repository):
    with TritonServer(other_repository) as running:
        yield running


@pytest.fixture(scope="module")
def tiny_server(tiny_repository):
    with TritonServer(tiny_repository) as running:
        yield running


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("which", ["default", "other", "tiny"])
def test_equal_to_diffusers(which, fields, request):
    prefix = "" if which == "default" else "other_"
    running = request.getfixturevalue(f"{prefix}server")
    checkpoint = request.getfixturevalue(f"{prefix}checkpoint")
    served = generate(running.grpc_url, **fields)
    assert served.seeds == [
        fields["seed"] + i for i in range(fields.get("num_images_per_prompt", 1))
    ]
    expected = reference_images(checkpoint, **fields)
    assert largest_difference(served.images, expected) <= 2
    assert all(np.ptp(image) > 100 for image in served.images), "a flat picture proves nothing"


# What is changed in the served parts; each must be found by the comparison above.
MUTATIONS = {
    "guidance dropped": (
        "denoise/1/sampler.py",
        "combined = negative_noise_pred + true_cfg_scale * (noise_pred - negative_noise_pred)",
        "combined = noise_pred",
    ),
    "rescale left out": (
        "denoise/1/sampler.py",
        "return combined * (norm / torch.norm(combined, dim=-1, keepdim=True))",
        "return combined",
    ),
    "text mask ignored": (
        "denoise/1/generator.py",
        "text_mask=mask.repeat_interleave(images, dim=0)",
        "text_mask=torch.ones_like(mask).repeat_interleave(images, dim=0)",
    ),
    "positions shifted": (
        "denoise/1/latents.py",
        "start = max(rows // 2, columns // 2)",
        "start = max(rows // 2, columns // 2) + 1",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_the_comparison_finds_a_wrong_pipeline(mutation, repository, checkpoint, tmp_path):
    path, old, new = mutation
    wrong = variant(repository, tmp_path / "repository", {path: [(old, new)]})
    fields = CASES["english, square"]
    with TritonServer(wrong) as running:
        served = generate(running.grpc_url, **fields)
    assert largest_difference(served.images, reference_images(checkpoint, **fields)) > 2
