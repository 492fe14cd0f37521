"""The export of a full-size checkpoint in FP8 and in NVFP4: memory, time, size.

    python -m bench.full_size [--blocks 60] [--work DIR]

Makes a random bf16 checkpoint with the DiT and the VAE of Qwen-Image and a shallow text encoder of
its width: the DiT's 20.4 billion parameters are what is measured. The ranges of its activations are
made up, since neither size nor time depends on them. Each precision is exported in a process of its
own, the way `make export` does it, after the one before was deleted. 60 blocks need 75 GB of disk
in DIR.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Stopwatch, check_space, folder_gb, measured_export, positive, write_result
from export import Checkpoint
from export.calibration import FORMAT, save_calibration
from tests.make_checkpoint import make_checkpoint

# DiT → the recipe of each engine, as profiles for GPUs have them.
PRECISIONS = {
    "fp8": {"text_encoder": "fp8", "modulation": "bf16", "dit": "fp8", "vae_decoder": "bf16"},
    "nvfp4": {"text_encoder": "fp8", "modulation": "bf16", "dit": "nvfp4", "vae_decoder": "bf16"},
}
# GB for each block: 0.68 of the checkpoint, 0.23 each of modulation in BF16 and of the DiT in FP8.
# The remainder: the ends of the DiT, text encoder and VAE.
BLOCK_GB, REST_GB = 1.14, 3


def made_checkpoint(folder: Path, blocks: int) -> Path:
    return make_checkpoint(
        folder,
        blocks=blocks,
        heads=24,
        head_size=128,
        rope_axes=(16, 56, 56),
        text_width=3584,
        text_layers=2,
        text_heads=28,
        text_kv_heads=4,
        vae_width=96,
        dtype="bfloat16",
        max_shard_size=2**30,
    )


def made_up_calibration(checkpoint: Checkpoint, path: Path) -> Path:
    """A range of 8 and a mean square of 1 for the input of every matrix of the text encoder and the
    DiT."""
    channels, squares = {}, {}
    for engine, component in (("text_encoder", "text_encoder"), ("dit", "transformer")):
        for name, tensor in checkpoint.tensors[component].items():
            if len(tensor.shape) == 2:
                layer = name.removesuffix(".weight")
                channels[f"{engine}/{layer}"] = np.full(tensor.shape[1], 8, np.float32)
                squares[f"{engine}/{layer}"] = np.ones(tensor.shape[1], np.float32)
    fingerprint = checkpoint.describe()["fingerprint"]
    settings = {"format": FORMAT, "checkpoint": fingerprint, "done": 1, "total": 1}
    save_calibration(path, settings, channels, squares)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.full_size")
    parser.add_argument("--blocks", type=positive, default=60, help="of the DiT (default 60)")
    parser.add_argument("--work", type=Path, help="folder for the temporary files")
    options = parser.parse_args()
    check_space(parser, options.work, BLOCK_GB * options.blocks + REST_GB)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left on the disk
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        work = Path(name)
        print(f"making a checkpoint with {options.blocks} blocks", flush=True)
        watch = Stopwatch()
        path = made_checkpoint(work / "checkpoint", options.blocks)
        checkpoint = Checkpoint(path)
        calibration = made_up_calibration(checkpoint, work / "calibration.safetensors")
        result: dict[str, Any] = {
            "blocks": options.blocks,
            "parameters": sum(p.numel() for p in checkpoint.transformer.parameters()),
            "checkpoint_gb": folder_gb(path / "transformer"),
            "checkpoint_seconds": round(watch.seconds()),
        }
        for precision, recipes in PRECISIONS.items():
            print(f"exporting it with a DiT in {precision}", flush=True)
            output = work / precision
            result[precision] = measured_export(path, output, recipes, calibration)
            shutil.rmtree(output)
            print(json.dumps(result[precision], indent=1), flush=True)
            print(write_result("full_size", result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
