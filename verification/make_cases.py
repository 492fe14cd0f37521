"""Command line of `verification.cases`, for a process of its own, whose memory goes with it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from export.files import reason


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verification.make_cases", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--gate", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True, help="a run of the gate")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    try:
        # These take seconds.
        from quality.gate import QualityError
        from verification.cases import write_cases

        try:
            write_cases(
                options.checkpoint, options.gate, options.reference, options.dtype, options.out
            )
        except QualityError as error:
            print(f"verify: {error}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"verify: {reason(error, options.out)}", file=sys.stderr)
            return 2
    except KeyboardInterrupt:
        return 130  # whoever started this says so
    return 0


if __name__ == "__main__":
    sys.exit(main())
