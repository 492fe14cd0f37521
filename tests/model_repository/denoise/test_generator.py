"""The generator with engines that compute something simple, to see what it asks of them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from generation import Cancelled, Generation, GenerationError, InvalidGeneration, StopSignal
from generator import Generator, Limits, Modulation, Placement
from latents import initial_noise, unpack
from tests.model_repository.denoise.test_output_cache import Counts

CHECKPOINT = {
    "scheduler": {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9},
    "components": {"text_encoder": "e" * 64},
    "prompt_template_dropped_tokens": 3,
    "max_prompt_tokens": 64,
    "pad_token_id": 99,
    "vae": {"z_dim": 16, "scale_factor": 8, "latents_mean": [0.5] * 16, "latents_std": [2.0] * 16},
}


CPU = Placement(torch.device("cpu"), torch.float32)


class FakeEngines:
    """A text's states are its own token ids; predictions depend on text, step and latents."""

    def __init__(self):
        self.encoded, self.modulated, self.steps = [], [], []
        self.fail_encoder = False
        self.delay, self.step_seconds, self.steps_ended = 0.01, 0.0, 0
        self.on_step = lambda: None

    async def encode_text(self, input_ids):
        self.encoded.append(input_ids[0].tolist())
        await asyncio.sleep(self.delay)
        if self.fail_encoder:
            raise GenerationError("'text_encoder' failed")
        return input_ids[:, 3:, None].float().expand(-1, -1, 4)

    async def modulate(self, timesteps):
        self.modulated.append(timesteps.tolist())
        return [Modulation(t * torch.ones(2, 2, 6), t * torch.ones(2)) for t in timesteps]

    async def predict_noise(self, hidden_states, conditioning, modulation):
        self.steps.append((hidden_states.shape, conditioning, modulation))
        self.on_step()
        await asyncio.sleep(self.step_seconds)
        self.steps_ended += 1
        states = conditioning.encoder_hidden_states * conditioning.text_mask[..., None]
        mean = states.mean(dim=2).sum(dim=1) / conditioning.text_mask.sum(dim=1)
        text = mean[:, None, None] / 100
        return hidden_states * modulation.final[0] + text


class FakeMetrics:
    def __init__(self):
        self.encoder_cache, self.modulation_cache = Counts(), Counts()
        self.stages, self.steps, self.loads = [], 0, []

    def stage(self, name, seconds):
        self.stages.append(name)

    def step(self):
        self.steps += 1

    def load(self, in_flight, queued):
        self.loads.append((in_flight, queued))


def new(engines, placement=CPU, **limits):
    metrics = FakeMetrics()
    defaults = {
        "max_in_flight": 4,
        "max_queued": 4,
        "default_timeout_ms": 60_000,
        "max_modulation_rows": 8,
        "encoder_cache_bytes": 10_000,
        "modulation_cache_bytes": 100_000,
        "text_buckets": (8, 16),
    }
    bounds = Limits(**(defaults | limits))
    return Generator(CHECKPOINT, engines, bounds, metrics, placement), metrics


def generation(tokens=5, **fields):
    defaults = {
        "input_ids": np.arange(tokens + 3),
        "negative_input_ids": np.arange(100, 104),
        "num_inference_steps": 3,
        "true_cfg_scale": 4.0,
        "height": 32,
        "width": 48,
        "seed": 7,
        "num_images_per_prompt": 1,
        "request_id": "id",
    }
    return Generation(**(defaults | fields))


def never():
    return StopSignal(timeout_ms=60_000)


def test_one_call_a_step_holds_both_predictions_of_every_image():
    engines = FakeEngines()
    generator, metrics = new(engines)
    latents, record = asyncio.run(generator.generate(generation(num_images_per_prompt=3), never()))
    assert latents.shape == (3, 16, 4, 6)
    assert record["seeds"] == [7, 8, 9]
    assert metrics.steps == len(engines.steps) == 3
    shape, conditioning, _ = engines.steps[0]
    assert shape == (6, 6, 64)
    assert conditioning.text_mask.sum(dim=1).tolist() == [5, 5, 5, 1, 1, 1]
    assert conditioning.position_ids.shape == (6, 8 + 6, 3)
    assert metrics.stages == ["queue", "encode", "modulation", "denoise"]
    assert metrics.loads[-1] == (0, 0)


def test_without_guidance_the_negative_prompt_is_not_even_encoded():
    engines = FakeEngines()
    generator, _ = new(engines)
    _, record = asyncio.run(generator.generate(generation(true_cfg_scale=1.0), never()))
    assert len(engines.encoded) == 1
    assert engines.steps[0][0] == (1, 6, 64)
    assert record["cache"]["negative_prompt"] == "off"


def test_texts_are_padded_to_buckets_and_cut_again():
    engines = FakeEngines()
    generator, _ = new(engines)
    asyncio.run(generator.generate(generation(tokens=9), never()))
    assert [len(ids) for ids in engines.encoded] == [3 + 16, 3 + 8]
    assert engines.encoded[0][12:] == [99] * 7
    conditioning = engines.steps[0][1]
    assert conditioning.encoder_hidden_states.shape == (2, 16, 4)
    assert (conditioning.encoder_hidden_states[0, 9:] == 0).all()
    assert conditioning.text_mask[0].sum() == 9


def test_the_longest_prompt_has_a_bucket_although_none_is_named():
    engines = FakeEngines()
    generator, _ = new(engines)
    asyncio.run(generator.generate(generation(tokens=64), never()))
    assert engines.steps[0][1].text_mask.shape == (2, 64)


def test_padding_and_company_do_not_change_the_latents():
    async def alone(text_buckets):
        generator, _ = new(FakeEngines(), text_buckets=text_buckets)
        return (await generator.generate(generation(), never()))[0]

    async def among_others():
        generator, _ = new(FakeEngines())
        others = [generation(seed=seed, tokens=9, num_inference_steps=seed) for seed in (1, 2, 5)]
        latents, *_ = await asyncio.gather(
            *(generator.generate(each, never()) for each in [generation(), *others])
        )
        return latents[0]

    narrow, wide = asyncio.run(alone((8,))), asyncio.run(alone((64,)))
    assert torch.allclose(narrow, wide, atol=1e-6)
    assert torch.equal(narrow, asyncio.run(among_others()))


def test_latents_are_denormalised_as_in_the_pipeline():
    engines = FakeEngines()
    generator, _ = new(engines)
    latents, _ = asyncio.run(
        generator.generate(generation(num_inference_steps=1, true_cfg_scale=1.0), never())
    )
    noise = initial_noise([7], 16, 4, 6)
    text = np.arange(3, 8).mean() / 100
    expected = unpack(noise - (noise * 1.0 + text), 4, 6) / (1.0 / 2.0) + 0.5
    assert torch.allclose(latents, expected, atol=1e-5)


def test_repeated_prompts_and_schedules_come_from_the_caches():
    async def scenario():
        engines = FakeEngines()
        generator, metrics = new(engines)
        await generator.generate(generation(), never())
        _, record = await generator.generate(generation(seed=8), never())
        assert len(engines.encoded) == 2
        assert len(engines.modulated) == 1
        assert record["cache"] == {
            "prompt": "hit", "negative_prompt": "hit", "modulation_hits": 3, "modulation_misses": 0
        }  # fmt: skip
        assert metrics.encoder_cache.hits == 2

    asyncio.run(scenario())


def test_eight_simultaneous_equal_prompts_are_encoded_once():
    async def scenario():
        engines = FakeEngines()
        generator, _ = new(engines, max_in_flight=8)
        await asyncio.gather(
            *(generator.generate(generation(seed=seed), never()) for seed in range(8))
        )
        assert len(engines.encoded) == 2  # the prompt and the negative prompt

    asyncio.run(scenario())


def test_a_failing_encoder_fails_the_request_and_leaves_nothing_behind():
    async def scenario():
        engines = FakeEngines()
        engines.fail_encoder = True
        generator, metrics = new(engines)
        with pytest.raises(GenerationError, match="'text_encoder' failed"):
            await generator.generate(generation(), never())
        assert metrics.encoder_cache.bytes == 0
        assert metrics.loads[-1] == (0, 0)
        engines.fail_encoder = False
        await generator.generate(generation(), never())

    asyncio.run(scenario())


def test_the_encoder_cache_stays_within_its_bytes():
    async def scenario():
        engines = FakeEngines()
        engines.delay = 0.0
        generator, metrics = new(engines, encoder_cache_bytes=1_000)
        for number in range(1000):
            ids = np.array([0, 1, 2, number, number + 1])
            await generator.generate(
                generation(input_ids=ids, true_cfg_scale=1.0, num_inference_steps=1), never()
            )
            assert metrics.encoder_cache.bytes <= 1_000
        assert metrics.encoder_cache.misses == 1000

    asyncio.run(scenario())


def test_a_cancelled_generation_stops_before_its_next_step():
    async def scenario():
        engines, stop = FakeEngines(), never()
        generator, metrics = new(engines)
        engines.on_step = lambda: stop.cancel() if len(engines.steps) == 2 else None
        with pytest.raises(Cancelled):
            await generator.generate(generation(num_inference_steps=40), stop)
        assert len(engines.steps) == 2
        assert metrics.loads[-1] == (0, 0)

    asyncio.run(scenario())


def test_a_client_that_leaves_in_a_step_keeps_its_place_until_the_step_has_ended():
    async def scenario():
        engines, gone = FakeEngines(), []
        generator, metrics = new(engines)
        engines.on_step = lambda: gone.append(True) if len(engines.steps) == 2 else None
        engines.step_seconds = 0.2
        with pytest.raises(Cancelled, match="by the client"):
            await generator.generate(generation(), StopSignal(60_000, lambda: bool(gone)))
        assert (len(engines.steps), engines.steps_ended) == (2, 2)
        assert metrics.steps == 1  # the one that counted for the picture
        assert metrics.loads[-1] == (0, 0)

    asyncio.run(scenario())


def test_cancelled_after_its_last_step_it_still_ends_cancelled():
    async def scenario():
        engines, stop = FakeEngines(), never()
        generator, _ = new(engines)
        engines.on_step = lambda: stop.cancel() if len(engines.steps) == 3 else None
        with pytest.raises(Cancelled):
            await generator.generate(generation(), stop)

    asyncio.run(scenario())


def test_a_disconnected_client_and_a_deadline_end_it_too():
    async def scenario():
        generator, _ = new(FakeEngines())
        with pytest.raises(Cancelled, match="by the client"):
            await generator.generate(generation(), StopSignal(60_000, lambda: True))
        with pytest.raises(Cancelled, match="deadline of 1 ms"):
            await generator.generate(generation(num_inference_steps=1000), StopSignal(1))

    asyncio.run(scenario())


TENSORS = {
    "input_ids": np.arange(8),
    "negative_input_ids": np.arange(8),
    "num_inference_steps": np.array([4], np.int32),
    "true_cfg_scale": np.array([4.0], np.float32),
    "height": np.array([64], np.int32),
    "width": np.array([64], np.int32),
    "seed": np.array([1], np.int64),
    "num_images_per_prompt": np.array([1], np.int32),
}


def from_tensors(**changes):
    return Generation.from_tensors(
        TENSORS | changes, size_multiple=16, dropped_tokens=3, max_prompt_tokens=64, vocabulary=100
    )


def test_generation_from_tensors():
    built = from_tensors()
    assert (built.height, built.seeds, built.guided) == (64, [1], True)


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_a_direct_caller_that_forgets_a_tensor_hears_which(name):
    with pytest.raises(InvalidGeneration, match=f"{name} is missing"):
        Generation.from_tensors(
            {key: value for key, value in TENSORS.items() if key != name},
            size_multiple=16,
            dropped_tokens=3,
            max_prompt_tokens=64,
            vocabulary=100,
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", np.arange(3)),
        ("negative_input_ids", np.arange(68)),
        ("input_ids", np.array([1, 2, 3, 100])),
        ("input_ids", np.array([1, 2, 3, -1])),
        ("num_inference_steps", np.array([0])),
        ("height", np.array([24])),
        ("width", np.array([0])),
        ("true_cfg_scale", np.array([np.nan])),
        ("true_cfg_scale", np.array([0.0])),
        ("seed", np.array([-1])),
        ("num_images_per_prompt", np.array([0])),
    ],
)
def test_a_direct_caller_cannot_break_the_computation(name, value):
    with pytest.raises(InvalidGeneration, match=name):
        from_tensors(**{name: value})


PARAMETERS = {
    "max_in_flight": "4",
    "max_queued": "0",
    "default_timeout_ms": "1000",
    "encoder_cache_bytes": "0",
    "modulation_cache_bytes": "0",
    "max_modulation_rows": "8",
    "text_buckets": "32, 64",
}


def test_limits_from_the_configuration():
    limits = Limits.from_parameters(PARAMETERS)
    assert (limits.max_in_flight, limits.max_queued, limits.text_buckets) == (4, 0, (32, 64))


@pytest.mark.parametrize(
    ("name", "value"), [("max_in_flight", "0"), ("max_queued", "-1"), ("text_buckets", "32,x")]
)
def test_a_wrong_parameter_is_named(name, value):
    with pytest.raises(ValueError, match=f"the parameter {name} is .* whole number from"):
        Limits.from_parameters(PARAMETERS | {name: value})


def test_a_missing_parameter_is_named():
    with pytest.raises(ValueError, match="the parameter max_queued is None"):
        Limits.from_parameters({k: v for k, v in PARAMETERS.items() if k != "max_queued"})


def test_engines_get_their_type_and_latents_stay_exact():
    """The sum of many small steps would drown in BF16."""
    engines = FakeEngines()
    generator, _ = new(engines, replace(CPU, dtype=torch.bfloat16))
    dtypes, predict = set(), engines.predict_noise

    async def checked(hidden_states, conditioning, modulation):
        given = (hidden_states, conditioning.encoder_hidden_states, *modulation)
        dtypes.update(tensor.dtype for tensor in given)
        return await predict(hidden_states, conditioning, modulation)

    engines.predict_noise = checked
    latents, _ = asyncio.run(generator.generate(generation(), never()))
    assert dtypes == {torch.bfloat16}
    assert latents.dtype == torch.float32
    assert not torch.equal(latents, latents.bfloat16().float())


def test_where_the_engines_are():
    assert Placement.from_parameters({}) == CPU
    assert Placement.from_parameters({"engine_dtype": "BF16"}).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"engine_dtype": "FP8"}, "engine_dtype is 'FP8'; it must be one of FP32, FP16, BF16"),
        ({"engine_device": "gpu"}, "engine_device is 'gpu'; it must be cpu or cuda:<number>"),
        ({"engine_device": "cuda:99"}, r"engine_device is 'cuda:99', and torch finds \d+ GPUs"),
    ],
)
def test_a_wrong_place_is_named(parameters, said):
    with pytest.raises(ValueError, match=said):
        Placement.from_parameters(parameters)
