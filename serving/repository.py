"""An exported repository, judged before a server is started on it."""

import json
from pathlib import Path
from typing import Any

from build.manifest import FORMAT, HASHED_BYTES, digest, is_artifact, is_sound, sample
from serving.engines import check_descriptions
from serving.errors import ServeError


def check_repository(repository: Path, profile: str) -> dict[str, Any]:
    """Returns the manifest of `repository`, or raises ServeError.

    Checked: the manifest is there and made for `profile`; the engines are those that it describes;
    every file that it lists is there; every artifact has its size and, up to HASHED_BYTES, its
    SHA-256, beyond that the SHA-256 of its samples.
    """
    export = f"run `make export CHECKPOINT=<dir> PROFILE={profile} REPOSITORY={repository}`"
    stages = repository.with_name(f"{repository.name}.onnx")
    if not repository.is_dir():
        if stages.is_dir():
            raise ServeError(
                f"There is no repository at {repository}, only what an export that did not end "
                f"has kept in {stages}: {export} again, where its engines can be built; it goes "
                "on there."
            )
        raise ServeError(f"There is no repository at {repository}: {export} first.")
    manifest_path = repository / "manifest.json"
    if not manifest_path.is_file() or not (repository / "model_repository").is_dir():
        raise ServeError(
            f"{repository} is not an exported repository (it has no manifest.json with a "
            f"model_repository beside it): {export}."
        )
    manifest = _read_manifest(manifest_path, export)
    if manifest["profile"] != profile:
        raise ServeError(
            f"{repository} was exported for the profile {manifest['profile']!r}, not for "
            f"{profile!r}: serve it with PROFILE={manifest['profile']}, or {export}."
        )
    check_descriptions(repository, manifest)
    for name, expected in manifest["files"].items():
        problem = _file_problem(repository / name, expected)
        if problem:
            raise ServeError(f"{repository / name} {problem}: {export} again.")
    return manifest


def _read_manifest(path: Path, export: str) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ServeError(f"{path} cannot be read ({error}): {export} again.") from None
    if not is_sound(manifest):
        raise ServeError(
            f"{path} is not a manifest of format {FORMAT}, the one this version reads, or lacks "
            f"fields of it: {export} again."
        )
    return dict(manifest)


def _file_problem(path: Path, expected: dict[str, Any]) -> str | None:
    """Says how the file differs from its entry {"bytes", "sha256", "sample"}; None if it does
    not."""
    if not path.is_file():
        return "is missing"
    if not is_artifact(path.name):
        return None
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"has {size} bytes where the manifest says {expected['bytes']}"
        if size <= HASHED_BYTES and digest(path) != expected["sha256"]:
            return "is corrupt (its SHA-256 is not the manifest's)"
        if size > HASHED_BYTES and "sample" in expected:
            found = sample(path)
            if found != expected["sample"]:
                return (
                    "is corrupt, or another file of the same size (samples of it have the SHA-256 "
                    f"{found[:12]}…, those of the manifest's {expected['sample'][:12]}…)"
                )
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None
