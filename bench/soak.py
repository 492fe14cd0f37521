"""Many small requests of random sizes and steps, some cancelled: does anything fail or grow?

python -m bench.soak [--requests 300] [--concurrency 6] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import Any

import psutil
from tqdm import tqdm

from bench.common import small_repository, write_result
from qwen_image_client import AsyncClient
from serving.server import TritonServer

# Of the requests: the first ones bring every engine to the largest shapes, then memory is flat.
WARM_UP = 0.25
CANCELLED = 0.15


def memory(server: TritonServer) -> dict[str, int]:
    """Returns bytes that are resident and not shared: of the server, and of every model's stub."""
    assert server.process is not None
    sizes = {"tritonserver": _private(server.process.pid)}
    for stub in server.stubs():
        sizes[stub.model] = sizes.get(stub.model, 0) + _private(stub.pid)
    return sizes


def _private(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().uss)


async def soak(server: TritonServer, requests: int, concurrency: int, seed: int) -> dict[str, Any]:
    """Sends the requests and returns counts, and memory after warm-up and at the end."""
    draw = random.Random(seed)
    counts = {"ok": 0, "cancelled": 0, "failed": 0}
    failures: list[str] = []
    slots = asyncio.Semaphore(concurrency)

    async with AsyncClient(server.grpc_url) as client:

        async def one(number: int, fields: dict[str, Any], cancel_after: float | None) -> None:
            async with slots:
                task = asyncio.ensure_future(client.generate(f"prompt {number % 50}", **fields))
                if cancel_after is not None:
                    await asyncio.sleep(cancel_after)
                    task.cancel()
                try:
                    await task
                    counts["ok"] += 1
                except asyncio.CancelledError:
                    counts["cancelled"] += 1
                except Exception as error:
                    counts["failed"] += 1
                    failures.append(f"{type(error).__name__}: {error}")
            bar.update()

        def work(number: int) -> Any:
            fields = {
                "height": 16 * draw.randint(1, 10),
                "width": 16 * draw.randint(1, 10),
                "num_inference_steps": draw.randint(1, 12),
                "num_images_per_prompt": draw.choice([1, 1, 1, 2, 4]),
                "true_cfg_scale": draw.choice([1.0, 4.0, 7.0]),
                "seed": draw.randrange(2**40),
            }
            return one(number, fields, draw.uniform(0, 0.3) if draw.random() < CANCELLED else None)

        largest = {"height": 160, "width": 160, "num_images_per_prompt": 4}
        first = int(requests * WARM_UP)
        with tqdm(total=requests + concurrency, desc="soak") as bar:
            await asyncio.gather(
                *(one(n, largest | {"num_inference_steps": 3}, None) for n in range(concurrency))
            )
            await asyncio.gather(*(work(number) for number in range(first)))
            warm = memory(server)
            await asyncio.gather(*(work(number) for number in range(first, requests)))
            end = memory(server)
    growth = {model: end[model] - warm[model] for model in warm}
    return {
        "requests": requests + concurrency,
        **counts,
        "failures": failures[:5],
        "bytes_after_warm_up": warm,
        "growth_bytes": growth,
        "growth_of_total": sum(growth.values()) / sum(warm.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with TritonServer(small_repository()) as server:
        values = asyncio.run(
            soak(server, arguments.requests, arguments.concurrency, arguments.seed)
        )
    print({key: values[key] for key in ("requests", "ok", "cancelled", "failed")})
    print(f"memory: {values['growth_of_total']:+.1%} after the warm-up")
    print(write_result("soak", values))
    return 1 if values["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
