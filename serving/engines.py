"""Engines that were built for one kind of GPU by one version of a library: do they belong here?"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from build.manifest import describes_engine
from serving.errors import ServeError
from serving.installation import Installation

# Where distributions and containers keep shared libraries.
LIBRARY_FOLDERS = (*sorted(Path("/usr/lib").glob("*-linux-gnu")), Path("/usr/local/tensorrt/lib"))
# CUdevice_attribute (cuda.h): the major and the minor number of the architecture.
_COMPUTE_CAPABILITY = (75, 76)


class Gpu(NamedTuple):
    """A GPU: its name, and its architecture as `sm120`."""

    name: str
    sm: str


def built_engines(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The manifest's entries of the engines that a library has built."""
    return {name: entry for name, entry in manifest["engines"].items() if "library" in entry}


def check_descriptions(repository: Path, manifest: Mapping[str, Any]) -> None:
    """Compares what lies beside every engine with the manifest.

    Raises ServeError, which names both sides: an engine of another checkpoint, recipe, library or
    GPU has got into the repository.
    """
    for name, entry in built_engines(manifest).items():
        artifact = repository / "model_repository" / name / "1" / entry["artifact"]
        found = _read_description(artifact)
        served = manifest["checkpoint"]["fingerprint"]
        for what, theirs, ours in (
            ("the checkpoint", found["made_from"]["checkpoint"], served),
            ("the recipe", found["made_from"]["recipe"], entry["made_from"]["recipe"]),
            ("the library", _library(found), _library(entry)),
            ("the architecture", found["target"], entry["target"]),
        ):
            if theirs != ours:
                raise ServeError(
                    f"{artifact} is of {what} {_short(theirs)}, and this repository is of "
                    f"{_short(ours)}: run `make export` again."
                )


def check_machine(
    manifest: Mapping[str, Any], installation: Installation, tensorrt: str | None, gpu: Gpu | None
) -> None:
    """Compares the engines with what will run them.

    tensorrt: the version here, None if that cannot be told; Triton's backend itself refuses a plan
    of another one then. TensorRT-RTX is compared by its runtime. gpu: the first one, None if there
    is none.

    Raises ServeError, which names both sides.
    """
    for name, entry in built_engines(manifest).items():
        what = f"The engine {name} ({entry['artifact']})"
        if entry["library"] == "tensorrt":
            _check_tensorrt(what, entry["version"], installation, tensorrt)
        device = entry.get("device")
        if gpu is None:
            raise ServeError(
                f"{what} was built for {device or 'GPUs'} ({entry['target']}), and there "
                "is no GPU here: start the server where there is one, in a container with "
                "`--gpus all`."
            )
        if gpu.sm != entry["target"]:
            raise ServeError(
                f"{what} was built for {entry['target']}, and the GPU here, {gpu.name}, is "
                f"{gpu.sm}: run `make export` with a profile for {gpu.sm}."
            )
        if device not in (None, gpu.name):
            raise ServeError(
                f"{what} was built and timed on {device}, and the GPU here is "
                f"{gpu.name}: run `make export` on this machine."
            )


def _check_tensorrt(
    what: str, version: str, installation: Installation, tensorrt: str | None
) -> None:
    if "tensorrt" not in installation.backends:
        raise ServeError(
            f"{what} is run by Triton's TensorRT backend, and {installation.binary} has none: "
            "serve in NVIDIA's container nvidia/tritonserver:<yy.mm>-py3."
        )
    built_by = ".".join(version.split(".")[:3])
    if tensorrt not in (None, built_by):
        raise ServeError(
            f"{what} was built by TensorRT {built_by}, and the server here has {tensorrt}: run "
            "`make export` with that version, or serve with the release of Triton that has "
            f"{built_by}."
        )


def find_tensorrt(folders: Iterable[Path] = ()) -> str | None:
    """The version of the only TensorRT in the folders and the usual places, as `10.13.3`."""
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    places = [*folders, *(Path(folder) for folder in named if folder), *LIBRARY_FOLDERS]
    names = (path.name for place in places for path in place.glob("libnvinfer.so.*"))
    found = {match[1] for name in names if (match := re.search(r"so\.(\d+\.\d+\.\d+)$", name))}
    return found.pop() if len(found) == 1 else None


def check_gpu(models: Path, profile: str, gpu: Gpu | None) -> None:
    """Raises ServeError if the profile's configurations want a GPU where there is none, for which
    Triton's own words are a page."""
    for path in sorted(models.glob(f"*/configs/{profile}.pbtxt")):
        if gpu is None and "KIND_GPU" in path.read_text(encoding="utf-8"):
            raise ServeError(
                f"The profile {profile!r} puts {path.parts[-3]} on a GPU, and there is none here: "
                "start the server where there is one, in a container with `--gpus all`."
            )


def find_gpu() -> Gpu | None:
    """The first GPU that CUDA's driver shows, None if there is none. Takes no memory on it."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    sm = "sm"
    for attribute in _COMPUTE_CAPABILITY:
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        sm += str(number.value)
    cuda.cuDeviceGetName(name, len(name), device)
    return Gpu(name.value.decode(), sm)


def _read_description(artifact: Path) -> dict[str, Any]:
    path = artifact.with_suffix(".json")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ServeError(f"{path} cannot be read ({error}): run `make export` again.") from None
    if not describes_engine(description):
        raise ServeError(f"{path} does not describe an engine: run `make export` again.")
    return dict(description)


def _library(entry: Mapping[str, Any]) -> str:
    return f"{entry['library']} {entry['version']}"


def _short(value: Any) -> str:
    """A fingerprint as far as people compare it."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]{52}$", r"\1…", str(value))
