"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def reason(error: OSError, otherwise: object) -> str:
    """Where something failed, and why. otherwise: where, if the error itself does not know, as of a
    full disk."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' → '.join(names) or otherwise}: {error.strerror or error}"


def write_whole(path: Path, data: Any) -> None:
    """Writes or replaces a file in one step. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
