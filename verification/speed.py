"""How long requests take on this machine, at the client and stage by stage."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
import urllib.request
from typing import Any

from quality.gate import Gate, QualityError
from qwen_image_client import AsyncClient, QwenImageError

REQUESTS = 10
IN_FLIGHT = 8  # as many as `denoise` runs at once by default


def measure_speed(url: str, metrics_url: str, gate: Gate) -> dict[str, Any]:
    """Requests of the gate, one after the other and several at once, after a warm-up.

    Returns:
        `seconds`: median, lowest and highest of `requests` requests with different prompts and
        seeds, none of them asked before; `stages_ms`: median milliseconds of each stage;
        `together`: seconds and pictures a second of twice `in_flight` requests, so many at a
        time; `gpu_memory_used_bytes`: of each GPU that the server sees, while idle.

    Raises:
        QualityError: the server refuses a request.
    """
    return asyncio.run(_measure(url, metrics_url, gate))


async def _measure(url: str, metrics_url: str, gate: Gate) -> dict[str, Any]:
    count = len(gate.prompts)

    def fields(number: int) -> dict[str, Any]:
        """The gate's prompts in their order, changed each time that they come again."""
        prompt = f"{gate.prompts[number % count].text} {number}"
        return {**gate.fields, "prompt": prompt, "seed": 10_000 + number, "output_format": "jpeg"}

    async with AsyncClient(url) as client:
        try:
            await client.generate(**fields(0))
            memory = gpu_memory(metrics_url)
            seconds, stages = [], []
            for number in range(1, 1 + REQUESTS):
                started = time.perf_counter()
                generation = await client.generate(**fields(number))
                seconds.append(time.perf_counter() - started)
                stages.append(generation.metadata["stages_ms"])
            first = 1 + REQUESTS
            await _together(client, [fields(first + i) for i in range(IN_FLIGHT)])  # warm-up
            first += IN_FLIGHT
            many = [fields(first + i) for i in range(2 * IN_FLIGHT)]
            started = time.perf_counter()
            await _together(client, many)
            together = time.perf_counter() - started
        except QwenImageError as error:
            raise QualityError(f"no picture: {error}") from None
    return {
        "fields": gate.fields,
        "requests": REQUESTS,
        "seconds": {
            "median": statistics.median(seconds),
            "lowest": min(seconds),
            "highest": max(seconds),
        },
        "stages_ms": {
            name: statistics.median(stage[name] for stage in stages) for name in stages[0]
        },
        "in_flight": IN_FLIGHT,
        "together": {"seconds": together, "pictures_a_second": len(many) / together},
        "gpu_memory_used_bytes": memory,
    }


async def _together(client: AsyncClient, requests: list[dict[str, Any]]) -> None:
    places = asyncio.Semaphore(IN_FLIGHT)

    async def one(fields: dict[str, Any]) -> None:
        async with places:
            await client.generate(**fields)

    await asyncio.gather(*(one(fields) for fields in requests))


def gpu_memory(metrics_url: str) -> dict[str, int]:
    """Bytes in use of each GPU, by its UUID; none where Triton sees no GPU."""
    with urllib.request.urlopen(metrics_url, timeout=10) as response:
        text = response.read().decode()
    pattern = r'^nv_gpu_memory_used_bytes\{gpu_uuid="([^"]+)"\} (\S+)$'
    return {uuid: int(float(value)) for uuid, value in re.findall(pattern, text, re.MULTILINE)}
