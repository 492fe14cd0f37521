"""Command line of `make export`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from build.profile import BuildError, load_profile


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m build", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="diffusers layout")
    parser.add_argument("--profile", default="cpu", help="a file in build/profiles/")
    parser.add_argument("--repository", type=Path, help="default: artifacts/<profile>")
    parser.add_argument(
        "--verify",
        choices=("auto", "full"),
        default="auto",
        help="full: check engines over 2 GB as a whole, too",
    )
    parser.add_argument(
        "--calibration", type=Path, help="a file of export.calibrate, for profiles that quantize"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as tidily as Ctrl-C
    try:
        profile = load_profile(arguments.profile)
    except BuildError as error:
        print(f"export failed: {error}", file=sys.stderr)
        return 1
    repository = (arguments.repository or Path("artifacts") / profile.name).resolve()
    print(f"exporting {arguments.checkpoint} to {repository} …", flush=True)
    try:
        # These import torch and diffusers, which takes seconds.
        from build.assemble import assemble
        from build.progress import ProgressBar
        from export import CheckpointError, ExportError

        bar = ProgressBar()
        try:
            done = assemble(
                arguments.checkpoint,
                profile,
                repository,
                arguments.verify,
                bar,
                calibration=arguments.calibration,
            )
        except (BuildError, CheckpointError, ExportError) as error:
            bar.close()
            print(f"export failed: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            bar.close()
            where = error.filename or repository
            print(f"export failed: {where}: {error.strerror or error}", file=sys.stderr)
            return 1
        bar.close()
    except KeyboardInterrupt:
        print("export interrupted: nothing was changed", file=sys.stderr)
        return 130
    print(f"{repository}: {'exported' if done else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
