"""A checkpoint's engines by every recipe. One block stands for all: the graph repeats it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.export.written import Written
from tests.make_checkpoint import cached_checkpoint


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(cached_checkpoint(blocks=1), tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="session")
def converted(
    written: Written, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str], Path]:
    """Returns the folder of an engine converted by a recipe: (recipe, engine, compute)."""
    folder, made = tmp_path_factory.mktemp("converted"), {}

    def convert(recipe: str, name: str, compute: str = "bf16") -> Path:
        if recipe == "fp32":
            return written.folder / name
        key = (recipe, name, compute)
        if key not in made:
            made[key] = folder / "-".join(key)
            made[key].mkdir()
            written.convert(name, recipe, compute, made[key])
        return made[key]

    return convert
