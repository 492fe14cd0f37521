"""ONNX stage → the engines of a profile, built by its library and kept like the stage itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from build import engine_builder
from build.engine_builder import Machine, find_machine
from build.manifest import digest
from build.onnx_stage import OnnxStage, recipe_digest, recipes_of
from build.profile import BuildError, Profile, load_profile, profile_names
from build.shapes import graph_inputs, optimization_profiles
from build.stage import make_stage, read_entry
from export import Progress

TIMING_CACHE = "timing.cache"


def check_target(profile: Profile, target: str | None) -> None:
    """Raises BuildError if a target was named that is none of the profile's."""
    if target is not None and target not in profile.targets:
        known = " or ".join(profile.targets) or "no GPU at all"
        raise BuildError(f"the profile {profile.name!r} builds for {known}, not for {target!r}")


def machine_for(profile: Profile, target: str | None) -> Machine | None:
    """What builds the profile's engines here; None if there is nothing to build.

    target: the one of the profile's that was named. Raises BuildError.
    """
    if profile.builder is None:
        return None
    return find_machine(profile.builder, profile.targets, target, profiles_by_target())


def profiles_by_target() -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for name in profile_names():
        profile = load_profile(name)
        for target in profile.targets:
            result.setdefault(f"{profile.builder} {target}", []).append(name)
    return result


def engine_folder(onnx: Path, profile: Profile, machine: Machine | None, name: str) -> Path:
    """Where the stage is from which the repository gets an engine's artifact."""
    if machine and profile.engines[name].builder:
        return onnx / "engines" / machine.target / name
    return onnx / name


def build_engines(
    onnx: OnnxStage, profile: Profile, machine: Machine, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Builds what is not there yet; returns the manifest entry of every engine.

    Raises BuildError, OSError.
    """
    result = {}
    for name, engine in profile.engines.items():
        entry = onnx.engines[name]
        if engine.builder:
            built = _build(onnx, profile, machine, name, progress)
            files = [engine.artifact, Path(engine.artifact).with_suffix(".json").name]
            entry = entry | built | {"artifact": engine.artifact, "files": files}
        result[name] = entry
    return result


def _build(
    onnx: OnnxStage, profile: Profile, machine: Machine, name: str, progress: Progress
) -> dict[str, Any]:
    """Returns the description of the engine, which is built if it is not there yet."""
    engine = profile.engines[name]
    model = onnx.folder / name / onnx.engines[name]["artifact"]
    dropped = onnx.checkpoint["prompt_template_dropped_tokens"]
    ranges = optimization_profiles(engine, graph_inputs(model), dropped)
    graph = read_entry(onnx.folder / name)
    assert graph is not None  # the stage is a finished one
    fingerprints = {
        "engine": name,
        "precision": engine.precision,
        "checkpoint": onnx.checkpoint["fingerprint"],
        "recipe": recipe_digest(recipes_of(profile).get(name)),
    }
    made_from = {
        "graph": graph["files"],
        "fingerprints": fingerprints,
        "machine": machine._asdict(),
        "profiles": [{tensor: asdict(r) for tensor, r in each.items()} for each in ranges],
        "weight_streaming": engine.weight_streaming,
        "sources": digest(Path(engine_builder.__file__)),
    }
    return make_stage(
        engine_folder(onnx.folder, profile, machine, name),
        made_from,
        lambda folder: engine_builder.build_engine(
            model,
            folder / engine.artifact,
            machine.builder,
            machine.target,
            ranges,
            folder.parent / TIMING_CACHE,
            progress,
            weight_streaming=engine.weight_streaming,
            made_from=fingerprints,
        ),
    )
