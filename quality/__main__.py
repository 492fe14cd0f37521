"""Measures how good the pictures of a service are.

python -m quality run --out DIR            runs a gate through a server
python -m quality compare FIRST SECOND     whether the second of two runs is worse
python -m quality reference --out DIR …    runs a gate through diffusers, for the others to be
                                           measured against
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from build.profile import BuildError
from build.progress import ProgressBar
from build.tiny import CHECKPOINT, ROOT, export_tiny
from quality.gate import Gate, QualityError, load_gate

TINY_GATE = ROOT / "quality" / "gates" / "tiny"
MISSED, FAILED = 1, 2


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"exit status: {MISSED} if the gate is missed or the second run is worse, {FAILED} "
        "if nothing could be measured",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a gate through a server")
    where = run.add_mutually_exclusive_group()
    where.add_argument("--server", help="a running server's gRPC address, host:port")
    where.add_argument(
        "--repository",
        type=Path,
        help="an exported repository to serve; by default that of checkpoints/tiny",
    )
    run.add_argument("--profile", default="cpu", help="of --repository (default cpu)")
    run.add_argument("--steps", type=int, help="other than the gate's num_inference_steps")
    run.add_argument("--guidance", type=float, help="other than the gate's true_cfg_scale")
    run.add_argument(
        "--reference", type=Path, help="an earlier run to compare with; by default the gate's"
    )
    reference = commands.add_parser("reference", help="run a gate through diffusers")
    reference.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="diffusers layout")
    reference.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="what it computes in"
    )
    for command in (run, reference):
        command.add_argument("--out", type=Path, required=True, help="the folder to write")
        command.add_argument(
            "--gate",
            type=Path,
            default=TINY_GATE,
            help="a gate's folder; by default that of the small checkpoint",
        )
    compare = commands.add_parser("compare", help="compare two runs of the same prompts")
    compare.add_argument("first", type=Path, help="a run's folder: what is taken as good")
    compare.add_argument("second", type=Path, help="a run's folder: what may be worse")
    compare.add_argument(
        "--significance",
        type=share,
        default=0.01,
        help="worse: chance explains the difference with less probability (default 0.01)",
    )
    return parser.parse_args(arguments)


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return number


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as tidily as Ctrl-C
    try:
        if options.command == "compare":
            return compare_runs(options)
        return run_gate(options)
    except QualityError as error:
        print(f"quality: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("quality: interrupted, nothing was changed", file=sys.stderr)
        return 130


def compare_runs(options: argparse.Namespace) -> int:
    from quality.run import compare, describe_comparison, load_run

    first, second = load_run(options.first).result, load_run(options.second).result
    comparison = compare(first, second, options.significance)
    for name in ("groups", "parts"):
        for key in first.get(name, {}):
            if key in second.get(name, {}):
                one, two = first[name][key]["score"], second[name][key]["score"]
                print(f"  {key:12} {one:.3f} → {two:.3f}")
    verdict = "worse" if comparison["worse"] else "not worse than chance explains"
    print(f"{options.second} is {verdict}: {describe_comparison(comparison)}")
    return MISSED if comparison["worse"] else 0


def run_gate(options: argparse.Namespace) -> int:
    from quality.run import load_run, measure

    gate = load_gate(options.gate)
    reference = None
    if options.command == "run":
        changes = {"num_inference_steps": options.steps, "true_cfg_scale": options.guidance}
        gate = gate.with_fields(**{k: v for k, v in changes.items() if v is not None})
        folder = options.reference or gate.reference
        reference = load_run(folder) if folder else None
        if reference and reference.result.get("fields") != gate.fields:
            print(f"note: the reference was run with other fields: {reference.result['fields']}")
    bar = ProgressBar()
    with source(options) as drawing:
        try:
            result = measure(gate, drawing, options.out, reference, bar)
        finally:
            bar.close()
    report(gate, result, options.out)
    return MISSED if result.get("passed") is False else 0


@contextlib.contextmanager
def source(options: argparse.Namespace) -> Iterator[Any]:
    """The server or the pipeline that the options name."""
    if options.command == "reference":
        from quality.diffused import Diffused

        yield Diffused(options.checkpoint, options.dtype)
        return
    from quality.served import Served
    from serving.errors import ServeError
    from serving.server import TritonServer

    if options.server is not None:
        with Served(options.server) as served:
            yield served
        return
    from export import CheckpointError, ExportError

    try:
        server = TritonServer(options.repository or export_tiny(), options.profile)
        server.start()
    except (BuildError, CheckpointError, ExportError, ServeError, OSError) as error:
        raise QualityError(str(error)) from None
    try:
        with Served(server.grpc_url) as served:
            yield served
    finally:
        server.stop()


def report(gate: Gate, result: dict[str, Any], out: Path) -> None:
    if "score" in result:
        print(
            f"score {result['score']:.3f} ({result['score_low']:.3f} … {result['score_high']:.3f})"
            f", by other prompts {result['score_shuffled']:.3f}"
        )
        for name in ("groups", "parts"):
            for key, value in result[name].items():
                print(f"  {key:12} {value['score']:.3f} {interval(value)} of {value['count']}")
    if "distances" in result:
        distance = result["distances"]
        print(
            f"distance to {distance['reference']}: PSNR {distance['psnr']:.1f} dB, "
            f"SSIM {distance['ssim']:.4f}, FLIP {distance['flip']:.4f}, "
            f"largest {distance['largest_difference']} of 255"
        )
    if "noise_cosine" in result:
        print(f"noise predictions: lowest cosine {result['noise_cosine']['lowest']:.6f}")
    if "comparison" in result:
        from quality.run import describe_comparison

        print(f"against the reference: {describe_comparison(result['comparison'])}")
    if "passed" not in result:
        print("fields other than the gate's: its thresholds were not applied")
    elif result["passed"] is None:
        print(
            "nothing was judged: the gate has no thresholds, or only for distances to a reference, "
            "and there is no judge with a reference"
        )
    else:
        print("passed" if result["passed"] else "NOT passed")
        for sentence in result["missed"]:
            print(f"  {sentence}")
    print(out)


def interval(value: dict[str, Any]) -> str:
    return "" if value["low"] is None else f"({value['low']:.3f} … {value['high']:.3f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
