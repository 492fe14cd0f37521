"""What is written for the runtime for Hopper; what it computes is tested with the runtime."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from backend.engine.hopper.layout import layout
from export.calibration import Calibration
from export.checkpoint import Checkpoint
from export.engines import Engine, engines
from export.export import entry
from export.graph import ExportError
from export.packed import PACKED, unpackable, write_packed
from export.progress import ignore_progress
from export.recipe import EngineRecipe
from tests.make_checkpoint import cached_checkpoint

KEPT = ["img_in", "txt_in", "proj_out"]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(cached_checkpoint())


@pytest.fixture(scope="module")
def dit(checkpoint: Checkpoint) -> Engine:
    return next(engine for engine in engines(checkpoint) if engine.name == "dit")


def write(
    dit: Engine, checkpoint: Checkpoint, formats: dict[str, list[str]], folder: Path
) -> dict[str, object]:
    recipe = EngineRecipe("test", "recipe 'test', dit", "bf16", formats)
    return write_packed(dit, checkpoint, recipe, entry(dit, {}), None, folder, ignore_progress)


def test_joins_and_quantizes_rows(dit: Engine, checkpoint: Checkpoint, tmp_path: Path) -> None:
    said = write(dit, checkpoint, {"fp8": ["transformer_blocks.*"], "keep": KEPT}, tmp_path)
    assert said["layers"] == {"bf16": 3, "fp8": 12 * dit.blocks}
    stored = checkpoint.tensors["transformer"]
    sources = [f"transformer_blocks.1.attn.to_{part}.weight" for part in "qkv"]
    wide = torch.from_numpy(np.concatenate([stored[name].read() for name in sources]))
    with safe_open(tmp_path / PACKED, "pt") as file:
        weight = file.get_tensor("transformer_blocks.1.image.qkv.weight")
        scale = file.get_tensor("transformer_blocks.1.image.qkv.scale")
        bias = file.get_tensor("transformer_blocks.1.image.qkv.bias")
        description = json.loads(file.metadata()["description"])
    assert weight.dtype == torch.float8_e4m3fn and weight.shape == wide.shape
    torch.testing.assert_close(scale, wide.abs().amax(1) / 448)
    assert (weight.float().abs().amax(1) == 448).all()
    assert ((weight.float() * scale[:, None] - wide).norm() / wide.norm()).item() < 0.04
    expected = stored[sources[2].replace("weight", "bias")].read().astype(ml_dtypes.bfloat16)
    assert np.array_equal(bias[-len(expected) :].float().numpy(), expected.astype(np.float32))
    assert description["inputs"] == said["inputs"]
    assert description["inputs"]["hidden_states"]["dtype"] == "BF16"
    assert description["inputs"]["position_ids"]["dtype"] == "INT32"


def test_keeps_the_range_of_the_attentions_values(
    dit: Engine, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    recipe = EngineRecipe("test", "recipe 'test', dit", "bf16", edge_blocks=1, attention="fp8")
    with pytest.raises(ExportError, match="needs the ranges"):
        write_packed(dit, checkpoint, recipe, entry(dit, {}), None, tmp_path, ignore_progress)
    names = [f"dit/transformer_blocks.{i}.attn.value" for i in range(dit.blocks)]
    ranges = {f"{name}/amax": np.array(i - 1, np.float32) for i, name in enumerate(names)}
    calibration = Calibration(tmp_path, {}, ranges)
    said = write_packed(
        dit, checkpoint, recipe, entry(dit, {}), calibration, tmp_path, ignore_progress
    )
    assert said["attention"] == "fp8"
    with safe_open(tmp_path / PACKED, "pt") as file:
        assert dit.blocks > 2
        for i in range(1, dit.blocks - 1):
            largest = file.get_tensor(f"transformer_blocks.{i}.attention.largest_value")
            assert largest.item() == pytest.approx(max(i - 1, 1e-8))  # it is divided by
        kept = [name for name in file.keys() if name.endswith("largest_value")]  # noqa: SIM118
        assert len(kept) == dit.blocks - 2  # the ends stay in BF16


def test_every_tensor_of_the_engine_is_there_once(dit: Engine, checkpoint: Checkpoint) -> None:
    names = [
        dit.weight_name(stage, parameter)
        for stage, part in dit.stages
        for parameter, _ in part.module.named_parameters()
    ]
    packed = [name for sources in layout("dit", names).values() for name in sources]
    assert sorted(packed) == sorted(names)


def test_layers_of_one_tensor_get_the_better_format(
    dit: Engine, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    others = ["*.to_[kv]", "*.to_out.0", "*add*", "*mlp*", *KEPT]
    assert write(dit, checkpoint, {"fp8": ["*.to_q"], "keep": others}, tmp_path)["layers"] == {
        "bf16": 3 + 12 * dit.blocks
    }


def test_refuses_what_the_runtime_does_not_compute(
    dit: Engine, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="in bf16 and fp8 only"):
        write(dit, checkpoint, {"int8": ["transformer_blocks.*"], "keep": KEPT}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_says_which_part_of_a_recipe_it_is() -> None:
    computes, formats = "computes in bf16, not in fp32", "holds layers in bf16 and fp8 only"
    assert unpackable(EngineRecipe("r", "w")) == f"{PACKED} {computes}"
    assert unpackable(EngineRecipe("r", "w", "bf16", {"nvfp4": ["*"]})) == f"{PACKED} {formats}"
    assert unpackable(EngineRecipe("r", "w", "bf16", {"nvfp4": [], "fp8": ["*"]})) is None


def test_a_layer_without_its_neighbours_is_refused() -> None:
    with pytest.raises(KeyError, match="needs all of"):
        layout("dit", ["transformer_blocks.0.attn.to_q.weight"])
