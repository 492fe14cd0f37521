"""Repositories that several tests serve; exported once and kept until something changes."""

from pathlib import Path

import pytest
import torch
from filelock import FileLock

from build.assemble import assemble
from build.profile import load_profile
from tests.make_checkpoint import cached_checkpoint

ROOT = Path(__file__).resolve().parents[1]

# Models as small as these wait for their threads longer than they compute.
torch.set_num_threads(1)

# Differs from the default in everything that a graph could have frozen.
OTHER_CONFIG = {
    "blocks": 3,
    "heads": 2,
    "head_size": 48,
    "rope_axes": (16, 16, 16),
    "text_width": 64,
    "vae_width": 12,
}


def shared(name: str) -> Path:
    """Where a repository lies that several tests have; `<name>.onnx` beside it are its stages."""
    return ROOT / "artifacts" / "tests" / name


def alone_with(name: str) -> FileLock:
    """Keeps the workers of one run out of each other's way: a second export is refused."""
    place = shared(name)
    place.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(place.with_name(f"{name}.lock"))


def exported(
    name: str, checkpoint: Path, profile: str = "cpu", calibration: Path | None = None
) -> Path:
    with alone_with(name):
        assemble(checkpoint, load_profile(profile), shared(name), calibration=calibration)
    return shared(name)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return cached_checkpoint()


@pytest.fixture(scope="session")
def other_checkpoint() -> Path:
    return cached_checkpoint(**OTHER_CONFIG)


@pytest.fixture(scope="session")
def repository(checkpoint: Path) -> Path:
    return exported("default", checkpoint)


@pytest.fixture(scope="session")
def other_repository(other_checkpoint: Path) -> Path:
    return exported("other", other_checkpoint)


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The trained one."""
    return ROOT / "checkpoints" / "tiny"


@pytest.fixture(scope="session")
def tiny_repository(tiny_checkpoint: Path) -> Path:
    return exported("tiny", tiny_checkpoint)
