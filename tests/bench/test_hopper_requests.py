"""The benchmark of requests, from its repository on, at a small size on the CPU."""

import json

import pytest
from transformers import Qwen2_5_VLTextConfig

from bench import hopper_engines, hopper_repository, hopper_requests
from tests.conftest import alone_with, shared
from tests.e2e.serving_helpers import hopper_on_cpu

SMALL = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "joint_attention_dim": 48,
    "axes_dims_rope": (8, 12, 12),
}


@pytest.fixture
def small(monkeypatch):
    """Other sizes than the checkpoint's whose repository it starts from."""
    monkeypatch.setattr(hopper_engines, "TRANSFORMER", SMALL)
    told = {name: SMALL[name] for name in hopper_engines.DIT_CONFIG}
    monkeypatch.setattr(hopper_engines, "DIT_CONFIG", told)
    text = {
        "vocab_size": 800,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2, 2, 2],
        },
    }
    config = Qwen2_5_VLTextConfig(**text, attn_implementation="sdpa")
    monkeypatch.setattr(hopper_engines, "TEXT_CONFIG", config)
    known = {name: text[name] for name in hopper_engines.TEXT if name in text}
    monkeypatch.setattr(hopper_engines, "TEXT", hopper_engines.TEXT | known)
    monkeypatch.setattr(hopper_engines, "VAE", {"base_dim": 8})


def test_from_random_weights_to_a_result(small, tmp_path):
    made = tmp_path / "made"
    with alone_with("h200-torch"):  # tests/e2e/test_hopper_profile.py has these stages, too
        hopper_repository.make(made, stages=shared("h200-torch.onnx"))
    hopper_repository.change_dit(made, "fp8-rows-all")
    repository = hopper_on_cpu(made, tmp_path / "cpu")
    *_, result = hopper_requests.measure(
        repository, side=64, steps=6, requests=1, in_flight=2, native=((48, 32),)
    )
    json.dumps(result)
    assert result["dit"] == {"precision": "fp8-rows-all", "attention": "fp8"}
    guided = result["guided"]
    assert guided["requests"] == 1 and guided["num_inference_steps"] == 6
    low, high = hopper_requests.TEXT_TOKENS
    assert low <= guided["prompt_tokens"][0] <= guided["prompt_tokens"][1] <= high
    assert 0 < guided["engines_ms"] < guided["latency_ms"][0]
