"""Command line of the calibration.

    python -m export.calibrate --checkpoint DIR --out FILE

An interrupted run goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from build.progress import ProgressBar
from export.files import reason
from export.progress import Progress

if TYPE_CHECKING:
    from export.calibration import Calibration

PROMPTS = Path(__file__).with_name("calibration_prompts.txt")
STEPS = 20


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m export.calibrate",
        description="Checkpoint → the ranges of its activations. An interrupted run goes on when "
        "the same command is given again.",
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="diffusers checkpoint folder"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the file to write or to go on with"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        default=PROMPTS,
        help="a text file, one prompt a line, or a .jsonl file with prompt and maybe height, width "
        "and seed a line; by default 64 prompts in English and Chinese",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    for name in ("--height", "--width"):
        parser.add_argument(
            name, type=int, help="for prompts without their own; by default the checkpoint's"
        )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="cpu computes in FP32, cuda in BF16; by default cuda if there is one",
    )
    parser.add_argument(
        "--offload", action="store_true", help="keep on the GPU only the model that runs"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as tidily as Ctrl-C
    bar = ProgressBar()
    try:
        # These take seconds.
        import torch

        from export import CheckpointError, ExportError

        try:
            calibration = run(options, bar)
        except (CheckpointError, ExportError) as error:
            return failed(bar, str(error))
        except torch.OutOfMemoryError:
            hint = "--height and --width" if options.offload else "--offload"
            return failed(bar, f"the GPU has too little memory: try {hint}")
        except OSError as error:
            return failed(bar, reason(error, options.out))
    except KeyboardInterrupt:
        bar.close()
        print("calibration interrupted: the same command goes on with it", file=sys.stderr)
        return 130
    bar.close()
    total = calibration.settings["total"]
    print(f"{options.out}: {len(calibration.names)} activations over {total} prompts")
    return 0


def failed(bar: ProgressBar, why: str) -> int:
    bar.close()
    print(f"calibration failed: {why}", file=sys.stderr)
    return 1


def run(options: argparse.Namespace, progress: Progress) -> Calibration:
    import torch

    from export import Checkpoint, ExportError
    from export.activations import calibrate, check_prompts, read_prompts

    # In a single step diffusers divides by zero.
    for name, least in (("steps", 2), ("height", 1), ("width", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ExportError(f"--{name} is {value}, but it must be at least {least}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ExportError("--device cuda needs an NVIDIA GPU, but torch finds none")
    if options.offload and device != "cuda":
        raise ExportError("--offload needs --device cuda")
    prompts = read_prompts(options.prompts)
    checkpoint = Checkpoint(options.checkpoint)
    progress("fingerprint", 0, 1)
    prompts = check_prompts(prompts, checkpoint, options.height, options.width)
    progress("fingerprint", 1, 1)
    return calibrate(
        checkpoint, options.out, prompts, options.steps, device, options.offload, progress
    )


if __name__ == "__main__":
    sys.exit(main())
