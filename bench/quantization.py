"""What lower precisions cost the trained checkpoint: single predictions and pictures.

    python -m bench.quantization

Engines of the profiles cpu-fp8, cpu-int8 and cpu-nvfp4, calibrated with 64 prompts that are not the
gate's, served on the CPU and measured with quality/gates/tiny.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import ROOT, write_result
from build.assemble import assemble
from build.profile import load_profile
from build.progress import ProgressBar
from build.tiny import CHECKPOINT
from quality.gate import Gate, load_gate
from quality.prompts import world_prompts
from quality.run import describe_comparison, load_run, measure
from quality.served import Served
from serving.server import TritonServer

PROFILES = ("cpu-fp8", "cpu-int8", "cpu-nvfp4")
CALIBRATION_PROMPTS, CALIBRATION_SEED = 64, 1
KEPT = ("score", "score_low", "score_high", "score_en", "score_zh")


def calibration(checkpoint: Path, folder: Path) -> Path:
    prompts = folder / "prompts.jsonl"
    entries = world_prompts(CALIBRATION_PROMPTS, CALIBRATION_SEED)
    prompts.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")
    out = folder / "calibration.safetensors"
    command = [sys.executable, "-m", "export.calibrate", "--checkpoint", str(checkpoint)]
    command += ["--out", str(out), "--prompts", str(prompts)]
    # Models as small as these wait for their threads longer than they compute.
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return out


def pictures(profile: str, repository: Path, gate: Gate, folder: Path) -> dict[str, Any]:
    assert gate.reference is not None
    bar = ProgressBar()
    with TritonServer(repository, profile) as server, Served(server.grpc_url) as served:
        result = measure(gate, served, folder / "run", load_run(gate.reference), bar)
    bar.close()
    print(f"{profile}: {describe_comparison(result['comparison'])}", flush=True)
    kept = ("distances", "noise_cosine", "comparison")
    return {key: result[key] for key in (*KEPT, *kept)}


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.quantization", description=__doc__).parse_args()
    gate = load_gate(ROOT / "quality" / "gates" / "tiny")
    values: dict[str, Any] = {"profiles": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranges = calibration(CHECKPOINT, folder)
        for profile in PROFILES:
            repository = folder / profile
            assemble(CHECKPOINT, load_profile(profile), repository, calibration=ranges)
            manifest = json.loads((repository / "manifest.json").read_text(encoding="utf-8"))
            values["profiles"][profile] = {
                "layers": {
                    engine: entry["layers"]
                    for engine, entry in manifest["engines"].items()
                    if "layers" in entry
                },
                **pictures(profile, repository, gate, folder),
            }
    print(write_result("quantization", values))


if __name__ == "__main__":
    main()
