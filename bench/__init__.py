"""Benchmarks. Those of engines import the modules of the backend `engine`, as it does itself."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "backend" / "engine"))
