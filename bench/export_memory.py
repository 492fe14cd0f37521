"""Memory and time of the export.

    python -m bench.export_memory [--blocks 6] [--work DIR] [--output FILE]

Makes a checkpoint whose DiT has the real model's width in bf16 (6 blocks: 4.1 GB), exports it in a
process of its own and reports how far that process's peak memory rises above its memory right after
its imports; loads the DiT's graph in another and runs it; then times the export of a small DiT of
60 blocks. Writes JSON. Needs about 22 GB of disk in DIR and 12 GB of memory for the run.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.make_checkpoint import make_checkpoint

RESULTS = Path(__file__).resolve().parent / "results" / "export_memory.json"
GB = 1e9

EXPORT = """
import json, resource, sys, time
from pathlib import Path
import psutil
from export import Checkpoint, export_checkpoint
imported = psutil.Process().memory_info().rss
start = time.monotonic()
engines = export_checkpoint(Checkpoint(sys.argv[1]), Path(sys.argv[2]))
seconds = time.monotonic() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
modes = {name: entry["verified"]["mode"] for name, entry in engines.items()}
errors = {name: entry["verified"]["max_abs_error"] for name, entry in engines.items()}
print(json.dumps({"imported": imported, "peak": peak, "seconds": seconds, "modes": modes,
                  "max_abs_errors": errors}))
"""

RUN = """
import json, sys, time
import numpy as np
import onnxruntime
start = time.monotonic()
session = onnxruntime.InferenceSession(sys.argv[1] + "/model.onnx")
loaded = time.monotonic()
sizes = {"batch": 1, "text_tokens": 7, "image_tokens": 64, "all_tokens": 71}
types = {"tensor(float)": np.float32, "tensor(bool)": bool, "tensor(int32)": np.int32}
feed = {
    i.name: np.ones([sizes.get(dim, dim) for dim in i.shape], types[i.type])
    for i in session.get_inputs()
}
(result,) = session.run(None, feed)
print(json.dumps({"load_seconds": loaded - start, "run_seconds": time.monotonic() - loaded,
                  "shape": result.shape, "finite": bool(np.isfinite(result).all())}))
"""


def in_process(code: str, *arguments: Path) -> dict[str, Any]:
    """Runs Python code in a new process, which prints one JSON object as its last line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.export_memory")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--work", type=Path, help="folder for the temporary files")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": psutil.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / GB, 1),
            "python": platform.python_version(),
        }
    }
    with tempfile.TemporaryDirectory(dir=options.work) as temporary:
        work = Path(temporary)
        print(f"making a bf16 checkpoint with {options.blocks} blocks of the real width")
        checkpoint = make_checkpoint(
            work / "large",
            blocks=options.blocks,
            heads=24,
            head_size=128,
            rope_axes=(16, 56, 56),
            dtype="bfloat16",
            max_shard_size=2**30,
        )
        exported = in_process(EXPORT, checkpoint, work / "engines")
        result["large"] = {
            "checkpoint_gb": round(size(checkpoint / "transformer") / GB, 2),
            "dit_gb": round(size(work / "engines" / "dit") / GB, 2),
            "peak_above_imports_gb": round((exported["peak"] - exported["imported"]) / GB, 3),
            "imported_gb": round(exported["imported"] / GB, 3),
            "export_seconds": round(exported["seconds"], 1),
            "verified": exported["modes"],
            "max_abs_errors": exported["max_abs_errors"],
            "run": in_process(RUN, work / "engines" / "dit"),
        }
        print(json.dumps(result["large"], indent=2))
    with tempfile.TemporaryDirectory(dir=options.work) as temporary:
        work = Path(temporary)
        print("exporting a small checkpoint with 60 blocks")
        checkpoint = make_checkpoint(work / "deep", blocks=60)
        start = time.monotonic()
        exported = in_process(EXPORT, checkpoint, work / "engines")
        result["deep"] = {
            "blocks": 60,
            "export_seconds": round(exported["seconds"], 1),
            "with_imports_seconds": round(time.monotonic() - start, 1),
        }
        print(json.dumps(result["deep"], indent=2))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
