"""TensorRT-RTX compiles every engine in every precision, on this machine, for cards that it is not.

One block stands for all: the graph repeats it.
"""

from pathlib import Path

import pytest

from build.engine_builder import RTX, ShapeRange, build_engine
from build.profile import BuildError
from tests.export.written import Written
from tests.make_checkpoint import cached_checkpoint

TOKENS, TEXT = 64, 32
SHAPES = {
    "hidden_states": (TOKENS, 64),
    "text_mask": (TEXT,),
    "position_ids": (TOKENS + TEXT, 3),
    "final_modulation": (),
    "input_ids": (34 + TEXT,),
    "timestep": (1,),
    "latents": (16, 16, 16),
}
BUILDS = [
    ("bf16", "dit"),
    ("bf16", "text_encoder"),
    ("bf16", "modulation"),
    ("bf16", "vae_decoder"),
    ("fp8", "dit"),
    ("fp8", "text_encoder"),
    ("int8", "dit"),
    ("int8", "text_encoder"),
    ("nvfp4", "dit"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return Written(cached_checkpoint(blocks=1), tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def converted(written, tmp_path_factory):
    """Returns the folder of an engine converted by a recipe, for TensorRT."""
    folder, made = tmp_path_factory.mktemp("converted"), {}

    def convert(recipe: str, name: str) -> Path:
        if (recipe, name) not in made:
            made[recipe, name] = folder / f"{name}-{recipe}"
            made[recipe, name].mkdir()
            written.convert(name, recipe, "bf16", made[recipe, name])
        return made[recipe, name]

    return convert


def profile(written, name):
    """One to eight rows of one size."""
    ranges = {}
    for tensor in written.engines[name].inputs:
        fixed = SHAPES.get(tensor.name) or tensor.shape[1:]
        if tensor.name == "encoder_hidden_states":
            fixed = (TEXT, tensor.shape[2])
        ranges[tensor.name] = ShapeRange((1, *fixed), (2, *fixed), (8, *fixed))
    return ranges


@pytest.mark.parametrize("target", ["sm120", "sm89"])
@pytest.mark.parametrize(("recipe", "name"), BUILDS, ids=lambda value: value)
def test_it_is_compiled(recipe, name, target, written, converted, tmp_path):
    if (recipe, target) == ("nvfp4", "sm89"):
        with pytest.raises(BuildError, match=r"cannot build .* for sm89: .*fp4_e2m1"):
            build(recipe, name, target, written, converted, tmp_path)
        return
    description = build(recipe, name, target, written, converted, tmp_path)
    assert description["target"] == target
    borders = {key: value["dtype"] for key, value in description["inputs"].items()}
    expected = {"timestep": "FP32", "latents": "FP32", "input_ids": "INT64"}
    expected |= {"text_mask": "BOOL", "position_ids": "INT32"}
    assert borders == {key: expected.get(key, "BF16") for key in borders}


def build(recipe, name, target, written, converted, tmp_path):
    model = converted(recipe, name) / "model.onnx"
    ranges = [profile(written, name)]
    return build_engine(model, tmp_path / "model.rtx", RTX, target, ranges)
