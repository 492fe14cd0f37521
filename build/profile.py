"""Profiles: which runtime and precision every engine gets on a kind of hardware.

A profile is a file in `build/profiles/`; what Triton needs to know of it is in the models'
`configs/<profile>.pbtxt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

PROFILES = Path(__file__).parent / "profiles"


class BuildError(Exception):
    """The repository cannot be built; the message is one sentence for the user."""


@dataclass(frozen=True)
class EngineProfile:
    """How one engine is built. `runtime` names a file in `backend/engine/runtimes/`, `precision` is
    fp32 or a recipe in `export/recipes/`."""

    runtime: str
    artifact: str
    precision: str


@dataclass(frozen=True)
class Profile:
    """A kind of hardware to build for.

    compute: overrides what the recipes compute in (`fp32` for a CPU, which has no BF16).
    """

    name: str
    description: str
    engines: dict[str, EngineProfile]
    compute: str | None = None


def load_profile(name: str) -> Profile:
    """Reads `build/profiles/<name>.yaml`.

    Raises:
        BuildError: there is no such profile.
    """
    names = sorted(path.stem for path in PROFILES.glob("*.yaml"))
    if name not in names:
        raise BuildError(f"there is no profile {name!r}; the profiles are {', '.join(names)}")
    data = yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8"))
    return Profile(
        name=name,
        description=data["description"],
        engines={engine: EngineProfile(**fields) for engine, fields in data["engines"].items()},
        compute=data.get("compute"),
    )
