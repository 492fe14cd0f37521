"""Measures a running server with requests that no cache can flatter."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from .async_client import AsyncClient
from .errors import QwenImageError
from .results import Generation

SUBJECTS = (
    "a red fox",
    "an old lighthouse",
    "two children with a kite",
    "a bowl of ramen",
    "a steam locomotive",
    "a porcelain teapot shaped like a cat",
    "a violinist in a yellow coat",
    "a glass greenhouse full of orchids",
)
PLACES = (
    "on a quiet street in the rain",
    "at the edge of a frozen lake",
    "in a crowded night market",
    "in the middle of a wheat field under heavy clouds",
    "on a rooftop above the city",
    "beside a mountain road",
)
STYLES = (
    "watercolour",
    "35 mm photograph, shallow depth of field",
    "flat vector illustration with bold outlines",
    "oil painting",
    "isometric 3D render",
)


def make_prompts(count: int, seed: int, repeat: bool) -> list[str]:
    """`count` prompts, all different (a number ends each), or one prompt repeated."""
    source = random.Random(seed)
    prompts = [
        f"{source.choice(SUBJECTS)} {source.choice(PLACES)}, {source.choice(STYLES)}, "
        f"number {source.randrange(10**9)}-{index}"
        for index in range(count)
    ]
    return [prompts[0]] * count if repeat else prompts


async def run(
    client: AsyncClient,
    requests: int,
    concurrency: int,
    warmup: int,
    seed: int,
    repeat_prompt: bool,
    fields: dict[str, Any],
    on_done: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Sends `requests` requests, `concurrency` at a time, after `warmup` unmeasured ones.

    seed: prompts and image seeds follow from it. fields: further arguments of `generate`.
    on_done: called after each measured request. The client should not retry, or refusals hide
    in the latency. Returns the report. A failing warm-up raises its QwenImageError.
    """
    prompts = make_prompts(warmup + requests, seed, repeat_prompt)
    seeds = random.Random(seed + 1).sample(range(2**31), warmup + requests)
    for index in range(warmup):
        await client.generate(prompts[index], seed=seeds[index], **fields)

    latencies: list[float] = []
    answers: list[Generation] = []
    failures: Counter[str] = Counter()
    sentences: dict[str, str] = {}
    remaining = iter(range(warmup, warmup + requests))

    async def work() -> None:
        for index in remaining:
            begin = time.perf_counter()
            try:
                answer = await client.generate(prompts[index], seed=seeds[index], **fields)
            except QwenImageError as error:
                failures[type(error).__name__] += 1
                sentences.setdefault(type(error).__name__, str(error))
            else:
                latencies.append(time.perf_counter() - begin)
                answers.append(answer)
            on_done()

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    seconds = time.perf_counter() - begin
    images = sum(len(answer.encoded) for answer in answers)
    return {
        "requests": requests,
        "concurrency": concurrency,
        "warmup": warmup,
        "seed": seed,
        "repeat_prompt": repeat_prompt,
        "fields": fields,
        "succeeded": len(answers),
        "success_rate": len(answers) / requests,
        "errors": {
            name: {"count": count, "first": sentences[name]} for name, count in failures.items()
        },
        "seconds": seconds,
        "images": images,
        "images_per_second": images / seconds,
        "latency_seconds": _latency(latencies),
        "stages": _stages(latencies, answers),
    }


def _latency(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]).tolist()
    return {
        "mean": float(np.mean(seconds)),
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "min": min(seconds),
        "max": max(seconds),
    }


def _stages(latencies: list[float], answers: list[Generation]) -> dict[str, dict[str, float]]:
    """Mean milliseconds of each stage and its share of the mean latency.

    `other` is what the server's stages do not account for: network, Triton, tokenization.
    """
    if not answers:
        return {}
    totals: dict[str, float] = defaultdict(float)
    for answer in answers:
        for stage, milliseconds in answer.metadata.get("stages_ms", {}).items():
            totals[stage] += milliseconds
    latency = 1000 * sum(latencies)
    totals["other"] = max(latency - sum(totals.values()), 0.0)
    return {
        stage: {"mean_ms": total / len(answers), "share": total / latency}
        for stage, total in totals.items()
    }
