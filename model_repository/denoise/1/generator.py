"""Runs generations: admission, text encoding, modulation, the denoising loop.

Knows engines only through the `Engines` protocol, so that it runs and is tested without Triton.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from admission import Admission
from generation import Generation, StopSignal
from latents import initial_noise, position_ids, unpack
from output_cache import CacheMetrics, OutputCache
from sampler import euler_step, guide
from schedule import Scheduler


class Modulation(NamedTuple):
    """The modulation net's output at one timestep: [blocks, 2, 6·d], and [2·d] on the CPU."""

    block: torch.Tensor
    final: torch.Tensor


@dataclass(frozen=True)
class Conditioning:
    """What stays the same over all steps of a generation, one row a prediction.

    encoder_hidden_states: [R, T, text width], zero where padded. On the CPU, since small tensors
    cross processes faster there: text_mask, BOOL [R, T], and position_ids, INT32 [R, T + L, 3].
    """

    encoder_hidden_states: torch.Tensor
    text_mask: torch.Tensor
    position_ids: torch.Tensor


@dataclass(frozen=True)
class Placement:
    """Where the tensors of a generation are, and the type in which `dit` takes and gives them."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Placement:
        """Raises ValueError with a sentence that names a parameter that is wrong."""
        dtypes = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
        device = parameters.get("engine_device", "cpu")
        dtype = parameters.get("engine_dtype", "FP32")
        if dtype not in dtypes:
            raise ValueError(
                f"the parameter engine_dtype is {dtype!r}; it must be one of {', '.join(dtypes)}"
            )
        if not re.fullmatch(r"cpu|cuda:\d+", device):
            raise ValueError(
                f"the parameter engine_device is {device!r}; it must be cpu or cuda:<number>"
            )
        placement = cls(torch.device(device), dtypes[dtype])
        if placement.device.type == "cuda" and placement.device.index >= torch.cuda.device_count():
            raise ValueError(
                f"the parameter engine_device is {device!r}, and torch finds "
                f"{torch.cuda.device_count()} GPUs here"
            )
        return placement


class Engines(Protocol):
    """The models that a generation calls; every call may raise `GenerationError`."""

    async def encode_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """INT64 [1, S] on the CPU → [1, S − dropped, text width]."""

    async def modulate(self, timesteps: torch.Tensor) -> list[Modulation]:
        """FP32 [N] on the CPU → one `Modulation` a timestep."""

    async def predict_noise(
        self, hidden_states: torch.Tensor, conditioning: Conditioning, modulation: Modulation
    ) -> torch.Tensor:
        """[R, L, 64] → [R, L, 64], every row at the timestep of `modulation`."""


class Metrics(Protocol):
    """Where the generator reports what it does."""

    @property
    def encoder_cache(self) -> CacheMetrics: ...
    @property
    def modulation_cache(self) -> CacheMetrics: ...
    def stage(self, name: str, seconds: float) -> None: ...
    def step(self) -> None: ...
    def load(self, in_flight: int, queued: int) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Bounds from the model's configuration, whose parameters have these names."""

    max_in_flight: int
    max_queued: int
    default_timeout_ms: int
    encoder_cache_bytes: int
    modulation_cache_bytes: int
    max_modulation_rows: int
    text_buckets: tuple[int, ...]

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Limits:
        """Raises ValueError with a sentence that names a parameter that is missing or wrong."""

        def number(name: str, text: str | None, lowest: int) -> int:
            if text is None or not text.strip().isdecimal() or int(text) < lowest:
                raise ValueError(
                    f"the parameter {name} is {text!r}; it must be a whole number from {lowest}"
                )
            return int(text)

        def parameter(name: str, lowest: int) -> int:
            return number(name, parameters.get(name), lowest)

        buckets = parameters.get("text_buckets", "").split(",")
        return cls(
            max_in_flight=parameter("max_in_flight", 1),
            max_queued=parameter("max_queued", 0),
            default_timeout_ms=parameter("default_timeout_ms", 1),
            encoder_cache_bytes=parameter("encoder_cache_bytes", 0),
            modulation_cache_bytes=parameter("modulation_cache_bytes", 0),
            max_modulation_rows=parameter("max_modulation_rows", 1),
            text_buckets=tuple(number("text_buckets", bucket, 1) for bucket in buckets),
        )


@dataclass
class Stages:
    """Milliseconds a stage took, in the order in which they ran."""

    metrics: Metrics
    milliseconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)

    def end(self, name: str) -> None:
        """Books the time since the last call (or the start) on the stage `name`."""
        now = time.monotonic()
        self.metrics.stage(name, now - self._since)
        self.milliseconds[name] = round((now - self._since) * 1000, 3)
        self._since = now


class Generator:
    """Turns generations into latents, many at a time. Belongs to one event loop."""

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        engines: Engines,
        limits: Limits,
        metrics: Metrics,
        placement: Placement,
    ) -> None:
        """
        Args:
            checkpoint: the repository's `checkpoint.json`.
        """
        self._engines = engines
        self._placement = placement
        self._metrics = metrics
        self._scheduler = Scheduler(checkpoint["scheduler"])
        self._encoder_fingerprint = checkpoint["components"]["text_encoder"]
        self._dropped_tokens = checkpoint["prompt_template_dropped_tokens"]
        self._pad_token_id = checkpoint["pad_token_id"]
        vae = checkpoint["vae"]
        self._channels = vae["z_dim"]
        self._scale_factor = vae["scale_factor"]
        self._latents_mean = torch.tensor(vae["latents_mean"]).view(1, -1, 1, 1)
        # The pipeline divides by the reciprocal; multiplying would round differently.
        self._latents_std = 1.0 / torch.tensor(vae["latents_std"]).view(1, -1, 1, 1)
        self._text_buckets = sorted({*limits.text_buckets, checkpoint["max_prompt_tokens"]})
        self._admission = Admission(limits.max_in_flight, limits.max_queued, metrics.load)
        self._encoded: OutputCache[tuple[str, bytes], torch.Tensor] = OutputCache(
            limits.encoder_cache_bytes, lambda states: states.nbytes, metrics.encoder_cache
        )
        self._modulations: OutputCache[float, Modulation] = OutputCache(
            limits.modulation_cache_bytes,
            lambda modulation: modulation.block.nbytes + modulation.final.nbytes,
            metrics.modulation_cache,
        )

    async def generate(
        self, generation: Generation, stop: StopSignal
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns latents FP32 [n, 16, h, w] on the CPU, ready for the VAE, and the record of the
        work.

        Raises:
            GenerationError: see its subclasses; `stop` is looked at in every step.
        """
        stages = Stages(self._metrics)
        async with self._admission.place(stop):
            stages.end("queue")
            stop.check()
            # Waited for to the end, also when cancelled: a place that was left earlier would let
            # more computations pile up than there are places.
            prompts, cache = await self._encode(generation)
            stages.end("encode")
            stop.check()
            h = generation.height // self._scale_factor
            w = generation.width // self._scale_factor
            schedule = self._scheduler.schedule(generation.num_inference_steps, h * w // 4)
            modulations, computed = await self._modulations.get_many(
                schedule.timesteps.tolist(), self._modulate
            )
            cache["modulation_misses"] = computed
            cache["modulation_hits"] = len(set(schedule.timesteps.tolist())) - computed
            stages.end("modulation")

            latents = initial_noise(generation.seeds, self._channels, h, w)
            latents = latents.to(self._placement.device)
            conditioning = self._condition(
                prompts, generation.num_images_per_prompt, rows=h // 2, columns=w // 2
            )
            for step, modulation in enumerate(modulations):
                stop.check_known()
                prediction = asyncio.create_task(
                    self._engines.predict_noise(
                        latents.to(self._placement.dtype).repeat(len(prompts), 1, 1),
                        conditioning,
                        modulation,
                    )
                )
                # What asks or tells the server something does so while the engine computes.
                await asyncio.sleep(0)
                if step:
                    self._metrics.step()
                noise_pred = (await stop.during(prediction)).float()
                if generation.guided:
                    positive, negative = noise_pred.chunk(2)
                    noise_pred = guide(positive, negative, generation.true_cfg_scale)
                latents = euler_step(
                    latents, noise_pred, schedule.sigmas[step], schedule.sigmas[step + 1]
                )
            self._metrics.step()
            stop.check()
            latents = unpack(latents.cpu(), h, w) / self._latents_std + self._latents_mean
            stages.end("denoise")
        record = {
            "request_id": generation.request_id,
            "height": generation.height,
            "width": generation.width,
            "num_inference_steps": generation.num_inference_steps,
            "true_cfg_scale": generation.true_cfg_scale,
            "num_images_per_prompt": generation.num_images_per_prompt,
            "seeds": generation.seeds,
            "prompt_tokens": generation.input_ids.size - self._dropped_tokens,
            "negative_prompt_tokens": generation.negative_input_ids.size - self._dropped_tokens,
            "stages_ms": stages.milliseconds,
            "cache": cache,
        }
        return latents, record

    async def _encode(self, generation: Generation) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Returns the encoded prompt and, when guided, negative prompt, each [T, text width]."""

        async def encode(ids: torch.Tensor) -> tuple[torch.Tensor, int]:
            async def compute(_: list[tuple[str, bytes]]) -> list[torch.Tensor]:
                return [await self._encode_text(ids)]

            key = (self._encoder_fingerprint, ids.numpy().tobytes())
            values, computed = await self._encoded.get_many([key], compute)
            return values[0], computed

        texts = [generation.input_ids, generation.negative_input_ids][: 1 + generation.guided]
        encoded = await asyncio.gather(*(encode(torch.from_numpy(ids)) for ids in texts))
        words = ["miss" if computed else "hit" for _, computed in encoded] + ["off"]
        return [states for states, _ in encoded], {
            "prompt": words[0],
            "negative_prompt": words[1],
        }

    async def _encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        """Pads INT64 [S] to its bucket (harmless: the encoder is causal), encodes, cuts again."""
        tokens = ids.numel() - self._dropped_tokens
        padded = torch.full(
            (1, self._dropped_tokens + self._bucket(tokens)), self._pad_token_id, dtype=torch.int64
        )
        padded[0, : ids.numel()] = ids
        return self._placed((await self._engines.encode_text(padded))[0, :tokens])

    async def _modulate(self, timesteps: list[float]) -> list[Modulation]:
        modulations = await self._engines.modulate(torch.tensor(timesteps, dtype=torch.float32))
        return [
            Modulation(self._placed(block), final.to("cpu", self._placement.dtype, copy=True))
            for block, final in modulations
        ]

    def _placed(self, output: torch.Tensor) -> torch.Tensor:
        """A part of an engine's output as `dit` takes it, without the memory of the rest."""
        return output.to(self._placement.device, self._placement.dtype, copy=True)

    def _condition(
        self, prompts: list[torch.Tensor], images: int, rows: int, columns: int
    ) -> Conditioning:
        """Pads the prompts to one bucket, `images` rows each, so that requests batch."""
        length = self._bucket(max(len(prompt) for prompt in prompts))
        states = prompts[0].new_zeros(len(prompts), length, prompts[0].shape[-1])
        mask = torch.zeros(len(prompts), length, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            states[row, : len(prompt)] = prompt
            mask[row, : len(prompt)] = True
        ids = position_ids(length, rows, columns)
        return Conditioning(
            encoder_hidden_states=states.repeat_interleave(images, dim=0),
            text_mask=mask.repeat_interleave(images, dim=0),
            position_ids=ids.repeat(len(prompts) * images, 1, 1),
        )

    def _bucket(self, tokens: int) -> int:
        return next(bucket for bucket in self._text_buckets if bucket >= tokens)
