"""Builds a profile's repository, serves it here and checks it; writes one report.

Exit status: 1 if something is worse than it must be, 2 if it could not be checked.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.files import reason

if TYPE_CHECKING:
    from quality.gate import Gate

MISSED, FAILED = 1, 2
ROOT = Path(__file__).resolve().parents[1]
GATES = ROOT / "quality" / "gates"
PASSED_ON = ("onnx", "calibration", "target", "verify", "dit-precision")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m verification", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="diffusers layout")
    parser.add_argument("--profile", default="cpu", help="a file in build/profiles/")
    parser.add_argument("--repository", type=Path, help="default: artifacts/<profile>")
    for name in PASSED_ON:
        parser.add_argument(f"--{name}", help="as `python -m build` takes it")
    parser.add_argument(
        "--gate",
        type=Path,
        help="a gate's folder; by default quality/gates/general, for checkpoints/tiny its own",
    )
    parser.add_argument("--out", type=Path, help="default: artifacts/verify/<profile>")
    return parser.parse_args()


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as tidily as Ctrl-C
    try:
        # These take seconds.
        from quality.gate import QualityError
        from serving.errors import ServeError

        try:
            return verify(options)
        except (QualityError, ServeError) as error:
            print(f"verify: {error}", file=sys.stderr)
            return FAILED
        except OSError as error:
            print(f"verify: {reason(error, place_of_report(options))}", file=sys.stderr)
            return FAILED
    except KeyboardInterrupt:
        print("verify: interrupted; what is finished is kept and not done again", file=sys.stderr)
        return 130


def place_of_report(options: argparse.Namespace) -> Path:
    return options.out or Path("artifacts") / "verify" / options.profile


def verify(options: argparse.Namespace) -> int:
    """Builds, checks, reports. Raises QualityError, ServeError, OSError."""
    from build.tiny import CHECKPOINT
    from quality.gate import QualityError, load_gate

    repository = options.repository or Path("artifacts") / options.profile
    out = place_of_report(options)
    if out.exists() and not out.is_dir():
        raise QualityError(f"{out} is not a folder: name another one as OUT")
    tiny = options.checkpoint.resolve() == CHECKPOINT
    gate = load_gate(options.gate or GATES / ("tiny" if tiny else "general"))
    if not gate.noise_levels:
        raise QualityError(f"{gate.folder} has no noise_levels: set some in its gate.yaml")
    build = ["build", "export", "--checkpoint", options.checkpoint, "--profile", options.profile]
    build += ["--repository", repository]
    for name in PASSED_ON:
        value = getattr(options, name.replace("-", "_"))
        build += [f"--{name}", value] if value is not None else []
    _run(*build)

    from verification.report import write_report

    manifest = json.loads((repository / "manifest.json").read_text(encoding="utf-8"))
    report = check(options.checkpoint, repository, manifest, gate, out)
    path = write_report(out, report)
    for sentence in report["missed"]:
        print(f"  {sentence}")
    print(f"{'passed' if report['passed'] else 'NOT passed'}: {path}")
    return 0 if report["passed"] else MISSED


def check(
    checkpoint: Path, repository: Path, manifest: dict[str, Any], gate: Gate, out: Path
) -> dict[str, Any]:
    """Serves the repository and returns the report. Raises QualityError, ServeError."""
    from build.progress import ProgressBar
    from quality.run import load_run, measure
    from quality.served import Served
    from serving.server import TritonServer
    from verification.cases import are_of
    from verification.engines import compare_engines
    from verification.report import machine
    from verification.speed import measure_speed

    out.mkdir(parents=True, exist_ok=True)
    here = machine()
    dtype = "bfloat16" if here["gpus"] else "float32"
    reference = _reference(checkpoint, manifest["checkpoint"]["fingerprint"], gate, dtype, out)
    cases = out / "cases.safetensors"
    if not are_of(cases, reference):
        _run(
            *("verification.make_cases", "--checkpoint", checkpoint, "--gate", gate.folder),
            *("--reference", reference, "--dtype", dtype, "--out", cases),
        )
    bar = ProgressBar()
    try:
        with (
            TritonServer(repository, manifest["profile"]) as server,
            Served(server.grpc_url) as served,
        ):
            compared = []
            for case in compare_engines(served, cases, manifest["engines"]):
                compared.append(case)
                bar("engines", len(compared), 0)
            quality = measure(gate, served, out / "quality", load_run(reference), bar)
            speed = measure_speed(server.grpc_url, server.metrics_url, gate)
    finally:
        bar.close()
    missed = [
        f"{case['engine']}, {case['case']}: its cosine to torch's is {case['cosine']:.6f}; it must "
        f"be at least {case['least']}"
        for case in compared
        if not case["passed"]
    ] + quality.get("missed", [])
    kept = ("gate", "distances", "noise_cosine", "comparison", "score", "score_low", "score_high")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "passed": not missed,
        "missed": missed,
        "profile": manifest["profile"],
        "checkpoint": manifest["checkpoint"],
        "machine": here,
        "versions": manifest["versions"],
        "reference_dtype": dtype,
        "engines": manifest["engines"],
        "cases": compared,
        "quality": {name: quality[name] for name in kept if name in quality}
        | {"count": len(gate.prompts)},
        "speed": speed,
    }


def _reference(checkpoint: Path, fingerprint: str, gate: Gate, dtype: str, out: Path) -> Path:
    """A run of the gate through diffusers with this checkpoint: the gate's own or one made here."""
    from quality.run import load_run

    source = "diffusers" if dtype == "float32" else f"diffusers in {dtype}"
    made = out / "reference"
    for folder in (gate.reference, made):
        if folder is None or not folder.is_dir():
            continue
        result = load_run(folder).result
        same = (result["prompts"], result["source"]) == (gate.prompts_digest, source)
        if same and result["checkpoint"]["fingerprint"] == fingerprint:
            return folder
    _run(
        *("quality", "reference", "--checkpoint", checkpoint, "--gate", gate.folder),
        *("--dtype", dtype, "--out", made),
    )
    return made


def _run(module: str, *arguments: str | Path) -> None:
    """Runs one of the project's commands in a process of its own, whose memory goes with it."""
    done = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=ROOT)
    if done.returncode in (130, -signal.SIGINT):  # Python's own end, within an exec()
        raise KeyboardInterrupt
    if done.returncode:
        from quality.gate import QualityError

        raise QualityError(f"`python -m {module}` failed: see above")


if __name__ == "__main__":
    sys.exit(main())
