"""Checkpoint → a folder with everything up to the engines, to be carried to where they are built.

<folder>/<engine>/            one stage for each engine: the graph and its weights
<folder>/calibration-<key>.safetensors   if no other file was named
<folder>/checkpoint/          a stage, written last: checkpoint.json, tokenizer.json
<folder>/engines/<target>/    what `build.engines` makes of it
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from build import manifest
from build.calibration import description, own_calibration
from build.profile import FP32, BuildError, EngineProfile, Profile
from build.stage import make_stage, read_entry, read_stage, write_entry
from export import Checkpoint, Progress, export_checkpoint
from export.calibration import load_calibration
from export.files import write_whole
from export.recipe import EngineRecipe

ROOT = Path(__file__).resolve().parents[1]
MARKER = "onnx.json"
DESCRIPTION = "checkpoint"
_PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "onnx", "onnxscript")


@dataclass(frozen=True)
class OnnxStage:
    """A finished one. checkpoint: its checkpoint.json. versions: what made it. engines, made_from:
    of each engine's graph the manifest entry, and what `plan` said of it."""

    folder: Path
    checkpoint: dict[str, Any]
    versions: dict[str, str]
    engines: dict[str, dict[str, Any]]
    made_from: dict[str, dict[str, Any]]


def plan(
    checkpoint: Mapping[str, Any], profile: Profile, calibration: Path | None
) -> dict[str, dict[str, Any]]:
    """What each engine's graph is made from.

    checkpoint: its description. calibration: the file that was named. Raises ExportError if that
    is not the checkpoint's.
    """
    if calibration:
        load_calibration(calibration, checkpoint["fingerprint"])
    ranges = manifest.digest(calibration) if calibration else description()
    recipes = recipes_of(profile)
    common = {
        "checkpoint": checkpoint["fingerprint"],
        "versions": versions(),
        "sources": sources(),
    }
    return {
        name: {
            **common,
            "recipe": recipe_digest(recipes.get(name)),
            "calibration": ranges if needs_ranges(engine, recipes.get(name)) else None,
            "packed": engine.packed,
        }
        for name, engine in profile.engines.items()
    }


def make_onnx(
    checkpoint: Checkpoint,
    profile: Profile,
    folder: Path,
    verify: str,
    progress: Progress,
    workers: int,
    calibration: Path | None,
) -> OnnxStage:
    """Makes the folder, or what it lacks. Raises BuildError, CheckpointError, ExportError,
    OSError."""
    check_folder(folder)
    planned = plan(checkpoint.describe(), profile, calibration)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / MARKER, b'{"format": 1}\n')
    kept = {}
    for name, made_from in planned.items():
        if (folder / name).is_dir():
            progress(f"{name}: check what is there", 0, 1)
        result = read_stage(folder / name, made_from)
        if result is None or not is_verified({name: result}, verify):
            shutil.rmtree(folder / name, ignore_errors=True)
        else:
            kept[name] = result
    if kept.keys() != planned.keys():
        shutil.rmtree(folder / DESCRIPTION, ignore_errors=True)
    missing = [made_from for name, made_from in planned.items() if name not in kept]
    if calibration is None and any(made_from["calibration"] for made_from in missing):
        calibration = own_calibration(checkpoint, folder, progress)

    def finished(name: str, entry: dict[str, Any]) -> None:
        write_entry(folder / name, planned[name], entry)

    def describe(target: Path) -> dict[str, Any]:
        for name in ("checkpoint.json", "tokenizer.json"):
            (folder / name).rename(target / name)
        return {"profile": profile.name, "versions": versions()}

    # The name is the folder's, and no part of the fingerprint.
    whole = {**planned, "name": checkpoint.describe()["name"]}
    if missing or read_stage(folder / DESCRIPTION, whole) is None:
        export_checkpoint(
            checkpoint,
            folder,
            verify,
            progress,
            workers,
            recipes_of(profile),
            calibration,
            kept,
            finished,
            [name for name, engine in profile.engines.items() if engine.packed],
        )
    make_stage(folder / DESCRIPTION, whole, describe)
    return open_onnx(profile, folder, intact=True)


def is_verified(engines: Mapping[str, Mapping[str, Any]], verify: str) -> bool:
    """Whether the engines, by their manifest entries, were checked as `verify` asks for."""
    return verify == "auto" or all(
        engine.get("verified", {}).get("mode") == "whole" for engine in engines.values()
    )


def check_folder(folder: Path) -> None:
    """Raises BuildError if the folder is none, or holds something else, such as a checkpoint, whose
    folders have the same names."""
    if folder.exists() and not folder.is_dir():
        raise BuildError(f"{folder} is no folder: name one for the ONNX stage")
    if folder.exists() and not (folder / MARKER).is_file() and any(folder.iterdir()):
        raise BuildError(f"{folder} is not empty and holds no ONNX stage: name another folder")


def open_onnx(profile: Profile, folder: Path, intact: bool = False) -> OnnxStage:
    """Opens a folder of `make onnx`, which may have been carried here without its checkpoint.

    intact: its files were checked a moment ago.

    Raises:
        BuildError: it is none, unfinished, of another profile or made by other code.
    """
    again = f"make it with `make onnx CHECKPOINT=<dir> {profile.arguments} ONNX={folder}`"
    whole = read_entry(folder / DESCRIPTION)
    if whole is None:
        raise BuildError(
            f"no checkpoint was named (CHECKPOINT=<dir>), and {folder} is no finished ONNX stage: "
            f"{again}"
        )
    made_for = whole["result"]["profile"]
    engines = {}
    recipes = recipes_of(profile)
    for name in profile.engines:
        made_from = whole["made_from"].get(name)
        entry = read_entry(folder / name)
        result = None
        if made_from and entry and entry["made_from"] == made_from:
            result = entry["result"] if intact else read_stage(folder / name, made_from)
        if result is None:
            raise BuildError(f"{folder} lacks {name}, or it is damaged: {again}")
        if made_from["recipe"] != recipe_digest(recipes.get(name)):
            named = "name that one as DIT_PRECISION=<recipe>, or " if name == "dit" else ""
            raise BuildError(
                f"{folder} was made for the profile {made_for!r}, by another recipe for {name} "
                f"than {profile.arguments} has here: {named}{again}"
            )
        if made_from["sources"] != sources():
            raise BuildError(
                f"{folder} was made by another version of this project's export/ than the one "
                f"here: use that version, or {again}"
            )
        engines[name] = result
    if read_stage(folder / DESCRIPTION, whole["made_from"]) is None:
        raise BuildError(f"{folder / DESCRIPTION} is damaged: {again}")
    text = (folder / DESCRIPTION / "checkpoint.json").read_text(encoding="utf-8")
    made_from = {name: whole["made_from"][name] for name in engines}
    return OnnxStage(folder, json.loads(text), whole["result"]["versions"], engines, made_from)


def recipes_of(profile: Profile) -> dict[str, EngineRecipe]:
    """The recipe of each engine that has one. Raises ExportError."""
    recipes = {name: profile.recipe(name) for name in profile.engines}
    return {name: recipe for name, recipe in recipes.items() if recipe is not None}


def needs_ranges(engine: EngineProfile, recipe: EngineRecipe | None) -> bool:
    """Whether the engine takes calibrated ranges: packed ones find those of their layers' inputs
    while they compute."""
    if recipe is None:
        return False
    return bool(recipe.attention or (recipe.formats and not engine.packed))


def recipe_digest(recipe: EngineRecipe | None) -> str:
    """What a recipe says, as a SHA-256; `fp32` where there is none."""
    if recipe is None:
        return FP32
    return hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}


def sources() -> str:
    """A SHA-256 of the code that makes the graphs."""
    return manifest.digest_of_inputs({}, sorted((ROOT / "export").glob("*.py")), ROOT)
