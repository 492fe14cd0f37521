"""The recipes keep the trained checkpoint's predictions: what docs/quantization.md promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.trained import Trained
from build.tiny import CALIBRATION
from export.calibration import Calibration, load_calibration
from export.recipe import load_recipe

LOWEST = [
    ("fp8", "dit", 0.999),
    ("int8", "dit", 0.999),
    ("nvfp4", "dit", 0.99),
    ("fp8", "text_encoder", 0.999),
    ("int8", "text_encoder", 0.999),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def calibration(trained: Trained) -> Calibration:
    return load_calibration(CALIBRATION, trained.fingerprint)


@pytest.mark.parametrize(("recipe", "engine", "lowest"), LOWEST)
def test_predictions_stay(
    recipe: str, engine: str, lowest: float, trained: Trained, calibration: Calibration
) -> None:
    """At early, middle and late steps, for every prompt."""
    chosen = load_recipe(recipe)[engine]
    found = trained.cosines(engine, chosen, calibration)
    assert len(found) == (3 if engine == "dit" else 1)
    assert lowest <= min(found) and max(found) < 0.99999
    # And not because next to nothing is quantized.
    layers = trained.layers(engine)
    formats = chosen.assign(layers, trained.engines[engine].blocks)
    assert list(formats.values()).count(recipe) > 0.25 * len(layers)


@pytest.mark.parametrize(("recipe", "engine", "lowest"), LOWEST)
def test_the_exceptions_are_needed(
    recipe: str, engine: str, lowest: float, trained: Trained, calibration: Calibration
) -> None:
    chosen = load_recipe(recipe)[engine]
    outside = chosen.formats.get("keep", [])
    inner = [layer for layer in trained.layers(engine) if layer not in outside]
    formats = {recipe: inner} | ({"keep": outside} if outside else {})
    everywhere = replace(chosen, formats=formats, edge_blocks=0)
    assert min(trained.cosines(engine, everywhere, calibration)) < lowest


def test_fp8_attention_costs_what_the_docs_say(trained: Trained, calibration: Calibration) -> None:
    found = trained.cosines("dit", load_recipe("fp8-attention")["dit"], calibration)
    assert 0.997 < min(found) < 0.999  # which is why no profile has it
