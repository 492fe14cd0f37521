"""REPOSITORY/manifest.json: what the repository holds and what it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

FORMAT = 1
NAME = "manifest.json"
# Of larger files a start reads samples only (it hashes about 1 GB/s): it never waits for them.
HASHED_BYTES = 256 * 1024**2
_SAMPLES = 64
_SAMPLE_BYTES = 2**20
# What operators may edit in place; everything else is the export's alone.
_EDITABLE_SUFFIXES = {".pbtxt", ".py"}


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return _sha256_of(iter(lambda: file.read(2**20), b""))


def sample(path: Path) -> str:
    """Returns the SHA-256 of stretches of a file, from its first byte to its last: what tells it
    from another of its size, such as the same engine of another checkpoint."""

    def stretches() -> Iterator[bytes]:
        room = max(0, path.stat().st_size - _SAMPLE_BYTES)
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(room * i // (_SAMPLES - 1))
                yield file.read(_SAMPLE_BYTES)

    return _sha256_of(stretches())


def is_artifact(name: str) -> bool:
    """Whether a file of this name is written by the export and by nobody else."""
    return PurePath(name).suffix not in _EDITABLE_SUFFIXES


def is_leftover(name: str) -> bool:
    """Whether a file or folder of this name is a cache of some tool, not a source."""
    return name == "__pycache__" or (name.startswith(".") and name != ".gitkeep")


def list_files(folder: Path, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns size and checksum of every file below `folder`, by its relative path; of files beyond
    HASHED_BYTES also that of samples.

    known: what is known of some of them already.
    """
    names = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != NAME
    }
    result = {}
    for name, path in names.items():
        entry = known.get(name) or {"bytes": path.stat().st_size, "sha256": digest(path)}
        sampled = {"sample": sample(path)} if entry["bytes"] > HASHED_BYTES else {}
        result[name] = {**entry, **sampled}
    return result


def digest_of_inputs(values: Mapping[str, Any], sources: Iterable[Path], root: Path) -> str:
    """Returns one digest of everything an export depends on: plain values and source files."""
    parts = [json.dumps(values, sort_keys=True).encode()]
    for source in sources:
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            relative = path.relative_to(root)
            if path.is_file() and not any(is_leftover(part) for part in relative.parts):
                parts.append(f"{relative} {digest(path)}\n".encode())
    return _sha256_of(parts)


def read(repository: Path) -> dict[str, Any] | None:
    """Returns the manifest of `repository`, or None if it has none that can be read."""
    try:
        manifest = json.loads((repository / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if is_sound(manifest) else None


def is_sound(manifest: Any) -> bool:
    """Whether this is a manifest of FORMAT whose fields are there and of their types."""
    return (
        _holds(
            manifest,
            format=int,
            profile=str,
            inputs=str,
            checkpoint=dict,
            versions=dict,
            engines=dict,
            files=dict,
        )
        and manifest["format"] == FORMAT
        and _holds(manifest["checkpoint"], fingerprint=str)
        and all(
            _holds(entry, artifact=str, precision=str)
            and isinstance(entry.get("verified", {}), dict)
            and ("library" not in entry or describes_engine(entry))
            for entry in manifest["engines"].values()
        )
        and all(
            _holds(expected, bytes=int, sha256=str) and isinstance(expected.get("sample", ""), str)
            for expected in manifest["files"].values()
        )
    )


def describes_engine(description: Any) -> bool:
    """Whether this says what an engine was built from, by what and for which GPU."""
    return (
        _holds(description, made_from=dict, library=str, version=str, target=str)
        and isinstance(description.get("device"), str | None)
        and _holds(description["made_from"], checkpoint=str, recipe=str)
    )


def write(repository: Path, manifest: Mapping[str, Any]) -> None:
    (repository / NAME).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def is_intact(repository: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether every file of the manifest is there, and every artifact as it was written."""
    return all(
        (repository / name).is_file()
        and (not is_artifact(name) or _is_as_written(repository / name, expected))
        for name, expected in manifest["files"].items()
    )


def added_files(repository: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the files that the export did not write, caches of tools and runtimes apart."""
    return [
        name.as_posix()
        for name in (path.relative_to(repository) for path in sorted(repository.rglob("*")))
        if (repository / name).is_file()
        and name.as_posix() not in manifest["files"]
        and name != Path(NAME)
        and not any(is_leftover(part) for part in name.parts)
        and name.suffix != ".cache"  # of TensorRT-RTX
    ]


def edited_files(repository: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the configurations and Python files that differ from what the export wrote."""
    return [
        name
        for name, expected in manifest["files"].items()
        if not is_artifact(name)
        and (repository / name).is_file()
        and not _is_as_written(repository / name, expected)
    ]


def _is_as_written(path: Path, expected: Mapping[str, Any]) -> bool:
    return path.stat().st_size == expected["bytes"] and digest(path) == expected["sha256"]


def _holds(value: Any, **types: type) -> bool:
    """Whether this is an object with fields of these types."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), wanted) for name, wanted in types.items()
    )


def _sha256_of(chunks: Iterable[bytes]) -> str:
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
    return sha256.hexdigest()
