"""In a process of its own: importing cache-dit changes diffusers."""

import json
import subprocess
import sys

MEASURE = """
import json
import torch
from diffusers import QwenImageTransformer2DModel
from bench.hopper_cache import measure

torch.manual_seed(0)
stock = QwenImageTransformer2DModel(
    num_layers=12,
    num_attention_heads=2,
    attention_head_dim=32,
    joint_attention_dim=64,
    axes_dims_rope=(8, 12, 12),
).requires_grad_(False)
text = torch.randn(2, 16, 64)


def step(latents, sigma):
    return stock(
        hidden_states=latents,
        encoder_hidden_states=text,
        timestep=torch.full((2,), sigma),
        img_shapes=[[(1, 4, 4)]] * 2,
        return_dict=False,
    )[0]


print(json.dumps(measure(stock, step, torch.randn(2, 16, 64))))
"""


def test_every_second_step_after_the_warm_up() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=300
    )
    found = json.loads(done.stdout.splitlines()[-1])
    # DBCache computes eight steps before it skips one, by its defaults.
    assert found["every second step skipped"]["steps_skipped"] == 21
    assert found["every second step skipped"]["relative_difference"] > 0
    defaults = found["by its defaults"]
    assert defaults["steps_skipped"] == 0  # random weights: no step resembles the one before
    assert defaults["relative_difference"] == 0
