"""Nothing wrong is accepted: frozen dimensions, damaged weights, mismatching graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.external_data_helper import ExternalDataInfo
from torch import Tensor as TorchTensor
from torch import nn

from export import ExportError, export_checkpoint, ignore_progress, verify
from export.engines import FLOAT, INT64, Engine, engines
from export.graph import EXAMPLE_SIZES, Part, Tensor, trace
from export.source import Planned, Written
from export.write import Weight, plan_engine, save, write_engine

from .conftest import Exported


def engine_of(exported: Exported, name: str) -> Engine:
    return next(engine for engine in engines(exported.checkpoint) if engine.name == name)


def run_verify(exported: Exported, name: str, folder: Path | None = None) -> dict[str, Any]:
    source = Written(name, folder or exported.folder / name)
    return verify_from(exported, source)


def verify_from(
    exported: Exported, source: Written | Planned, mode: str = "auto"
) -> dict[str, Any]:
    engine = engine_of(exported, source.graph.graph.name)
    return verify.verify_engine(engine, exported.checkpoint, source, mode, ignore_progress)


def plan(exported: Exported, name: str) -> tuple[ir.Model, dict[str, Weight]]:
    return plan_engine(engine_of(exported, name), exported.checkpoint, ignore_progress)


@pytest.fixture
def by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine counts as large, and every session takes few weights."""
    monkeypatch.setattr(verify, "WHOLE_LIMIT", 0)
    monkeypatch.setattr(verify, "PIECE_LIMIT", 20_000)


@pytest.mark.parametrize("name", ["text_encoder", "modulation", "dit"])
def test_block_by_block_agrees(exported: Exported, by_stage: None, name: str) -> None:
    result = run_verify(exported, name)
    assert result["mode"] == "blocks"
    assert 0 < result["max_abs_error"] < 1e-4


def test_full_runs_a_large_engine_as_a_whole(exported: Exported, by_stage: None) -> None:
    source = Written("modulation", exported.folder / "modulation")
    assert verify_from(exported, source, "full")["mode"] == "whole"


@pytest.mark.parametrize("name", ["text_encoder", "modulation", "dit", "vae_decoder"])
def test_the_plan_passes_as_its_files_do(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    planned = Planned(name, *plan(exported, name))
    assert verify_from(exported, planned) == run_verify(exported, name)
    monkeypatch.setattr(verify, "WHOLE_LIMIT", 0)
    monkeypatch.setattr(verify, "PIECE_LIMIT", 20_000)
    by_stage = verify_from(exported, planned)
    assert by_stage["mode"] == ("whole" if name == "vae_decoder" else "blocks")
    assert by_stage == run_verify(exported, name)


def test_few_weights_of_a_plan_are_in_memory(
    exported: Exported, by_stage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights = plan(exported, "dit")
    live, most = 0, 0

    def read(weight: Weight) -> np.ndarray:
        nonlocal live, most
        array = whole(weight)
        live += array.nbytes
        most = max(most, live)
        weakref.finalize(array, let_go, array.nbytes)
        return array

    def let_go(size: int) -> None:
        nonlocal live
        live -= size

    whole = Weight.read
    monkeypatch.setattr(Weight, "read", read)
    verify_from(exported, Planned("dit", model, weights))
    sizes = [weight.length for weight in weights.values()]
    assert max(sizes) <= most <= verify.PIECE_LIMIT + max(sizes) < sum(sizes) / 10


def damage_weight(model: ir.Model, weights: dict[str, Weight]) -> None:
    """Block 7 has a weight of block 6."""
    name = "transformer_blocks.7.attn.to_k.weight"
    other = weights["transformer_blocks.6.attn.to_k.weight"]
    weights[name] = replace(weights[name], pieces=other.pieces)


def damage_graph(model: ir.Model, weights: dict[str, Weight]) -> None:
    """Block 7 takes the modulation of block 6."""
    values = model.graph.initializers
    values["block.7.index"].const_value = values["block.6.index"].const_value


@pytest.mark.parametrize("damage", [damage_weight, damage_graph])
def test_a_wrong_plan_is_found(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    model, weights = plan(exported, "dit")
    damage(model, weights)
    planned = Planned("dit", model, weights)
    with pytest.raises(ExportError, match=r"^dit: noise_pred differs from torch's by"):
        verify_from(exported, planned)
    monkeypatch.setattr(verify, "WHOLE_LIMIT", 0)
    with pytest.raises(ExportError, match=r"^dit, block\.7: (image|text) differs from torch's by"):
        verify_from(exported, planned)


def test_an_invalid_graph_of_the_plan_is_refused(exported: Exported) -> None:
    model, weights = plan(exported, "modulation")
    next(iter(model.graph)).op_type = "Mystery"
    with pytest.raises(ExportError, match=r"^modulation: the graph is not valid: "):
        Planned("modulation", model, weights)


def flip(folder: Path, name: str) -> None:
    """Changes the sign of the largest element of one weight in an engine's data."""
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    (tensor,) = (tensor for tensor in graph.initializer if tensor.name == name)
    info = ExternalDataInfo(tensor)
    data = np.memmap(folder / "model.onnx.data", np.uint8, mode="r+")
    values = data[info.offset : info.offset + info.length].view(np.float32)
    values[np.abs(values).argmax()] *= -1
    data.flush()


@pytest.mark.parametrize(
    "weight", ["attn.to_k.weight", "txt_mlp.net.2.weight", "attn.norm_q.weight"]
)
def test_one_damaged_weight_is_found_in_its_block(
    exported: Exported, by_stage: None, copy_of: Callable[[Path], Path], weight: str
) -> None:
    folder = copy_of(exported.folder / "dit")
    flip(folder, f"transformer_blocks.7.{weight}")
    with pytest.raises(ExportError, match=r"^dit, block\.7: (image|text) differs from torch's by"):
        run_verify(exported, "dit", folder)


def test_one_damaged_weight_is_found_in_the_whole(
    exported: Exported, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(exported.folder / "dit")
    flip(folder, "transformer_blocks.7.attn.to_k.weight")
    with pytest.raises(ExportError, match=r"^dit: noise_pred differs from torch's by"):
        run_verify(exported, "dit", folder)


def test_nan_is_no_match() -> None:
    expected = np.ones(3, np.float32)
    for value in (np.nan, np.inf):
        with pytest.raises(ExportError, match="x differs from torch's"):
            verify.compare("x", np.array([1, value, 1], np.float32), expected, 1e-4)


def edit_graph(folder: Path, change: Callable[[onnx.GraphProto], object]) -> Path:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model.graph)
    onnx.save(model, folder / "model.onnx")
    return folder


def freeze_declared(graph: onnx.GraphProto) -> None:
    graph.input[1].type.tensor_type.shape.dim[1].dim_value = 3


def change_type(graph: onnx.GraphProto) -> None:
    graph.input[2].type.tensor_type.elem_type = onnx.TensorProto.UINT8
    next(node for node in graph.node if "text_mask" in node.input).op_type = "Identity"


def rename_output(graph: onnx.GraphProto) -> None:
    next(node for node in graph.node if "noise_pred" in node.output).output[0] = "noise"
    graph.output[0].name = "noise"


def swap_blocks(graph: onnx.GraphProto) -> None:
    """Block 5 takes the modulation of block 4."""
    names = ("block.4.index", "block.5.index")
    one, other = (t for t in graph.initializer if t.name in names)
    other.raw_data = one.raw_data


def skip_block(graph: onnx.GraphProto) -> None:
    """Block 6 reads what block 5 has read."""
    for node in graph.node:
        if node.name.startswith("block.6/"):
            for i, value in enumerate(node.input):
                node.input[i] = value.replace("block.5.image", "block.4.image")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            freeze_declared,
            r"^dit: encoder_hidden_states has the dimensions \['batch', 3, 64\], but they must be",
        ),
        (rename_output, r"^dit: the graph has \['noise'\] where \['noise_pred'\] belong"),
        (change_type, r"^dit: (text_mask is UINT8, but it must be BOOL|the graph is not valid)"),
        (swap_blocks, r"^dit: noise_pred differs"),
        (skip_block, r"^dit: noise_pred differs"),
    ],
)
def test_a_changed_graph_is_refused(
    exported: Exported, copy_of: Callable[[Path], Path], change: Any, sentence: str
) -> None:
    folder = edit_graph(copy_of(exported.folder / "dit"), change)
    with pytest.raises(ExportError, match=sentence):
        run_verify(exported, "dit", folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (swap_blocks, r"^dit, block\.5: (image|text) differs"),
        (skip_block, r"^dit, block\.6: depends on "),
    ],
)
def test_a_changed_graph_is_refused_block_by_block(
    exported: Exported,
    by_stage: None,
    copy_of: Callable[[Path], Path],
    change: Any,
    sentence: str,
) -> None:
    folder = edit_graph(copy_of(exported.folder / "dit"), change)
    with pytest.raises(ExportError, match=sentence):
        run_verify(exported, "dit", folder)


def test_blocks_joined_in_the_wrong_order_are_refused(
    exported: Exported, by_stage: None, copy_of: Callable[[Path], Path]
) -> None:
    def change(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if "block_modulation" in node.output)
        node.input[3], node.input[4] = node.input[4], node.input[3]

    folder = edit_graph(copy_of(exported.folder / "modulation"), change)
    with pytest.raises(ExportError, match=r"^modulation: block_modulation does not join all"):
        run_verify(exported, "modulation", folder)


def test_a_truncated_data_file_is_refused(
    exported: Exported, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(exported.folder / "modulation")
    data = folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-4096])
    with pytest.raises(ExportError, match=r"^modulation: "):
        run_verify(exported, "modulation", folder)


def shift(graph: onnx.GraphProto) -> None:
    """The first weight lies 64 bytes further than it did."""
    next(
        entry for entry in graph.initializer[0].external_data if entry.key == "offset"
    ).value = "64"


def test_files_other_than_what_was_written_are_refused(exported: Exported, tmp_path: Path) -> None:
    model, weights = plan(exported, "modulation")
    sums = save("modulation", model, weights, tmp_path, ignore_progress)
    verify.check_written("modulation", tmp_path, sums, ignore_progress)

    def refused(sentence: str, sums: dict[str, int] = sums) -> None:
        with pytest.raises(ExportError, match=rf"^modulation: {sentence}"):
            verify.check_written("modulation", tmp_path, sums, ignore_progress)

    refused("other is in the graph or in the data, but not in both", {**sums, "other": 0})
    flip(tmp_path, "norm_out.linear.weight")
    refused(r".*/model.onnx.data does not hold norm_out\.linear\.weight as it was written")
    flip(tmp_path, "norm_out.linear.weight")
    edit_graph(tmp_path, shift)
    refused(rf".*/model.onnx.data does not hold {next(iter(sums))} as it was written")


class Frozen(nn.Module):
    """Does one thing for the length of the example and another for all others."""

    def forward(self, x: TorchTensor) -> TorchTensor:
        return x * 2 if x.shape[1] == EXAMPLE_SIZES["tokens"] else x


def test_a_module_that_fixes_a_dimension_cannot_be_traced() -> None:
    part = Part(Frozen(), (Tensor("x", FLOAT, ("batch", "tokens")),), ("y",))
    with pytest.raises(ExportError, match=r"^Frozen cannot be traced: "):
        trace(part)


def test_a_graph_with_a_frozen_length_is_refused(exported: Exported, tmp_path: Path) -> None:
    """A prologue traced at 41 tokens: its borders look right, its inside does not."""
    engine = engine_of(exported, "text_encoder")
    frozen = replace(engine.prologue, inputs=(Tensor("input_ids", INT64, ("batch", 41)),))
    write_engine(replace(engine, prologue=frozen), exported.checkpoint, tmp_path, ignore_progress)
    with pytest.raises(
        ExportError, match=r"^text_encoder: the graph does not take input_ids \[2, 46\]: "
    ):
        run_verify(exported, "text_encoder", tmp_path)


def test_an_engine_that_fails_its_check_does_not_appear(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does it replace an older one, nor leave its files behind."""

    def refuse(*arguments: Any) -> None:
        raise ExportError("modulation: no")

    (tmp_path / "modulation").mkdir()
    (tmp_path / "modulation" / "model.onnx").write_text("old")
    monkeypatch.setattr("export.export.engines", lambda c: [engine_of(exported, "modulation")])
    monkeypatch.setattr("export.export.verify_engine", refuse)
    with pytest.raises(ExportError):
        export_checkpoint(exported.checkpoint, tmp_path)
    assert (tmp_path / "modulation" / "model.onnx").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["modulation", "tokenizer.json"]
