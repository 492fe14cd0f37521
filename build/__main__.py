"""Command line of `make onnx` and `make export`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from export.files import reason


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m build", description=__doc__)
    parser.add_argument(
        "until",
        nargs="?",
        choices=("onnx", "export"),
        default="export",
        help="onnx: everything up to the engines, on any machine; export: the whole repository",
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="diffusers layout; not needed with a finished --onnx"
    )
    parser.add_argument("--profile", default="cpu", help="a file in build/profiles/")
    parser.add_argument(
        "--dit-precision", help="the DiT's recipe, of export/recipes/; default: the profile's"
    )
    parser.add_argument("--repository", type=Path, help="default: artifacts/<profile>")
    parser.add_argument(
        "--onnx", type=Path, help="where finished stages are kept; default: <repository>.onnx"
    )
    parser.add_argument(
        "--target", help="the architecture to build for, such as sm120; default: the GPU's here"
    )
    parser.add_argument(
        "--verify",
        choices=("auto", "full"),
        default="auto",
        help="full: check engines over 2 GB as a whole, too",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        help="a file of export.calibrate, for profiles that quantize; made if none is named",
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as tidily as Ctrl-C
    repository = (arguments.repository or Path("artifacts") / arguments.profile).resolve()
    onnx = (arguments.onnx or repository.with_name(f"{repository.name}.onnx")).resolve()
    result = onnx if arguments.until == "onnx" else repository
    print(f"exporting {arguments.checkpoint or onnx} to {result} …", flush=True)
    try:
        # These import torch and diffusers, which takes seconds.
        from build.assemble import assemble, assemble_onnx
        from build.profile import BuildError, load_profile, with_dit_precision
        from build.progress import ProgressBar
        from export import CheckpointError, ExportError

        bar = ProgressBar()
        try:
            profile = load_profile(arguments.profile)
            if arguments.dit_precision is not None:
                profile = with_dit_precision(profile, arguments.dit_precision)
            common = (arguments.verify, bar, 1, arguments.calibration, onnx)
            if arguments.until == "onnx":
                assemble_onnx(arguments.checkpoint, profile, *common)
                done = True
            else:
                done = assemble(
                    arguments.checkpoint, profile, repository, *common, target=arguments.target
                )
        except (BuildError, CheckpointError, ExportError) as error:
            bar.close()
            print(f"export failed: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            bar.close()
            where = onnx if arguments.until == "onnx" else f"{onnx}, {result}"
            print(
                f"export failed: {reason(error, where)}; the same command goes on from what is "
                f"finished in {onnx}",
                file=sys.stderr,
            )
            return 1
        bar.close()
    except KeyboardInterrupt:
        print(
            "export interrupted: the repository is as it was, and the same command goes on from "
            f"what is finished in {onnx}",
            file=sys.stderr,
        )
        return 130
    print(f"{result}: {'exported' if done else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
