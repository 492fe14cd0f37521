"""What the benchmarks share: a served small checkpoint, and results beside their machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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
EXPORT = """
import json, sys, time
from pathlib import Path
import psutil
from export import Checkpoint, export_checkpoint
from export.recipe import load_recipe

steps = {}
last = start = time.monotonic()
def progress(what, done, total):  # charges the time since the last call to the step of this one
    global last
    now = time.monotonic()
    steps[what] = steps.get(what, 0) + now - last
    last = now

imports = psutil.Process().memory_info().rss
checkpoint, output, recipes, calibration = sys.argv[1:]
entries = export_checkpoint(
    Checkpoint(checkpoint),
    Path(output),
    progress=progress,
    recipe={name: load_recipe(recipe)[name] for name, recipe in json.loads(recipes).items()},
    calibration=Path(calibration) if calibration else None,
)
result = {
    "seconds": round(time.monotonic() - start, 1),
    "imports_gb": round(imports / 1e9, 3),
    "step_seconds": {what: round(seconds, 1) for what, seconds in steps.items()},
    "verified": {
        name: {key: entry["verified"][key] for key in ("mode", "max_abs_error")}
        for name, entry in entries.items()
    },
    "layers": {name: entry["layers"] for name, entry in entries.items() if "layers" in entry},
}
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


def earlier_results(out: Path) -> dict[str, Any]:
    """What the file holds, nothing if it is new; ends the program with a sentence, before anything
    is measured, if it is no file of results or cannot be written."""
    try:
        with out.open("a+", encoding="utf-8") as file:
            file.seek(0)
            text = file.read()
        found = json.loads(text or "{}")
    except OSError as error:
        raise SystemExit(f"error: {out} cannot be written: {error.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SystemExit(f"error: {out} is no file of results: name another one with --out")
    return found


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


def measured_export(
    checkpoint: Path,
    output: Path,
    recipes: Mapping[str, str] | None = None,
    calibration: Path | None = None,
) -> dict[str, Any]:
    """Exports a checkpoint as `make export` does, but in a new process. recipes: engine → recipe.

    Returns its seconds, by step too, its memory after the imports and at its peak, each engine's
    size, what was verified and how many layers got which format.
    """
    given = json.dumps(dict(recipes or {}))
    result = in_process(EXPORT, checkpoint, output, given, calibration or "")
    result["engines_gb"] = {name: folder_gb(output / name) for name in result["verified"]}
    return result


def positive(text: str) -> int:
    """An argument that counts something. Raises ValueError."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def check_space(parser: argparse.ArgumentParser, folder: Path | None, needed_gb: float) -> None:
    """Ends the program with a sentence if the folder for temporary files is missing or too full."""
    folder = folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        parser.error(f"{folder} is no folder")
    free = shutil.disk_usage(folder).free / GB
    if free < needed_gb:
        parser.error(
            f"{folder} has {free:.0f} GB free, but {needed_gb:.0f} are needed: name another folder"
        )


def folder_gb(folder: Path) -> float:
    return round(sum(file.stat().st_size for file in folder.iterdir()) / GB, 3)


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
