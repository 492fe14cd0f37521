"""What the benchmarks share: a served small checkpoint, and results beside their machine."""

from __future__ import annotations

import json
import os
import platform
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from build.assemble import assemble
from build.profile import load_profile
from tests.make_checkpoint import cached_checkpoint

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def small_repository() -> Path:
    """Returns the repository of the default small checkpoint, exported if it has to be."""
    repository = ROOT / "artifacts" / "tests" / "default"
    assemble(cached_checkpoint(), load_profile("cpu"), repository)
    return repository


def write_result(name: str, values: dict[str, Any]) -> Path:
    """Writes bench/results/<name>.json with date, machine and versions beside the values."""
    result = {
        "benchmark": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "load_before": os.getloadavg()[0],
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in ("torch", "onnxruntime", "nvidia-pytriton")},
        **values,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


class Stopwatch:
    """Seconds since its making."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._started
