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
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import folder_gb, in_process, measured_export, write_result
from tests.make_checkpoint import make_checkpoint

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
(output,) = session.run(None, feed)
result = {"load_seconds": loaded - start, "run_seconds": time.monotonic() - loaded,
          "shape": output.shape, "finite": bool(np.isfinite(output).all())}
"""


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
    exported = measured_export(checkpoint, work / "engines")
    return {
        "checkpoint_gb": folder_gb(checkpoint / "transformer"),
        "dit_gb": exported["engines_gb"]["dit"],
        "modulation_gb": exported["engines_gb"]["modulation"],
        "imports_gb": exported["imports_gb"],
        "peak_above_imports_gb": round(exported["peak_gb"] - exported["imports_gb"], 3),
        "export_seconds": exported["seconds"],
        "verified": exported["verified"],
        "dit_run": in_process(RUN, work / "engines" / "dit"),
    }


def deep(work: Path, blocks: int) -> dict[str, Any]:
    print(f"exporting a small checkpoint with {blocks} blocks")
    checkpoint = make_checkpoint(work / "checkpoint", blocks=blocks)
    exported = measured_export(checkpoint, work / "engines")
    steps = exported["step_seconds"]
    return {
        "blocks": blocks,
        "export_seconds": exported["seconds"],
        "dit_export_seconds": round(
            sum(steps[what] for what in steps if what.startswith("dit:")), 1
        ),
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
