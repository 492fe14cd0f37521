"""python -m export --checkpoint DIR --output DIR [--verify auto|full]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from build.progress import ProgressBar
from export import Checkpoint, CheckpointError, ExportError, export_checkpoint


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m export", description="Checkpoint → ONNX engines"
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="diffusers checkpoint folder"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the engines")
    parser.add_argument(
        "--verify",
        choices=("auto", "full"),
        default="auto",
        help="auto: engines above 2 GiB are checked block by block; full: all as a whole",
    )
    options = parser.parse_args(arguments)
    bar = ProgressBar()
    try:
        checkpoint = Checkpoint(options.checkpoint)
        engines = export_checkpoint(checkpoint, options.output, options.verify, bar)
    except (CheckpointError, ExportError) as error:
        bar.close()
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        bar.close()
        print(f"{error.filename or options.output}: {error.strerror}", file=sys.stderr)
        return 1
    bar.close()
    print(f"{options.output}: {', '.join(engines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
