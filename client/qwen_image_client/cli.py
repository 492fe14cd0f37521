"""The command `qwen-image`: generate, status, bench.

Exit codes: 0 done, 1 failed (one sentence on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import bench
from .async_client import AsyncClient
from .client import Client
from .errors import InvalidRequestError, QwenImageError

# File suffixes of each `output_format`, the usual one first.
SUFFIXES = {"png": (".png",), "jpeg": (".jpg", ".jpeg"), "webp": (".webp",)}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except QwenImageError as error:
        print(f"qwen-image: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"qwen-image: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("qwen-image: interrupted, requests under way were cancelled", file=sys.stderr)
        return 130


def generate(options: argparse.Namespace) -> int:
    output: Path = options.output
    fields = _fields(options)
    fields["output_format"] = _output_format(output, options.output_format)
    if output.is_dir():
        raise InvalidRequestError(f"{output} is a folder: name a file")
    if not output.absolute().parent.is_dir():
        raise InvalidRequestError(f"the folder of {output} does not exist")
    with Client(options.url, options.protocol) as client:
        begin = time.perf_counter()
        answer = client.generate(options.prompt, seed=options.seed, **fields)
        seconds = time.perf_counter() - begin
    several = len(answer.encoded) > 1
    for number, (data, seed) in enumerate(zip(answer.encoded, answer.seeds, strict=True), 1):
        path = output.with_stem(f"{output.stem}-{number}") if several else output
        path.write_bytes(data)
        print(f"{path}  seed {seed}")
    print(f"{seconds:.2f} s")
    return 0


def status(options: argparse.Namespace) -> int:
    with Client(options.url, options.protocol) as client:
        state = client.status(options.metrics_url)
    if options.json:
        print(json.dumps(dataclasses.asdict(state), indent=2))
    else:
        print(f"Triton {state.triton_version}  {'ready' if state.ready else 'not ready'}")
        for model in state.models:
            mean = "" if model.mean_ms is None else f"  {model.mean_ms:.1f} ms"
            print(
                f"  {model.name:<16} {model.version:>3} {model.state:<12}"
                f" {model.succeeded} done, {model.failed} failed{mean}  {model.reason}".rstrip()
            )
        for name, value in state.metrics.items():
            print(f"  {name} {value:g}")
    return 0 if state.ready else 1


def run_bench(options: argparse.Namespace) -> int:
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise InvalidRequestError(f"the folder of {options.json} does not exist")
    report = asyncio.run(_bench(options))
    latency = report["latency_seconds"]
    print(
        f"{report['succeeded']} of {report['requests']} requests succeeded "
        f"({report['success_rate']:.1%}), {report['images']} images in "
        f"{report['seconds']:.2f} s: {report['images_per_second']:.3f} images/s"
    )
    if latency is not None:
        print(
            f"latency P50 {latency['p50']:.3f} s, P95 {latency['p95']:.3f} s, "
            f"P99 {latency['p99']:.3f} s, mean {latency['mean']:.3f} s"
        )
    for stage, values in report["stages"].items():
        print(f"  {stage:<12} {values['mean_ms']:10.1f} ms  {values['share']:6.1%}")
    for name, error in report["errors"].items():
        print(f"  {error['count']} x {name}: {error['first']}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["succeeded"] else 1


async def _bench(options: argparse.Namespace) -> dict[str, Any]:
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    async with AsyncClient(options.url, options.protocol, retries=0) as client:
        version = (await client.status()).triton_version
        with tqdm(total=options.requests, unit="request", disable=None) as progress:
            report = await bench.run(
                client,
                requests=options.requests,
                concurrency=options.concurrency,
                warmup=options.warmup,
                seed=seed,
                repeat_prompt=options.repeat_prompt,
                fields={k: v for k, v in _fields(options).items() if v is not None},
                on_done=progress.update,
            )
    return {"protocol": options.protocol, "triton_version": version, **report}


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "negative_prompt": options.negative_prompt,
        "num_inference_steps": options.num_inference_steps,
        "true_cfg_scale": options.true_cfg_scale,
        "height": options.height,
        "width": options.width,
        "num_images_per_prompt": options.num_images_per_prompt,
        "output_format": options.output_format,
        "timeout": options.timeout,
    }


def _output_format(output: Path, wanted: str | None) -> str:
    """The format that the file's name asks for. Raises InvalidRequestError."""
    suffix = output.suffix.lower()
    named = next((name for name, suffixes in SUFFIXES.items() if suffix in suffixes), None)
    if named is None:
        known = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise InvalidRequestError(f"{output} must end in one of {known}")
    if wanted not in (None, named):
        raise InvalidRequestError(f"{output} does not fit --output-format {wanted}")
    return named


def _parser() -> argparse.ArgumentParser:
    connection = argparse.ArgumentParser(add_help=False)
    connection.add_argument(
        "--url", help="host:port of the server (localhost:8001 for grpc, localhost:8000 for http)"
    )
    connection.add_argument("--protocol", choices=("grpc", "http"), default="grpc")

    request = argparse.ArgumentParser(add_help=False)
    request.add_argument("--negative-prompt")
    request.add_argument("--num-inference-steps", type=int)
    request.add_argument("--true-cfg-scale", type=float)
    request.add_argument("--height", type=int)
    request.add_argument("--width", type=int)
    request.add_argument("--num-images-per-prompt", type=int)
    request.add_argument("--output-format", choices=tuple(SUFFIXES))
    request.add_argument("--timeout", type=float, help="seconds for one request")

    parser = argparse.ArgumentParser(
        prog="qwen-image", description="Client of a Triton server that serves Qwen-Image."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "generate", parents=[connection, request], help="write images for a prompt"
    )
    command.add_argument("prompt")
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("out.png"),
        help="the file (out.png); several images are numbered: out-1.png, out-2.png, …",
    )
    command.add_argument("--seed", type=int)
    command.set_defaults(command=generate)

    command = commands.add_parser(
        "status", parents=[connection], help="say what the server and its models are doing"
    )
    command.add_argument(
        "--metrics-url", help="also show the service's metrics (http://localhost:8002/metrics)"
    )
    command.add_argument("--json", action="store_true")
    command.set_defaults(command=status)

    command = commands.add_parser(
        "bench", parents=[connection, request], help="measure latency and throughput"
    )
    command.add_argument("--requests", type=_positive, default=10)
    command.add_argument("--concurrency", type=_positive, default=1)
    command.add_argument(
        "--warmup", type=_natural, default=1, help="requests before, which are not measured (1)"
    )
    command.add_argument(
        "--seed", type=_natural, help="repeats an earlier run's prompts and seeds (random)"
    )
    command.add_argument(
        "--repeat-prompt", action="store_true", help="send one prompt over and over"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    command.set_defaults(command=run_bench)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number
