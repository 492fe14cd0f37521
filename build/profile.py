"""Profiles: how every engine is made for a kind of hardware.

A profile is a file in `build/profiles/`:

    description: one line
    compute: fp32                   # optional: overrides what the recipes compute in
    targets: [sm120, sm89]          # the GPUs' architectures; only where engines are built
    engines:
      dit:
        runtime: tensorrt           # see RUNTIMES
        artifact: model.plan        # the runtime's
        precision: nvfp4            # fp32, or a recipe in export/recipes
        weight_streaming: true      # optional, rtx only: some weights may stay with the host
        shapes:                     # only where the engine is built: its optimization profiles
          - {batch: [1, 2, 8], …}   # smallest, optimized for, largest

What Triton needs to know of it is in the models' `configs/<profile>.pbtxt`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from export.graph import ExportError
from export.packed import PACKABLE, PACKED, unpackable
from export.recipe import COMPUTE, EngineRecipe, load_recipe, read_yaml

PROFILES = Path(__file__).parent / "profiles"
# Runtime → its artifact. `tensorrt` is Triton's own backend, the others are those of
# `backend/engine/runtimes/`.
RUNTIMES = {
    "onnx": "model.onnx",
    "tensorrt": "model.plan",
    "rtx": "model.rtx",
    "safetensors": PACKED,
}
# Runtime → the library that builds its artifact; the others take the graph as it is.
LIBRARY_OF = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
# Engine → the sizes that its graph leaves open, besides those that follow from them (the tokens
# of text and image together, the template's tokens before the text). Tokens of an image are
# 16×16 pixels, `height` and `width` count latent pixels, which are 8×8.
SIZES = {
    "text_encoder": ("batch", "text_tokens"),
    "modulation": ("batch",),
    "dit": ("batch", "image_tokens", "text_tokens"),
    "vae_decoder": ("batch", "height", "width"),
}
LARGEST_SIZE = 2**20  # a picture of 16384×16384 pixels has so many tokens
FP32 = "fp32"

# A size's smallest value, the one to optimize for, the largest.
Range = tuple[int, int, int]


class BuildError(Exception):
    """The repository cannot be built; the message is one sentence for the user."""


@dataclass(frozen=True)
class EngineProfile:
    """How one engine is made; `shapes`: for each optimization profile the range of every size."""

    runtime: str
    artifact: str
    precision: str
    shapes: tuple[dict[str, Range], ...] = ()
    weight_streaming: bool = False

    @property
    def builder(self) -> str | None:
        """The library that builds the artifact; None if nothing is built."""
        return LIBRARY_OF.get(self.runtime)

    @property
    def packed(self) -> bool:
        """Whether its weights are written for a forward pass of our own, instead of a graph."""
        return self.artifact == PACKED


@dataclass(frozen=True)
class Profile:
    """A kind of hardware to build for.

    compute: overrides what the recipes compute in (`fp32` for a CPU, which has no BF16).
    targets: architectures of GPUs, such as `sm120`; none where no engine is built.
    dit_precision: the DiT's, where it is not that of the profile's file.
    """

    name: str
    description: str
    engines: dict[str, EngineProfile]
    compute: str | None = None
    targets: tuple[str, ...] = ()
    dit_precision: str | None = None

    def recipe(self, engine: str) -> EngineRecipe | None:
        """An engine's, as the profile has it; None if there is none. Raises ExportError."""
        precision = self.engines[engine].precision
        if precision == FP32:
            return None
        recipe = load_recipe(precision)[engine]
        return replace(recipe, compute=self.compute or recipe.compute)

    def computes_in(self, engine: str) -> str:
        """What an engine computes in, and has at its borders."""
        recipe = self.recipe(engine)
        return recipe.compute if recipe else self.compute or FP32

    @property
    def arguments(self) -> str:
        """What names it to `make`."""
        other = f" DIT_PRECISION={self.dit_precision}" if self.dit_precision else ""
        return f"PROFILE={self.name}{other}"

    @property
    def builder(self) -> str | None:
        """The library that builds its engines; None if there are none to build."""
        return next((engine.builder for engine in self.engines.values() if engine.builder), None)

    @property
    def on_gpu(self) -> bool:
        return any(engine.runtime != "onnx" for engine in self.engines.values())


def profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_profile(name: str) -> Profile:
    """Reads `build/profiles/<name>.yaml`.

    Raises:
        BuildError: there is no such profile, or it is not as it must be.
    """
    if name not in profile_names():
        names = ", ".join(profile_names())
        raise BuildError(f"there is no profile {name!r}; the profiles are {names}")
    try:
        data = read_yaml(PROFILES / f"{name}.yaml")
    except ExportError as error:
        raise BuildError(str(error)) from None
    return parse_profile(name, data)


def parse_profile(name: str, data: Any) -> Profile:
    """Raises BuildError, which names the profile and what is wrong in it."""
    where = f"profile {name!r}"
    _check_keys(where, data, ("description", "engines"), ("compute", "targets"))
    compute, targets = data.get("compute"), data.get("targets", [])
    if compute not in (None, *COMPUTE):
        raise BuildError(f"{where}: compute is {compute!r}; it must be one of {', '.join(COMPUTE)}")
    _check_keys(f"{where}, engines", data["engines"], tuple(SIZES))
    engines = {
        engine: _engine(f"{where}, {engine}", engine, fields)
        for engine, fields in data["engines"].items()
    }
    libraries = {engine.builder for engine in engines.values()} - {None}
    sound = isinstance(targets, list) and all(
        isinstance(target, str) and re.fullmatch(r"sm\d+", target) for target in targets
    )
    if not sound or len(set(targets)) < len(targets) or bool(targets) != bool(libraries):
        raise BuildError(
            f"{where}: targets is {targets!r}; it must list architectures such as sm120, each "
            "once, where engines are built, and be absent where none is"
        )
    if len(libraries) > 1:
        raise BuildError(f"{where}: its engines are built by tensorrt and rtx; choose one of them")
    return Profile(name, str(data["description"]), engines, compute, tuple(targets))


def with_dit_precision(profile: Profile, precision: str) -> Profile:
    """The profile with another recipe of the DiT. Raises BuildError if there is none such, or it
    computes in a type that the models' configurations do not have."""
    where, dit = f"profile {profile.name!r}, DIT_PRECISION", profile.engines["dit"]
    _check_precision(where, "dit", precision, dit.artifact)
    own = load_profile(profile.name).engines["dit"].precision
    changed = replace(
        profile,
        engines={**profile.engines, "dit": replace(dit, precision=precision)},
        dit_precision=None if precision == own else precision,
    )
    computes, wanted = changed.computes_in("dit"), profile.computes_in("dit")
    if computes != wanted:
        raise BuildError(
            f"{where}: {precision} computes in {computes}; the models' configurations of this "
            f"profile have {wanted}"
        )
    return changed


def _engine(where: str, engine: str, data: Any) -> EngineProfile:
    _check_keys(where, data, ("runtime", "artifact", "precision"), ("shapes", "weight_streaming"))
    runtime, artifact, precision = data["runtime"], data["artifact"], data["precision"]
    if not isinstance(runtime, str) or runtime not in RUNTIMES:
        raise BuildError(
            f"{where}: runtime is {runtime!r}; it must be one of {', '.join(RUNTIMES)}"
        )
    if artifact != RUNTIMES[runtime]:
        raise BuildError(
            f"{where}: artifact is {artifact!r}; that of {runtime} is {RUNTIMES[runtime]}"
        )
    _check_precision(where, engine, precision, artifact)
    streaming = data.get("weight_streaming", False)
    if not isinstance(streaming, bool) or (streaming and runtime != "rtx"):
        raise BuildError(
            f"{where}: weight_streaming is {streaming!r}; it must be true or false, and true only "
            "with the runtime rtx"
        )
    shapes = data.get("shapes", [])
    if not isinstance(shapes, list) or bool(shapes) != (runtime in LIBRARY_OF):
        raise BuildError(
            f"{where}: shapes must list optimization profiles where the engine is built, and be "
            "absent where it is not"
        )
    for number, sizes in enumerate(shapes):
        place = f"{where}, shapes {number}"
        _check_keys(place, sizes, SIZES[engine])
        for size, bounds in sizes.items():
            _check_range(f"{place}: {size}", bounds)
    ranges = tuple({size: _range(bounds) for size, bounds in sizes.items()} for sizes in shapes)
    return EngineProfile(runtime, artifact, precision, ranges, streaming)


def _check_precision(where: str, engine: str, precision: Any, artifact: str) -> None:
    if precision == FP32:
        if artifact == PACKED:
            raise BuildError(f"{where}: precision is {FP32}; {PACKED} {PACKABLE}")
        return
    try:
        recipes = load_recipe(str(precision))
    except ExportError as error:
        raise BuildError(f"{where}: precision is neither {FP32} nor a recipe: {error}") from None
    if engine not in recipes:
        raise BuildError(f"{where}: the recipe {precision!r} has nothing for this engine")
    if artifact == PACKED and (why := unpackable(recipes[engine])):
        raise BuildError(f"{where}: precision is {precision!r}; {why}")


def _range(bounds: list[int]) -> Range:
    low, best, high = bounds
    return low, best, high


def _check_range(where: str, bounds: Any) -> None:
    if not (
        isinstance(bounds, list)
        and len(bounds) == 3
        and all(type(bound) is int for bound in bounds)
        and 1 <= bounds[0] <= bounds[1] <= bounds[2] <= LARGEST_SIZE
    ):
        raise BuildError(
            f"{where} is {bounds!r}; it must be [smallest, optimized for, largest], from 1 to "
            f"{LARGEST_SIZE} and in this order"
        )


def _check_keys(where: str, data: Any, needed: Iterable[str], optional: Iterable[str] = ()) -> None:
    if not isinstance(data, Mapping):
        raise BuildError(f"{where} must hold names and values, not {data!r}")
    known = [*needed, *optional]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise BuildError(f"{where}: {key!r} is unknown: {hint}")
    for key in needed:
        if key not in data:
            raise BuildError(f"{where} lacks {key}")
