"""Finished pieces of an export, kept so that an interrupted one goes on behind them.

A stage is a folder with an entry file, which is written last: what the stage was made from, what
came of it, the checksums of the other files, and a digest of all that. A folder without an entry,
with an edited one, made from something else or with other files is no stage.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from build.manifest import digest, digest_of_inputs, is_leftover
from export.files import write_whole

ENTRY = "stage.json"

Checksums = dict[str, dict[str, Any]]


def make_stage(
    folder: Path, made_from: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Returns what came of a stage; makes it by `make`, which fills an empty folder, where it is
    not there yet."""
    result = read_stage(folder, made_from)
    if result is None:
        shutil.rmtree(folder, ignore_errors=True)
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            result = make(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        write_entry(folder, made_from, result)
    return result


def read_stage(folder: Path, made_from: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what came of a stage that was made from the same, None if there is none."""
    entry = read_entry(folder)
    if entry is None or entry["made_from"] != json.loads(json.dumps(made_from)):
        return None
    return entry["result"] if entry["files"] == checksums(folder) else None


def read_entry(folder: Path) -> dict[str, Any] | None:
    """Returns an entry with `made_from`, `result` and `files`; None if there is none as it was
    written."""
    try:
        entry = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
        sound = isinstance(entry, dict) and entry.pop("digest", None) == _digest_of(entry)
    except (OSError, ValueError, RecursionError):
        return None
    return entry if sound else None


def write_entry(folder: Path, made_from: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Declares the files in `folder` a stage. Raises OSError."""
    entry = {"made_from": made_from, "result": result, "files": checksums(folder)}
    whole = {**entry, "digest": _digest_of(entry)}
    write_whole(folder / ENTRY, (json.dumps(whole, indent=1) + "\n").encode())


def checksums(folder: Path) -> Checksums:
    """Size and SHA-256 of every file in a folder but its entry's and those that some tool left."""
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != ENTRY and not is_leftover(path.name)
    }


def _digest_of(entry: Mapping[str, Any]) -> str:
    return digest_of_inputs(entry, (), Path())


def place(folder: Path, target: Path) -> Checksums:
    """Puts a stage's files into the folder `target`, without using the disk twice where the file
    system has hard links; returns their checksums."""
    entry = read_entry(folder)
    assert entry is not None  # it was read or written a moment ago
    for name in entry["files"]:
        try:
            os.link((folder / name).resolve(), target / name)  # what a link points to, not the link
        except OSError:  # another file system, or one without
            shutil.copyfile(folder / name, target / name)
    return entry["files"]
