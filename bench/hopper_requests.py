"""Requests through Triton on one CUDA GPU: what a client sees, and what of it the engines take.

    python -m bench.hopper_requests REPOSITORY [--guided] [--out FILE]

REPOSITORY is one of the profile h200-torch: an exported one, or one of `bench.hopper_repository`.
Every request has a prompt and a seed of its own; warm-up apart. Takes six minutes on an H200, with
--guided, for guided requests alone, two.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from bench.common import RESULTS, Stopwatch, earlier_results, versions
from bench.gpu_timing import PACKAGES, gpu_machine
from bench.serving import engine_seconds
from qwen_image_client import AsyncClient
from qwen_image_client.bench import make_prompts
from serving.server import ServeError, TritonServer
from tests.e2e.serving_helpers import parameter, variant

PROFILE = "h200-torch"
TEXT_TOKENS = (97, 128)  # of a prompt: the bucket of 128
# Height and width: the model's own, by its card.
NATIVE = ((1328, 1328), (928, 1664), (1104, 1472), (1056, 1584))
FORMATS = ("jpeg", "png", "webp")
MPS = "nvidia-cuda-mps"  # the processes of NVIDIA's Multi-Process Service
Answer = tuple[float, Any]  # seconds at the client, what came


class Load:
    """Sends requests to a server, each with a new prompt and seed."""

    def __init__(self, server: TritonServer) -> None:
        self.server = server
        models = server.repository / "model_repository"
        checkpoint = json.loads((models / "checkpoint.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(models / "tokenize" / "1" / "tokenizer.json"))
        template, dropped = (
            checkpoint["prompt_template"],
            checkpoint["prompt_template_dropped_tokens"],
        )
        self._tokens = lambda text: len(tokenizer.encode(template.format(text)).ids) - dropped
        self._numbers = itertools.count()

    def prompt(self) -> str:
        """A new one, of as many tokens as TEXT_TOKENS says."""
        number = next(self._numbers)
        sentences = itertools.cycle(make_prompts(50, number, repeat=False))
        words = " ".join(itertools.islice(sentences, 8)).split()
        fitting = (" ".join(words[:count]) for count in range(len(words), 0, -1))
        return next(text for text in fitting if self._tokens(text) <= TEXT_TOKENS[1])

    def series(
        self, count: int, in_flight: int = 1, prompts: list[str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Sends `count` requests; prompts: instead of new ones."""
        chosen = prompts or [self.prompt() for _ in range(count)]
        computed = engine_seconds(self.server)
        watch = Stopwatch()
        answers = asyncio.run(self._send(chosen, in_flight, fields))
        seconds = watch.seconds()
        computed = engine_seconds(self.server) - computed
        latencies = [latency for latency, _ in answers]
        records = [answer.metadata for _, answer in answers]
        tokens = [record["prompt_tokens"] for record in records]
        result: dict[str, Any] = {
            "requests": len(answers),
            "in_flight": in_flight,
            **fields,
            "prompt_tokens": [min(tokens), max(tokens)],
            "latency_ms": median_and_range([1e3 * latency for latency in latencies]),
            "stages_ms": {
                stage: median_and_range([record["stages_ms"][stage] for record in records])
                for stage in records[0]["stages_ms"]
            },
            "bytes": round(statistics.median(len(answer.encoded[0]) for _, answer in answers)),
            "engines_ms": round(1e3 * computed / len(answers), 2),
            "images_per_second": round(len(answers) / seconds, 4),
        }
        if in_flight == 1:
            result["overhead_over_engines"] = round(sum(latencies) / computed - 1, 4)
        return result

    def new_schedules(self, steps: int, shape: dict[str, Any]) -> list[float]:
        """Milliseconds of the modulations of three: of so many steps and of a few less."""
        found = [self.series(1, num_inference_steps=steps - i, **shape) for i in range(3)]
        return median_and_range([each["stages_ms"]["modulation"][0] for each in found])

    async def _send(
        self, prompts: list[str], in_flight: int, fields: dict[str, Any]
    ) -> list[Answer]:
        waiting = iter(prompts)
        answers: list[Answer] = []

        async def work() -> None:
            for prompt in waiting:
                started = time.perf_counter()
                answer = await client.generate(prompt, seed=random.randrange(2**31), **fields)
                answers.append((time.perf_counter() - started, answer))

        async with AsyncClient(self.server.grpc_url, retries=0) as client:
            await asyncio.gather(*(work() for _ in range(in_flight)))
        return answers


def median_and_range(values: list[float]) -> list[float]:
    return [round(value, 2) for value in (statistics.median(values), min(values), max(values))]


def measure(
    repository: Path,
    side: int = 1024,
    steps: int = 50,
    requests: int = 10,
    in_flight: int = 8,
    native: tuple[tuple[int, int], ...] = NATIVE,
) -> Iterator[dict[str, Any]]:
    """Yields the result whenever a part of it is there; medians, lowest, highest.

    side: of the pictures; others have half of it. steps: of a guided request. in_flight: how many
    of the smaller pictures are asked for together. native: other heights and widths.
    """
    result: dict[str, Any] = {}
    whole: dict[str, Any] = {"height": side, "width": side, "output_format": "jpeg"}
    half = whole | {"height": side // 2, "width": side // 2}
    with started(repository, result) as server:
        load = Load(server)
        guided(load, result, steps, requests, whole)
        yield result

        load.series(2, num_inference_steps=4, true_cfg_scale=1.0, **whole)
        result["four steps, no guidance"] = load.series(
            requests, num_inference_steps=4, true_cfg_scale=1.0, **whole
        )
        prompts = [load.prompt() for _ in range(requests)]
        result["text encoder"] = {
            kind: load.series(requests, prompts=prompts, num_inference_steps=4, **whole)[
                "stages_ms"
            ]["encode"]
            for kind in ("new prompts", "the same prompts")
        }
        result["formats"] = {}
        for name in FORMATS:
            shape = whole | {"output_format": name}
            found = load.series(requests, num_inference_steps=4, true_cfg_scale=1.0, **shape)
            result["formats"][name] = {
                "pack_ms": found["stages_ms"]["pack"],
                "bytes": found["bytes"],
            }
        result["a new schedule of modulations, ms"] = load.new_schedules(steps - 1, whole)
        yield result

        load.series(in_flight, in_flight, num_inference_steps=8, **half)
        load.series(1, num_inference_steps=8, **half)
        result["half the side"] = load.series(requests, num_inference_steps=steps, **half)
        yield result
        together = load.series(3 * in_flight, in_flight, num_inference_steps=steps, **half)
        alone = result["half the side"]["images_per_second"]
        rate = together["images_per_second"]
        together["of one at a time"] = round(rate / alone, 2)
        together["of the rate at the whole side"] = round(
            rate / result["guided"]["images_per_second"], 2
        )
        result["half the side, several in flight"] = together
        yield result

        result["native sizes"] = {}
        for height, width in native:
            shape = whole | {"height": height, "width": width, "num_inference_steps": 8}
            load.series(1, **shape)
            result["native sizes"][f"{width}×{height}"] = load.series(3, **shape)
            yield result
        result["memory_gb_after_all"] = round(used_gb() - result["memory_gb_before"], 2)

    with tempfile.TemporaryDirectory(dir=repository.parent) as folder:
        change = {f"modulation/configs/{PROFILE}.pbtxt": [parameter("weights", "device", "host")]}
        other: dict[str, Any] = {}
        with started(variant(repository, Path(folder) / "host", change), other) as server:
            load = Load(server)
            load.series(1, num_inference_steps=4, **whole)
            other["a new schedule of modulations, ms"] = load.new_schedules(steps, whole)
        result["modulation's weights on the host"] = other
    yield result


def guided(
    load: Load, result: dict[str, Any], steps: int, requests: int, shape: dict[str, Any]
) -> None:
    """Adds what the DiT is, and a series of guided requests."""
    engine = load.server.manifest["engines"]["dit"]
    result["dit"] = {name: engine.get(name) for name in ("precision", "attention")}
    load.series(2, num_inference_steps=steps, **shape)
    result["guided"] = load.series(requests, num_inference_steps=steps, **shape)


def measure_guided(
    repository: Path, side: int = 1024, steps: int = 50, requests: int = 10
) -> dict[str, Any]:
    """The first part of `measure` alone."""
    result: dict[str, Any] = {}
    with started(repository, result) as server:
        shape = {"height": side, "width": side, "output_format": "jpeg"}
        guided(Load(server), result, steps, requests, shape)
    return result


@contextmanager
def started(repository: Path, result: dict[str, Any]) -> Iterator[TritonServer]:
    """A server; how long it took to start and what it took of the GPU's memory."""
    result["mps"] = any(
        (process.info["name"] or "").startswith(MPS) for process in psutil.process_iter(["name"])
    )
    result["memory_gb_before"] = used_gb()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        watch = Stopwatch()
        try:
            with TritonServer(repository, PROFILE, log_path=log) as server:
                result["start_s"] = round(watch.seconds(), 1)
                result["memory_gb_idle"] = round(used_gb() - result["memory_gb_before"], 2)
                result["memory_gb_by_process"] = used_by_process(server)
                yield server
        except BaseException:
            if log.is_file():
                print(log.read_text(encoding="utf-8")[-4000:])
            raise


def used_gb() -> float:
    """Of the first GPU's memory, 0 without one."""
    found = nvidia_smi("--query-gpu=memory.used")
    return round(int(found[0]) * 2**20 / 1e9, 2) if found else 0.0


def used_by_process(server: TritonServer) -> dict[str, float]:
    """GB of the GPU's memory, by what the processes serve."""
    assert server.process is not None
    known = {stub.pid: stub.model for stub in server.stubs()} | {server.process.pid: "tritonserver"}
    result = {}
    for line in nvidia_smi("--query-compute-apps=pid,used_memory"):
        pid, used = line.split(",")
        if int(pid) in known and used.strip().isdecimal():
            result[known[int(pid)]] = round(int(used) * 2**20 / 1e9, 2)
    return result


def nvidia_smi(query: str) -> list[str]:
    """The lines of an answer about the first GPU; none without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "-i", "0", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hopper_requests")
    parser.add_argument("repository", type=Path)
    parser.add_argument("--guided", action="store_true", help="guided requests alone")
    parser.add_argument("--out", type=Path, default=RESULTS / "hopper_requests.json")
    options = parser.parse_args()
    head = {
        "benchmark": "hopper_requests",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": gpu_machine(),
        "versions": versions(*PACKAGES),
    }
    earlier_results(options.out)
    try:
        repository = options.repository.absolute()
        for result in [measure_guided(repository)] if options.guided else measure(repository):
            options.out.write_text(json.dumps(head | result, indent=1) + "\n", encoding="utf-8")
    except ServeError as error:
        parser.exit(1, f"error: {error}\n")
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
