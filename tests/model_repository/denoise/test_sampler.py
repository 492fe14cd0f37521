import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from sampler import euler_step, guide


def test_guidance_keeps_the_norm_of_every_token():
    positive, negative = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    guided = guide(positive, negative, 4.0)
    assert torch.allclose(guided.norm(dim=-1), positive.norm(dim=-1), rtol=1e-5)
    combined = negative + 4.0 * (positive - negative)
    cosine = torch.nn.functional.cosine_similarity(guided, combined, dim=-1)
    assert torch.allclose(cosine, torch.ones_like(cosine), atol=1e-5)


def test_guidance_of_equal_predictions_changes_nothing():
    prediction = torch.randn(1, 3, 64)
    assert torch.allclose(guide(prediction, prediction.clone(), 7.0), prediction, atol=1e-6)


def test_a_step_is_that_of_diffusers_scheduler():
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False)
    scheduler.set_timesteps(sigmas=[1.0, 0.6, 0.2])
    latents = reference = torch.randn(1, 4, 64)
    for index, timestep in enumerate(scheduler.timesteps):
        noise_pred = torch.randn(1, 4, 64)
        reference = scheduler.step(noise_pred, timestep, reference, return_dict=False)[0]
        latents = euler_step(
            latents, noise_pred, scheduler.sigmas[index], scheduler.sigmas[index + 1]
        )
        assert torch.equal(latents, reference)
