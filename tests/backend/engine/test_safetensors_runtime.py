"""The engines for Hopper on the CPU, in plain torch: written from a small checkpoint, loaded and
compared with the stock modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from export.checkpoint import Checkpoint
from export.engines import Engine, engines
from export.export import entry
from export.packed import PACKED, write_packed
from export.progress import ignore_progress
from export.recipe import load_recipe
from export.reference import REFERENCES
from runtimes import EngineError
from runtimes.safetensors import Runtime
from tests.make_checkpoint import cached_checkpoint

# Relative errors that the formats explain; a wrong layout, gate or rotation gives 1. The small text
# encoder's weights are drawn so that a changed word shows everywhere, and so does rounding.
DTYPES = {"BF16": torch.bfloat16, "UINT8": torch.uint8}
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
    return write_packed(
        engine, checkpoint, recipe, entry(engine, {}), None, folder, ignore_progress
    )


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
    assert set(said["layers"]) == ({"bf16", "fp8"} if precision == "fp8" else {"bf16"})
    runtime = Runtime(tmp_path / PACKED, {"device": "cpu"})
    reference = REFERENCES[name](checkpoint)
    with torch.no_grad():
        expected = reference.whole()
    for case, outputs in zip(reference.cases, expected, strict=True):
        results = runtime.run(case)
        assert results.keys() == outputs.keys() == said["outputs"].keys()
        for output, value in outputs.items():
            result = results[output]
            assert (
                result.shape == value.shape
                and result.dtype == DTYPES[dict(runtime.outputs)[output]]
            )
            assert relative_error(result, value) < ALLOWED[name, precision]


@pytest.fixture(scope="module")
def written(
    checkpoint: Checkpoint, made: dict[str, Engine], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("modulation")
    write(made["modulation"], checkpoint, "bf16", folder)
    return folder / PACKED


def refusal(artifact: Path, parameters: dict[str, str]) -> str:
    with pytest.raises(EngineError) as caught:
        Runtime(artifact, parameters)
    return str(caught.value)


def test_refuses_a_file_that_is_cut_off(written: Path, tmp_path: Path) -> None:
    short = tmp_path / PACKED
    short.write_bytes(written.read_bytes()[:-100])
    assert "run 'make export'" in refusal(short, {"device": "cpu"})


def test_refuses_a_file_of_something_else(written: Path, tmp_path: Path) -> None:
    other = tmp_path / PACKED
    save_file({"weight": torch.zeros(2)}, other)
    assert "has no description of format 1" in refusal(other, {"device": "cpu"})


def test_refuses_an_unknown_device(written: Path) -> None:
    assert "it must be cuda or cpu" in refusal(written, {"device": "gpu"})


def test_refuses_an_unknown_place_for_weights(written: Path) -> None:
    assert "it must be device or host" in refusal(written, {"device": "cpu", "weights": "disk"})


def test_modulation_computes_from_weights_on_the_host(written: Path) -> None:
    given = {"timestep": torch.tensor([[0.9], [0.1]])}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    usual, other = (
        Runtime(written, {"device": device, "weights": place}).run(given)
        for place in ("device", "host")
    )
    assert usual.keys() == other.keys()
    for name in usual:
        assert other[name].device.type == device
        assert torch.equal(usual[name], other[name])


def test_only_modulation_has_its_weights_on_the_host(
    checkpoint: Checkpoint, made: dict[str, Engine], tmp_path: Path
) -> None:
    write(made["dit"], checkpoint, "bf16", tmp_path)
    said = refusal(tmp_path / PACKED, {"device": "cpu", "weights": "host"})
    assert said.endswith("is for modulation alone; model.safetensors is of dit")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu_unless_told_otherwise(written: Path) -> None:
    assert "torch finds none here" in refusal(written, {})


def test_says_in_one_sentence_that_the_engine_failed(written: Path) -> None:
    runtime = Runtime(written, {"device": "cpu"})
    with pytest.raises(EngineError, match="the engine failed"):
        runtime.run({"timestep": torch.zeros(2, 3)})
