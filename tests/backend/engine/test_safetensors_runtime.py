"""The engines for Hopper on the CPU, in plain torch: written from a small checkpoint, loaded and
compared with the stock modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from export import entry
from export.checkpoint import Checkpoint
from export.engines import Engine, engines
from export.packed import PACKED, write_packed
from export.progress import ignore_progress
from export.recipe import load_recipe
from export.reference import REFERENCES
from runtimes import EngineError
from runtimes.safetensors import Runtime

from tests.make_checkpoint import cached_checkpoint

# Relative errors that the formats explain; a wrong layout, gate or rotation gives 1. The small text
# encoder's weights are drawn so that a changed word shows everywhere, and so does rounding.
ALLOWED = {
    ("text_encoder", "bf16"): 0.04,
    ("modulation", "bf16"): 0.02,
    ("dit", "bf16"): 0.02,
    ("vae_decoder", "bf16"): 0.02,
    ("text_encoder", "fp8"): 0.25,
    ("dit", "fp8"): 0.12,
}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(cached_checkpoint())


@pytest.fixture(scope="module")
def made(checkpoint: Checkpoint) -> dict[str, Engine]:
    return {engine.name: engine for engine in engines(checkpoint)}


def write(engine: Engine, checkpoint: Checkpoint, precision: str, folder: Path) -> dict[str, Any]:
    recipe = load_recipe(precision)[engine.name]
    return write_packed(engine, checkpoint, recipe, entry(engine, {}), folder, ignore_progress)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(("name", "precision"), ALLOWED)
def test_equals_the_stock_module(
    name: str,
    precision: str,
    checkpoint: Checkpoint,
    made: dict[str, Engine],
    tmp_path: Path,
) -> None:
    said = write(made[name], checkpoint, precision, tmp_path)
    assert set(said["layers"]) <= {"bf16", "fp8"} and ("fp8" in said["layers"]) == (
        precision == "fp8"
    )
    runtime = Runtime(tmp_path / PACKED, {"device": "cpu"})
    reference = REFERENCES[name](checkpoint)
    with torch.no_grad():
        expected = reference.whole()
    for case, outputs in zip(reference.cases, expected, strict=True):
        results = runtime.run(case)
        assert results.keys() == outputs.keys() == said["outputs"].keys()
        for output, value in outputs.items():
            result = results[output]
            assert result.shape == value.shape and result.dtype == runtime.outputs[output]
            assert relative_error(result, value) < ALLOWED[name, precision]
