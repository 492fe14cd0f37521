"""TensorRT-RTX compiles every engine of every profile, on this machine, for cards that it is not.

Precisions and shapes are the profiles' own; a new profile is covered by being there. Full TensorRT
builds only on the card itself: for its profiles the same graphs are compiled for SM120 and SM89,
and for the profile's own architectures where TensorRT-RTX knows them.
"""

from itertools import chain

import pytest

from build.engine_builder import RTX, build_engine
from build.profile import BuildError, load_profile, profile_names
from build.shapes import graph_inputs, optimization_profiles

DROPPED_TOKENS = 34  # by QwenImagePipeline's template
TARGETS = ("sm120", "sm89")
OF_RTX = {*TARGETS, "sm80", "sm86"}
# Each combination of precision and shapes once, under the name of the last profile that has it.
BUILDS = {
    (name, target, str(engine)): (profile.name, name, engine, target)
    for profile in map(load_profile, profile_names())
    for name, engine in profile.engines.items()
    if engine.builder
    for target in chain(TARGETS, sorted(OF_RTX.intersection(profile.targets)))
}


@pytest.mark.parametrize("target", TARGETS)
def test_fp8_attention_is_compiled(target, converted, tmp_path):
    """No profile has it: a faster engine for those whose pictures bear it."""
    engine = load_profile("h200").engines["dit"]
    model = converted("fp8-attention", "dit") / "model.onnx"
    ranges = optimization_profiles(engine, graph_inputs(model), DROPPED_TOKENS)
    assert build_engine(model, tmp_path / "model.rtx", RTX, target, ranges)["target"] == target


def labelled(value):
    return value if isinstance(value, str) else value.precision


@pytest.mark.parametrize(("profile", "name", "engine", "target"), BUILDS.values(), ids=labelled)
def test_it_is_compiled(profile, name, engine, target, converted, tmp_path):
    model = converted(engine.precision, name) / "model.onnx"
    ranges = optimization_profiles(engine, graph_inputs(model), DROPPED_TOKENS)

    def build():
        return build_engine(
            model,
            tmp_path / "model.rtx",
            RTX,
            target,
            ranges,
            weight_streaming=engine.weight_streaming,
        )

    if (engine.precision, target) == ("nvfp4", "sm89"):
        with pytest.raises(BuildError, match=r"cannot build .* for sm89: .*fp4_e2m1"):
            build()
        return
    description = build()
    assert description["target"] == target
    borders = {key: value["dtype"] for key, value in description["inputs"].items()}
    expected = {"timestep": "FP32", "latents": "FP32", "input_ids": "INT64"}
    expected |= {"text_mask": "BOOL", "position_ids": "INT32"}
    assert borders == {key: expected.get(key, "BF16") for key in borders}


def test_every_precision_is_compiled():
    compiled = {engine.precision for _, _, engine, _ in BUILDS.values()}
    assert compiled == {"bf16", "fp8", "int8", "nvfp4"}
