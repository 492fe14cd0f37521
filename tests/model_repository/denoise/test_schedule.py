import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from schedule import Scheduler, shift

# As in the published 20B checkpoints.
CONFIG = {
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
LIGHTNING = CONFIG | {
    "base_shift": float(np.log(3)), "max_shift": float(np.log(3)), "shift_terminal": None
}  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, LIGHTNING], ids=["published", "lightning"])
@pytest.mark.parametrize("tokens", [1, 256, 4096, 6889])
@pytest.mark.parametrize("steps", [2, 4, 20, 50])
def test_the_schedule_is_diffusers(config, tokens, steps):
    reference = FlowMatchEulerDiscreteScheduler.from_config(config)
    mu = calculate_shift(tokens, 256, 8192, config["base_shift"], config["max_shift"])
    reference.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    schedule = Scheduler(config).schedule(steps, tokens)
    assert torch.equal(schedule.sigmas, reference.sigmas)
    assert torch.equal(schedule.timesteps, reference.timesteps / 1000)


def test_known_vectors():
    assert shift(4096, 256, 8192, 0.5, 0.9) == pytest.approx(0.693548, abs=1e-6)
    assert shift(6889, 256, 8192, 0.5, 0.9) == pytest.approx(0.834325, abs=1e-6)
    sigmas = Scheduler(CONFIG).schedule(4, 4096).sigmas.tolist()
    assert sigmas == pytest.approx([1, 0.766709, 0.455614, 0.02, 0], abs=1e-6)


def test_one_step_goes_from_noise_to_picture():
    schedule = Scheduler(CONFIG).schedule(1, 4096)
    assert schedule.sigmas.tolist() == [1.0, 0.0]
    assert schedule.timesteps.tolist() == [1.0]
    assert Scheduler(LIGHTNING).schedule(1, 4096).sigmas.tolist() == [1.0, 0.0]
