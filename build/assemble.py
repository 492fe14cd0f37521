"""Checkpoint + profile → REPOSITORY, complete and relocatable, or nothing at all."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from build import manifest
from build.profile import PROFILES, BuildError, Profile
from build.swap import replaced_when_done
from export import Checkpoint, Progress, export_checkpoint, ignore_progress
from export.recipe import EngineRecipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = ("model_repository", "backend", "export")
_PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "onnx", "onnxscript")


def assemble(
    checkpoint_path: Path,
    profile: Profile,
    repository: Path,
    verify: str = "auto",
    progress: Progress = ignore_progress,
    workers: int = 1,
    calibration: Path | None = None,
) -> bool:
    """Exports a checkpoint and assembles the repository around its engines.

    Args:
        checkpoint_path: a checkpoint in diffusers layout.
        repository: is replaced in one step at the end, or left untouched.
        verify, progress, workers, calibration: see `export.export_checkpoint`.

    Returns:
        Whether anything was done: False if the repository is up to date and intact.

    Raises:
        CheckpointError, ExportError, BuildError: one sentence for the user.
    """
    checkpoint = Checkpoint(checkpoint_path)
    description = checkpoint.describe()
    versions = {"python": platform.python_version()}
    versions |= {package: version(package) for package in _PACKAGES}
    recipes = recipes_of(profile)
    ranges = manifest.digest(calibration) if calibration and calibration.is_file() else None
    inputs = manifest.digest_of_inputs(
        {
            "checkpoint": description,
            "versions": versions,
            "profile": profile.name,
            "calibration": ranges,
        },
        [*(ROOT / name for name in _SOURCES), PROFILES / f"{profile.name}.yaml"],
        ROOT,
    )
    current = manifest.read(repository)
    if current and current["inputs"] == inputs and manifest.is_intact(repository, current):
        return False
    if repository.exists() and current is None and any(repository.iterdir()):
        raise BuildError(
            f"{repository} is not empty and holds no exported repository: name another folder"
        )
    edited = manifest.edited_files(repository, current) if current else []
    if edited:
        raise BuildError(
            f"{repository} holds files that were edited ({', '.join(edited)}) and that a new "
            "export would replace: move it away, or name another folder"
        )
    with replaced_when_done(repository) as staging:
        models = staging / "model_repository"
        _copy(ROOT / "model_repository", models)
        _copy(ROOT / "backend" / "engine", staging / "backends" / "engine")
        exported = staging / "exported"
        engines = export_checkpoint(
            checkpoint, exported, verify, progress, workers, recipes, calibration
        )
        for engine in engines:
            for path in (exported / engine).iterdir():
                path.rename(models / engine / "1" / path.name)
        (exported / "checkpoint.json").rename(models / "checkpoint.json")
        (exported / "tokenizer.json").rename(models / "tokenize" / "1" / "tokenizer.json")
        shutil.rmtree(exported)
        manifest.write(
            staging,
            {
                "format": manifest.FORMAT,
                "profile": profile.name,
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "inputs": inputs,
                "checkpoint": {
                    key: description[key] for key in ("name", "pipeline_class", "fingerprint")
                },
                "versions": versions,
                "engines": _describe_engines(engines, profile),
                "files": manifest.list_files(staging),
            },
        )
    return True


def recipes_of(profile: Profile) -> dict[str, EngineRecipe]:
    """The recipe of each engine that has one. Raises ExportError."""
    recipes = {}
    for name, engine in profile.engines.items():
        if engine.precision != "fp32":
            recipe = load_recipe(engine.precision)[name]
            recipes[name] = replace(recipe, compute=profile.compute or recipe.compute)
    return recipes


def _describe_engines(engines: dict[str, dict[str, Any]], profile: Profile) -> dict[str, Any]:
    made = {name: (engine["precision"], engine["artifact"]) for name, engine in engines.items()}
    wanted = {name: (engine.precision, engine.artifact) for name, engine in profile.engines.items()}
    if made != wanted:
        raise BuildError(
            f"the profile {profile.name!r} wants the engines {wanted}, the export makes {made}"
        )
    return {
        name: {"runtime": profile.engines[name].runtime, **engine}
        for name, engine in engines.items()
    }


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(
        source, target, ignore=lambda _, names: [n for n in names if manifest.is_leftover(n)]
    )
