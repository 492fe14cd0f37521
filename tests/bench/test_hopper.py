from pathlib import Path

import pytest

from bench.common import earlier_results
from bench.hopper import print_table
from bench.hopper_repository import make, of_dit
from build.profile import BuildError
from export import ExportError


def test_the_table_takes_whatever_a_part_finds(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"part": {"numerics": [{"sigma": 0.6, "cosine": 0.5}], "ms": [2.0, 1.0, 3.0]}})
    assert capsys.readouterr().out == (
        "part: numerics: sigma 0.6, cosine 0.5\npart: ms: [2.0, 1.0, 3.0]\n"
    )


@pytest.mark.parametrize("recipe", ["nvfp4", "int8"])
def test_a_repository_is_described_as_what_it_is(recipe: str) -> None:
    assert of_dit("fp8-rows-attention").attention == "fp8"
    with pytest.raises(ExportError, match=f"recipe '{recipe}', dit: model.safetensors holds"):
        of_dit(recipe)


def test_a_repository_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for target in (tmp_path, tmp_path / "mine"):
        with pytest.raises(BuildError, match="is there already: name a folder"):
            make(target)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_stands_in_the_way_of_results_is_said_first(tmp_path: Path) -> None:
    out = tmp_path / "new.json"
    assert earlier_results(out) == {} == earlier_results(out)
    out.write_text('{"parts": {}}')
    assert earlier_results(out) == {"parts": {}}
    for content in ("{", "[]", "\0"):
        out.write_text(content)
        with pytest.raises(SystemExit, match=r"new\.json is no file of results: name"):
            earlier_results(out)
        assert out.read_text() == content
    with pytest.raises(SystemExit, match="cannot be written: No such file or directory"):
        earlier_results(tmp_path / "missing" / "new.json")
