import pytest

from bench.hopper import print_table
from bench.hopper_repository import of_dit
from export import ExportError


def test_the_table_takes_whatever_a_part_finds(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"part": {"numerics": [{"sigma": 0.6, "cosine": 0.5}], "ms": [2.0, 1.0, 3.0]}})
    assert capsys.readouterr().out == (
        "part: numerics: sigma 0.6, cosine 0.5\npart: ms: [2.0, 1.0, 3.0]\n"
    )


@pytest.mark.parametrize("recipe", ["nvfp4", "int8"])
def test_a_repository_is_described_as_what_it_is(recipe: str) -> None:
    assert of_dit("fp8-rows-attention").attention == "fp8"
    with pytest.raises(ExportError, match=f"the recipe '{recipe}' makes no DiT in BF16 and FP8"):
        of_dit(recipe)
