"""Checkpoint + profile → REPOSITORY, complete and relocatable, or nothing at all."""

from __future__ import annotations

import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from build import manifest
from build.engine_builder import Machine
from build.engines import build_engines, check_target, engine_folder, machine_for
from build.onnx_stage import (
    DESCRIPTION,
    ROOT,
    OnnxStage,
    is_verified,
    make_onnx,
    open_onnx,
    plan,
)
from build.profile import PROFILES, BuildError, Profile
from build.stage import Checksums, place
from build.swap import locked, replaced_when_done
from export import Checkpoint, Progress, ignore_progress

_SOURCES = ("model_repository", "backend", "build/engine_builder.py")


def assemble(
    checkpoint_path: Path | None,
    profile: Profile,
    repository: Path,
    verify: str = "auto",
    progress: Progress = ignore_progress,
    workers: int = 1,
    calibration: Path | None = None,
    onnx: Path | None = None,
    target: str | None = None,
) -> bool:
    """Exports a checkpoint, builds its engines and assembles the repository around them.

    Args:
        checkpoint_path: a checkpoint in diffusers layout; None if `onnx` is finished.
        repository: is replaced in one step at the end, or left untouched.
        verify, progress, workers: see `export.export_checkpoint`.
        calibration: a file of `export.calibrate`, for profiles that quantize; made if it is None.
        onnx: where the stages are kept, so that an interrupted export goes on; by default beside
            the repository.
        target: the architecture to build engines for, of those of the profile; by default that of
            the GPU in the machine.

    Returns:
        Whether anything was done: False if the repository is up to date and intact.

    Raises:
        CheckpointError, ExportError, BuildError: one sentence for the user.
    """
    check_target(profile, target)
    folder = onnx or repository.with_name(f"{repository.name}.onnx")
    one, other = repository.resolve(), folder.resolve()
    if one in (other, *other.parents) or other in one.parents:
        raise BuildError(
            f"the stages in {folder} and the repository {repository}, which is replaced as a "
            "whole, cannot be one in the other: name other folders"
        )
    if checkpoint_path is None and calibration is not None:
        raise BuildError(
            "CALIBRATION is for making the ONNX stage, and no checkpoint was named for that: leave "
            "it out, or name CHECKPOINT=<dir>"
        )
    checkpoint = Checkpoint(checkpoint_path) if checkpoint_path else None
    with locked(folder):
        if checkpoint:
            description = checkpoint.describe()
            planned = plan(description, profile, calibration)
        else:
            stage = open_onnx(profile, folder)
            description, planned = stage.checkpoint, stage.made_from
        problem, machine = None, None
        try:
            machine = machine_for(profile, target)
        except BuildError as error:  # after the stage, which needs no such machine
            problem = error
        inputs = manifest.digest_of_inputs(
            {
                "checkpoint": description,
                "engines": planned,
                "profile": profile.name,
                "machine": machine,
            },
            [*(ROOT / name for name in _SOURCES), PROFILES / f"{profile.name}.yaml"],
            ROOT,
        )
        current = manifest.read(repository)
        if (
            problem is None
            and current
            and current["inputs"] == inputs
            and manifest.is_intact(repository, current)
            and is_verified(current["engines"], verify)
        ):
            return False
        _check_place(repository, current)
        if checkpoint:
            stage = make_onnx(checkpoint, profile, folder, verify, progress, workers, calibration)
        if problem is not None:
            raise BuildError(f"{problem}; {_kept(profile, folder)}") from None
        engines = stage.engines
        if machine:
            try:
                engines = build_engines(stage, profile, machine, progress)
            except BuildError as error:
                raise BuildError(f"{error}; {_kept(profile, folder)}") from None
        with replaced_when_done(repository) as staging:
            _fill(staging, stage, profile, engines, machine, inputs)
    return True


def assemble_onnx(
    checkpoint_path: Path | None,
    profile: Profile,
    verify: str,
    progress: Progress,
    workers: int,
    calibration: Path | None,
    onnx: Path,
) -> None:
    """Makes everything up to the engines in `onnx`, or what is missing there; see `assemble`."""
    if checkpoint_path is None:
        raise BuildError("the ONNX stage needs a checkpoint: name it, as in CHECKPOINT=<dir>")
    with locked(onnx):
        checkpoint = Checkpoint(checkpoint_path)
        make_onnx(checkpoint, profile, onnx, verify, progress, workers, calibration)


def _check_place(repository: Path, current: dict[str, Any] | None) -> None:
    """Raises BuildError if replacing the repository would lose somebody's work."""
    if repository.exists() and not repository.is_dir():
        raise BuildError(f"{repository} is no folder: name one for the repository")
    if repository.exists() and current is None and any(repository.iterdir()):
        raise BuildError(
            f"{repository} is not empty and holds no exported repository: name another folder"
        )
    added = manifest.added_files(repository, current) if current else []
    if added:
        raise BuildError(
            f"{repository} holds files that no export wrote ({', '.join(added[:5])}) and that a "
            "new one would remove: move them away, or name another folder"
        )
    edited = manifest.edited_files(repository, current) if current else []
    if edited:
        raise BuildError(
            f"{repository} holds files that were edited ({', '.join(edited)}) and that a new "
            "export would replace: move it away, or name another folder"
        )


def _fill(
    staging: Path,
    stage: OnnxStage,
    profile: Profile,
    engines: dict[str, dict[str, Any]],
    machine: Machine | None,
    inputs: str,
) -> None:
    models = staging / "model_repository"
    _copy(ROOT / "model_repository", models)
    _copy(ROOT / "backend" / "engine", staging / "backends" / "engine")
    checksums: Checksums = {}
    for name in engines:
        placed = place(engine_folder(stage.folder, profile, machine, name), models / name / "1")
        checksums |= {f"model_repository/{name}/1/{file}": sums for file, sums in placed.items()}
    shutil.copyfile(stage.folder / DESCRIPTION / "checkpoint.json", models / "checkpoint.json")
    tokenizer = stage.folder / DESCRIPTION / "tokenizer.json"
    shutil.copyfile(tokenizer, models / "tokenize" / "1" / "tokenizer.json")
    manifest.write(
        staging,
        {
            "format": manifest.FORMAT,
            "profile": profile.name,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "inputs": inputs,
            "checkpoint": {
                key: stage.checkpoint[key] for key in ("name", "pipeline_class", "fingerprint")
            },
            "versions": stage.versions,
            "engines": {
                name: {"runtime": profile.engines[name].runtime, **entry}
                for name, entry in engines.items()
            },
            "files": manifest.list_files(staging, checksums),
        },
    )


def _kept(profile: Profile, folder: Path) -> str:
    return (
        f"the ONNX stage is kept in {folder}, from which `make export {profile.arguments} "
        "ONNX=<that folder>` goes on, here or where it is carried to"
    )


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(
        source, target, ignore=lambda _, names: [n for n in names if manifest.is_leftover(n)]
    )
