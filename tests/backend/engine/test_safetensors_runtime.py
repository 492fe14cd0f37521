"""The engines for Hopper on the CPU, in plain torch: written from a small checkpoint, loaded and
compared with the stock modules."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hopper.ops
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
def packed(
    checkpoint: Checkpoint, made: dict[str, Engine], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The files of some engines in BF16."""
    files = {}
    for name in ("text_encoder", "modulation", "dit"):
        folder = tmp_path_factory.mktemp(name)
        write(made[name], checkpoint, "bf16", folder)
        files[name] = folder / PACKED
    return files


@pytest.fixture(scope="module")
def written(packed: dict[str, Path]) -> Path:
    return packed["modulation"]


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


def test_only_modulation_has_its_weights_on_the_host(packed: dict[str, Path]) -> None:
    said = refusal(packed["dit"], {"device": "cpu", "weights": "host"})
    assert said.endswith("is for modulation alone; model.safetensors is of dit")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu_unless_told_otherwise(written: Path) -> None:
    assert "torch finds none here" in refusal(written, {})


def test_says_in_one_sentence_that_the_engine_failed(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(written, {"device": "cpu"})

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise IndexError("out of\nrange")

    monkeypatch.setattr(runtime, "_engine", fail)
    said = r"^the engine failed on timestep \[2, 1\]: out of range$"
    with pytest.raises(EngineError, match=said):
        runtime.run({"timestep": torch.zeros(2, 1)})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_modulation": (1, 5, 2, 768)}, r"\[1, 5, 2, 768\]; it must be \[1, 4, 2, 768\]"),
        ({"block_modulation": (1, 4, 2, 762)}, r"\[1, 4, 2, 762\]; it must be \[1, 4, 2, 768\]"),
        ({"final_modulation": (1, 0)}, r"shape \[1, 0\]; it must be \[1, 256\]"),
        ({"final_modulation": (2, 256)}, r"shape \[2, 256\]; it must be \[1, 256\]"),
        ({"hidden_states": (1, 0, 64)}, r"must be \[1, -1, 64\], where -1 is any size from 1"),
        ({"text_mask": (1, 8, 1)}, r"shape \[1, 8, 1\]; it must be \[1, -1\]"),
        ({"text_mask": (1, 9)}, "with 9 in text_mask and 4 in hidden_states they must be for 9"),
        ({"position_ids": (1, 13, 3)}, "8 and 13 tokens; .* they must be for 8 and 12"),
    ],
)
def test_inputs_that_do_not_fit(
    changes: dict[str, Any], said: str, packed: dict[str, Path]
) -> None:
    """Past a tensor's end lies foreign memory."""
    shapes = {
        "hidden_states": (1, 4, 64),
        "encoder_hidden_states": (1, 8, 96),
        "text_mask": (1, 8),
        "position_ids": (1, 12, 3),
        "block_modulation": (1, 4, 2, 768),
        "final_modulation": (1, 256),
    }
    runtime = Runtime(packed["dit"], {"device": "cpu"})
    given = {name: torch.ones(shape) for name, shape in shapes.items()}
    assert runtime.run(given)["noise_pred"].shape == (1, 4, 64)
    with pytest.raises(EngineError, match=said) as caught:
        runtime.run(given | {name: torch.ones(shape) for name, shape in changes.items()})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([5] * 34 + [10**6], "ids from 5 to 1000000; the text encoder knows 0 to 703"),
        ([5] * 34 + [-1], "ids from -1 to 5; the text encoder knows 0 to"),
        ([5] * 34, "holds 34 tokens; it must be the template's 34 and at least one more"),
    ],
)
def test_ids_that_the_text_encoder_cannot_take(
    ids: list[int], said: str, packed: dict[str, Path]
) -> None:
    runtime = Runtime(packed["text_encoder"], {"device": "cpu"})
    with pytest.raises(EngineError, match=said):
        runtime.run({"input_ids": torch.tensor([ids])})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, _: tensors.pop("img_in.weight"), "model.safetensors lacks img_in.weight"),
        (lambda _, said: said.pop("config"), "model.safetensors lacks config: run 'make export'"),
        (lambda _, said: said.update(engine="unet"), "lacks unet: run 'make export'"),
        (lambda _, said: said.update(inputs=[]), "is none of this version .*: run 'make export'"),
        (lambda _, said: said["config"].update(axes_dims_rope=3), "is none of this version"),
        (lambda tensors, _: tensors.update({"img_in.weight": torch.ones(2, 2)}), "cannot be start"),
    ],
)
def test_refuses_a_file_that_does_not_fit(
    change: Any, said: str, packed: dict[str, Path], tmp_path: Path
) -> None:
    with safe_open(packed["dit"], "pt") as file:
        description = json.loads(file.metadata()["description"])
    tensors = load_file(packed["dit"])
    change(tensors, description)
    save_file(tensors, tmp_path / PACKED, {"description": json.dumps(description)})
    with pytest.raises(EngineError, match=said) as caught:
        Runtime(tmp_path / PACKED, {"device": "cpu"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("description", ["[]", "null", "3"])
def test_refuses_a_description_that_is_none(description: str, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / PACKED, {"description": description})
    assert "has no description of format 1" in refusal(tmp_path / PACKED, {"device": "cpu"})


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_refused(
    capability: tuple[int, int], written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    sm = "".join(map(str, capability))
    assert f"is for Hopper (SM90), and the GPU here, a card, is SM{sm}" in refusal(written, {})


def test_a_gpu_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in [name for name in sys.modules if name.startswith("hopper.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("hopper.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(EngineError, match=r"need the compiler triton, .*: `pip install triton`$"):
        runpy.run_path(hopper.ops.__file__)
