"""The small checkpoint of this project, exported, served, asked for one picture."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from build.profile import BuildError
from build.tiny import REPOSITORY, export_tiny
from serving.errors import ServeError
from serving.server import TritonServer

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def output_problem(path: Path) -> str | None:
    """Why no picture can be written there; found before time is spent on one."""
    if not path.resolve().parent.is_dir():
        return f"there is no folder for {path}"
    if path.is_dir():
        return f"{path} is a folder"
    if path.suffix.lower() not in SUFFIXES:
        return f"{path} has no suffix of a picture: {', '.join(SUFFIXES)}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m serving.demo", description=__doc__)
    parser.add_argument("--prompt", required=True, help="what to draw; see checkpoints/tiny")
    parser.add_argument("--output", type=Path, required=True, help="the picture to write")
    parser.add_argument("--seed", type=int, help="random by default")
    parser.add_argument("--repository", type=Path, default=REPOSITORY)
    arguments = parser.parse_args()
    # These import torch and diffusers, which takes seconds: --help need not wait for them.
    from export import CheckpointError, ExportError
    from qwen_image_client import Client, QwenImageError

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as tidily as Ctrl-C
    problem = output_problem(arguments.output)
    if problem:
        print(f"demo failed: {problem}", file=sys.stderr)
        return 1
    try:
        repository = export_tiny(arguments.repository.resolve())
        print("starting the server …", flush=True)
        with (
            TritonServer(repository) as server,
            Client(server.grpc_url) as client,
        ):
            print(f"asking {server.grpc_url} for {arguments.prompt!r} …", flush=True)
            generation = client.generate(
                arguments.prompt, num_inference_steps=20, seed=arguments.seed
            )
        generation.images[0].save(arguments.output)
    except (BuildError, CheckpointError, ExportError, OSError, QwenImageError, ServeError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo interrupted", file=sys.stderr)
        return 130
    stages = ", ".join(f"{k} {v:.0f} ms" for k, v in generation.metadata["stages_ms"].items())
    print(f"{arguments.output}: seed {generation.seeds[0]} ({stages})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
