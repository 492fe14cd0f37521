"""What serving costs beside the engines, and what batching gains: ratios on this machine's CPU.

    python -m bench.serving

Ratios compare times of one run on one machine; the times themselves say nothing about another.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

import numpy as np
import onnxruntime
import tritonclient.grpc as grpcclient

from bench.common import Stopwatch, small_repository, write_result
from export.recipe import ENGINES
from qwen_image_client import AsyncClient, Client
from serving.server import TritonServer

REPEATS = 5


def engine_seconds(server: TritonServer) -> float:
    """Seconds that the engines computed since the server's start, by Triton's statistics."""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        total = 0
        for model in ENGINES:
            (stats,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
            # By batches: `inference_stats` counts one once for each of its requests.
            for batch in stats.get("batch_stats", []):
                total += int(batch["compute_infer"].get("ns", 0))
    return total / 1e9


def overhead(server: TritonServer) -> dict[str, Any]:
    """A 20-step request at 512×512: time at the client beyond the time of the engines."""
    shares = []
    with Client(server.grpc_url) as client:
        for seed in range(REPEATS + 1):
            before, watch = engine_seconds(server), Stopwatch()
            client.generate(
                f"prompt {seed}", num_inference_steps=20, height=512, width=512, seed=seed
            )
            total = watch.seconds()
            computed = engine_seconds(server) - before
            shares.append((total - computed) / computed)
    shares = shares[1:]  # the first one warms up
    return {"overhead_over_engine_time": statistics.median(shares), "runs": shares}


def batching(server: TritonServer) -> dict[str, Any]:
    """Eight 256×256 requests at once, against the same eight one after the other."""

    async def eight(client: AsyncClient, first_seed: int, together: bool) -> float:
        def request(seed: int) -> Any:
            return client.generate(
                f"prompt {seed}", num_inference_steps=20, height=256, width=256, seed=seed
            )

        seeds = range(first_seed, first_seed + 8)
        watch = Stopwatch()
        if together:
            await asyncio.gather(*(request(seed) for seed in seeds))
        else:
            for seed in seeds:
                await request(seed)
        return watch.seconds()

    async def measure() -> list[float]:
        async with AsyncClient(server.grpc_url) as client:
            await eight(client, 0, together=True)  # the prompts are encoded, all is warm
            ratios = []
            for _ in range(REPEATS):
                apart = await eight(client, 0, together=False)
                ratios.append(await eight(client, 0, together=True) / apart)
            return ratios

    ratios = asyncio.run(measure())
    return {"together_over_one_after_the_other": statistics.median(ratios), "runs": ratios}


def rows(repository: Any) -> dict[str, Any]:
    """Time a row of the DiT in ONNX Runtime alone, by rows a batch, relative to one row.

    Two rows against one: whether a guided step should be one call of two or two calls. Below 1 a
    larger batch gains; the rest of what batching could gain is bounded by this.
    """
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False  # as the backend does
    session = onnxruntime.InferenceSession(
        str(repository / "model_repository/dit/1/model.onnx"),
        options,
        providers=["CPUExecutionProvider"],
    )
    result = {}
    for side in (256, 512):
        tokens = (side // 16) ** 2
        times = {count: _time_of(session, count, tokens) / count for count in (1, 2, 4, 8)}
        result[f"{side}x{side}"] = {count: times[count] / times[1] for count in times}
    return {"time_a_row_by_rows": result}


def _time_of(session: onnxruntime.InferenceSession, rows: int, tokens: int) -> float:
    random = np.random.default_rng(0)
    text_tokens = 32
    sizes = {"batch": rows, "image_tokens": tokens, "text_tokens": text_tokens}
    sizes["all_tokens"] = tokens + text_tokens
    batch: dict[str, Any] = {}
    for tensor in session.get_inputs():
        shape = [sizes.get(dim, dim) for dim in tensor.shape]
        if tensor.type == "tensor(float)":
            batch[tensor.name] = random.standard_normal(shape, dtype=np.float32)
        elif tensor.type == "tensor(bool)":
            batch[tensor.name] = np.ones(shape, np.bool_)
        else:
            batch[tensor.name] = random.integers(0, 32, shape, dtype=np.int32)
    session.run(None, batch)
    seconds = []
    for _ in range(REPEATS):
        watch = Stopwatch()
        session.run(None, batch)
        seconds.append(watch.seconds())
    return min(seconds)


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__).parse_args()
    repository = small_repository()
    values = rows(repository)
    with TritonServer(repository) as server:
        values["overhead"] = overhead(server)
        values["batching"] = batching(server)
    path = write_result("serving", values)
    print(f"serving overhead: {values['overhead']['overhead_over_engine_time']:.1%} of engine time")
    ratio = values["batching"]["together_over_one_after_the_other"]
    print(f"eight together: {ratio:.2f} × the time of the eight one after the other")
    for size, by_rows in values["time_a_row_by_rows"].items():
        shown = ", ".join(f"{count} rows {time:.2f}" for count, time in by_rows.items())
        print(f"DiT {size}, time a row: {shown}")
    print(path)


if __name__ == "__main__":
    main()
