"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, data: Any) -> None:
    """Writes or replaces a file in one step. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
