"""Memory and time of the export.

    python -m bench.export_memory [--blocks 6] [--work DIR]

Makes a checkpoint whose DiT has the real model's width in bf16 (6 blocks: 4.1 GB), exports it in a
process of its own and reports how far that process's peak memory rises above what it has right
after its imports; loads the DiT's graph in another process and runs it; then times the export of a
60-block checkpoint of small width. Needs about 13 GB of disk in DIR and 12 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import write_result
from tests.make_checkpoint import make_checkpoint

GB = 1e9

EXPORT = """
import json, re, sys, time
from pathlib import Path
import psutil
from export import Checkpoint, export_checkpoint

spent = {}
last = time.monotonic()
def progress(what, done, total):  # charges the time since the last step to the engine of this one
    global last
    now = time.monotonic()
    engine = what.split(":")[0]
    spent[engine] = spent.get(engine, 0) + now - last
    last = now

imports = psutil.Process().memory_info().rss
start = time.monotonic()
engines = export_checkpoint(Checkpoint(sys.argv[1]), Path(sys.argv[2]), progress=progress)
print(json.dumps({
    "imports": imports,
    # Not getrusage's ru_maxrss, which a child process takes over from its parent.
    "peak": 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]),
    "seconds": time.monotonic() - start,
    "engine_seconds": spent,
    "verified": {
        name: {key: entry["verified"][key] for key in ("mode", "max_abs_error")}
        for name, entry in engines.items()
    },
}))
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


def large(work: Path, blocks: int) -> dict[str, Any]:
    print(f"making a bf16 checkpoint with {blocks} blocks of the real width")
    checkpoint = make_checkpoint(
        work / "checkpoint",
        blocks=blocks,
        heads=24,
        head_size=128,
        rope_axes=(16, 56, 56),
        dtype="bfloat16",
        max_shard_size=2**30,
    )
    exported = in_process(EXPORT, checkpoint, work / "engines")
    return {
        "checkpoint_gb": round(size(checkpoint / "transformer") / GB, 2),
        "dit_gb": round(size(work / "engines" / "dit") / GB, 2),
        "modulation_gb": round(size(work / "engines" / "modulation") / GB, 2),
        "imports_gb": round(exported["imports"] / GB, 3),
        "peak_above_imports_gb": round((exported["peak"] - exported["imports"]) / GB, 3),
        "export_seconds": round(exported["seconds"], 1),
        "verified": exported["verified"],
        "dit_run": in_process(RUN, work / "engines" / "dit"),
    }


def deep(work: Path, blocks: int) -> dict[str, Any]:
    print(f"exporting a small checkpoint with {blocks} blocks")
    checkpoint = make_checkpoint(work / "checkpoint", blocks=blocks)
    exported = in_process(EXPORT, checkpoint, work / "engines")
    return {
        "blocks": blocks,
        "export_seconds": round(exported["seconds"], 1),
        "dit_export_seconds": round(exported["engine_seconds"]["dit"], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.export_memory")
    parser.add_argument("--blocks", type=int, default=6, help="of the large checkpoint")
    parser.add_argument("--work", type=Path, help="folder for the temporary files")
    options = parser.parse_args()
    result = {}
    for name, measure, blocks in (("large", large, options.blocks), ("deep", deep, 60)):
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            result[name] = measure(Path(work), blocks)
        print(json.dumps(result[name], indent=1))
    print(write_result("export_memory", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
