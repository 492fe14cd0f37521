"""What the benchmarks share: a served small checkpoint, and results beside their machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from build.assemble import assemble
from build.profile import load_profile
from tests.make_checkpoint import cached_checkpoint

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
GB = 1e9
# Not getrusage's ru_maxrss, which a child process takes over from its parent.
AFTERWARDS = r"""
import json, re
status = open("/proc/self/status").read()
peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])
print(json.dumps({**result, "peak_gb": round(peak / 1e9, 3)}))
"""


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
        "versions": versions("torch", "onnxruntime", "nvidia-pytriton"),
        **values,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def versions(*packages: str) -> dict[str, str]:
    """Those of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def in_process(code: str, *arguments: object) -> dict[str, Any]:
    """Runs Python code that makes a dict `result` in a new process; returns it, with the seconds
    that it took and the process's peak memory, `peak_gb`, from its start on."""
    command = [sys.executable, "-c", code + AFTERWARDS, *map(str, arguments)]
    start = time.monotonic()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    seconds = round(time.monotonic() - start, 1)
    return {"seconds": seconds, **json.loads(done.stdout.splitlines()[-1])}


def folder_gb(folder: Path) -> float:
    return round(sum(file.stat().st_size for file in folder.iterdir()) / GB, 3)


def free_gb(folder: Path) -> float:
    return shutil.disk_usage(folder).free / GB


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
