"""Recipes, casts and number formats: their arithmetic, their graphs, and what TensorRT says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from export import ExportError, rows
from export.calibration import Calibration
from export.convert import convert_engine
from export.quantize import (
    Activations,
    layers,
    nvfp4,
    quantize,
    smoothing,
    to_e2m1,
    to_e4m3,
)
from export.recipe import RECIPES, load_recipe, parse_recipe
from export.simulate import simulate
from export.write import Weight, save
from quality.distances import cosine

from .written import NAMES, Written, ignore

QUANTIZED = [("fp8", "dit"), ("fp8", "text_encoder"), ("int8", "dit"), ("int8", "text_encoder")]


@pytest.fixture(scope="module")
def written(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(checkpoint, tmp_path_factory.mktemp("written"))


# ---------------------------------------------------------------------- arithmetic


def test_nvfp4_keeps_what_it_can_hold() -> None:
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    block = np.concatenate([grid, -grid])
    # Block scales 448 and 1 over an overall scale of 1/448 · 6/6.
    array = np.stack([np.concatenate([block, block / 448])])
    elements, scales, overall = nvfp4(array)
    assert overall == pytest.approx(1 / 448)
    np.testing.assert_array_equal(scales.astype(np.float32), [[448, 1]])
    values = elements.astype(np.float32) * np.repeat(scales.astype(np.float32), 16, -1) * overall
    np.testing.assert_allclose(values, array, rtol=1e-6)


def test_nvfp4_is_as_near_as_its_steps() -> None:
    array = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    elements, scales, overall = nvfp4(array)
    wide = np.repeat(scales.astype(np.float32), 16, -1) * overall
    error = np.abs(elements.astype(np.float32) * wide - array)
    # Half the widest step (2), and what the scale's own rounding (1/16) cuts off.
    assert (error <= wide * 1.0 + np.abs(array) / 16 + 1e-6).all()
    assert 0.08 < np.sqrt((error**2).mean() / (array**2).mean()) < 0.12


def test_nvfp4_of_nought() -> None:
    elements, scales, overall = nvfp4(np.zeros((2, 16), np.float32))
    assert overall > 0
    assert not elements.astype(np.float32).any() and not scales.astype(np.float32).any()


@pytest.mark.parametrize(
    ("cast", "largest", "dtype"),
    [(to_e4m3, 448, ml_dtypes.float8_e4m3fn), (to_e2m1, 6, ml_dtypes.float4_e2m1fn)],
)
def test_casts_are_those_of_ml_dtypes(cast: Any, largest: int, dtype: Any) -> None:
    """Every number that BF16 has, and every tie."""
    bf16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    ties = np.arange(-largest * 2048, largest * 2048 + 1, dtype=np.float32) / 2048
    for array in (bf16[np.isfinite(bf16)].clip(-largest, largest), ties):
        assert cast(array).dtype == dtype
        assert cast(array).tobytes() == array.astype(dtype).tobytes()


def test_nvfp4_is_the_same_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).standard_normal((37, 64)).astype(np.float32)
    whole = nvfp4(array)
    monkeypatch.setattr(rows, "STRETCH", 3 * 64)
    for one, other in zip(nvfp4(array), whole, strict=True):
        assert one.tobytes() == other.tobytes()


def test_smoothing_evens_out_and_is_exact() -> None:
    activations, weights = np.array([100.0, 1.0, 0.01]), np.array([1.0, 1.0, 1.0])
    factors = smoothing(activations, weights, 0.5)
    np.testing.assert_array_equal(factors, np.exp2(np.rint(np.log2(factors))))
    assert (activations / factors).max() < 15


def small_graph(array: np.ndarray) -> tuple[ir.Model, dict[str, Weight]]:
    """x [n, in] → x · Wᵀ, as the exporter writes it."""
    weight = Weight("layer.weight", array.shape, ir.DataType.FLOAT, lambda: iter([array]))
    float32 = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", type=float32, shape=ir.Shape(["n", array.shape[1]]))
    stored, turned = weight.value(), ir.Value(name="turned", type=float32)
    y = ir.Value(name="y", type=float32, shape=ir.Shape(["n", array.shape[0]]))
    nodes = [
        ir.Node("", "Transpose", [stored], [ir.AttrInt64s("perm", [1, 0])], outputs=[turned]),
        ir.Node("", "MatMul", [x, turned], outputs=[y]),
    ]
    graph = ir.Graph(
        [x], [y], nodes=nodes, initializers=[stored], opset_imports={"": 23}, name="small"
    )
    return ir.Model(graph, ir_version=10), {weight.name: weight}


@pytest.mark.parametrize("kind", ["fp8", "int8", "nvfp4"])
def test_a_layer_computes_what_its_format_says(kind: str, tmp_path: Path) -> None:
    """ONNX Runtime on the graph against numpy with ml_dtypes' own rounding."""
    rng = np.random.default_rng(0)
    array = rng.standard_normal((24, 64)).astype(np.float32)
    x = rng.standard_normal((40, 64)).astype(np.float32) * 3
    x[0, :16], x[1, 3], x[2, :4] = 0, 50.0, [0.25, 0.75, 1.25, 2.5]  # also beyond the range
    amax = 8.0
    model, weights = small_graph(array)
    activations = Activations(lambda name: amax, lambda name: np.abs(x).max(0))
    stored = quantize(model, weights, {"layer": kind}, activations)
    source = tmp_path / "source"
    source.mkdir()
    save("small", model, stored, source, ignore)
    if kind == "nvfp4":
        target = tmp_path / "target"
        target.mkdir()
        simulate(source, target)
        overall = np.float32(amax / (6 * 448))
        blocks = x.reshape(40, 4, 16)
        scales = (np.abs(blocks).max(-1) / np.float32(6) / overall).clip(0, 448)
        wide = scales.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)[..., None] * overall
        quotients = np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide > 0).clip(-6, 6)
        x_q = (quotients.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * wide).reshape(40, 64)
        elements, w_scales, w_overall = nvfp4(array)
        w_q = elements.astype(np.float32) * np.repeat(w_scales.astype(np.float32), 16, -1)
        w_q = w_q * w_overall
    else:
        target = source
        onnx.checker.check_model(source / "model.onnx", full_check=True)
        largest = {"fp8": 448.0, "int8": 127.0}[kind]
        scale = np.float32(amax / largest)
        w_scale = np.abs(array).max(1, keepdims=True) / np.float32(largest)
        if kind == "fp8":
            x_q = (x / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            w_q = (array / w_scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            x_q, w_q = np.rint(x / scale).clip(-128, 127), np.rint(array / w_scale)
        x_q, w_q = x_q * scale, w_q * w_scale
    session = ort.InferenceSession(str(target / "model.onnx"), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, x_q @ w_q.T, rtol=1e-4, atol=1e-4)
    assert not np.allclose(y, x @ array.T, atol=1e-3)  # it is not the exact product


def test_nvfp4_takes_multiples_of_16(tmp_path: Path) -> None:
    model, weights = small_graph(np.ones((8, 24), np.float32))
    activations = Activations(lambda name: 1.0, lambda name: np.ones(24))
    with pytest.raises(ExportError, match="layer has 24 input channels; NVFP4 takes multiples of"):
        quantize(model, weights, {"layer": "nvfp4"}, activations)


# ---------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_shipped_recipes_fit_every_layer(name: str, written: Written) -> None:
    for engine, recipe in load_recipe(name).items():
        model = ir.load(written.folder / engine / "model.onnx")
        found = layers(model, written.weights[engine])
        formats = recipe.assign(found, 60)
        assert set(formats) <= set(found)
        assert bool(formats) == bool(recipe.formats)


def test_layers_have_the_names_of_the_checkpoint(written: Written) -> None:
    model = ir.load(written.folder / "dit" / "model.onnx")
    found = layers(model, written.weights["dit"])
    blocks = written.engines["dit"].blocks
    assert len(found) == 12 * blocks + 3
    assert "transformer_blocks.1.img_mlp.net.0.proj" in found and "proj_out" in found


def test_edge_blocks_stay() -> None:
    recipe = parse_recipe("r", {"dit": {"edge_blocks": 2, "formats": {"fp8": ["b.*"]}}})["dit"]
    names = [f"b.{i}.x" for i in range(60)]
    assert set(recipe.assign(names, 60)) == {f"b.{i}.x" for i in range(2, 58)}
    assert len(recipe.assign(names[:6], 6)) == 6  # two of sixty are none of six


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"formats": {"fp8": ["a.*"]}}, "the layer b.0 matches no pattern, not just one"),
        (
            {"formats": {"fp8": ["*"], "keep": ["b.*"]}},
            r"the layer b\.0 matches '\*' \(fp8\) and 'b\.\*' \(keep\)",
        ),
        ({"formats": {"fp8": ["*.0"], "keep": ["c"]}}, r"the pattern 'c' \(keep\) matches no"),
        ({"formats": {"fp9": ["*"]}}, "'fp9' is unknown: did you mean fp8"),
        ({"formats": {"fp8": "*"}}, "formats must hold lists of patterns"),
        ({"format": {}}, "'format' is unknown: did you mean formats"),
        ({"compute": "fp16"}, "compute is 'fp16'; it must be one of fp32, bf16"),
        ({"smooth": 2}, "smooth is 2; it must be between 0 and 1"),
        ({"edge_blocks": -1}, "edge_blocks is -1; it must be a whole number from 0"),
        ("fp8", "must hold names and values"),
    ],
)
def test_wrong_recipes(entry: Any, sentence: str) -> None:
    with pytest.raises(ExportError, match=rf"^recipe 'r', dit.*{sentence}"):
        parse_recipe("r", {"dit": entry})["dit"].assign(["a.0", "b.0"], 1)


def test_unknown_recipe() -> None:
    with pytest.raises(ExportError, match="there is no recipe 'fp3'; the recipes are bf16, fp8"):
        load_recipe("fp3")


# ---------------------------------------------------------------------- engines


@pytest.mark.parametrize(("recipe", "name"), [*QUANTIZED, ("nvfp4", "dit")])
def test_quantized_engines_compute_nearly_the_same(
    recipe: str, name: str, written: Written, tmp_path: Path
) -> None:
    """Random weights, scaled so that everything matters; trained ones are measured by pictures."""
    made = written.convert(name, recipe, "fp32", tmp_path)
    found = cosine(written.run(name, tmp_path), written.run(name))
    assert (0.9 if recipe == "nvfp4" else 0.97) < found < 0.999999
    assert made["precision"] == recipe and made["compute"] == "fp32"
    quantized = made["layers"][recipe]
    assert quantized >= 7 * written.engines[name].blocks
    if recipe != "nvfp4":
        before = (written.folder / name / "model.onnx.data").stat().st_size
        assert (tmp_path / "model.onnx.data").stat().st_size < 0.6 * before


@pytest.mark.parametrize("name", NAMES)
def test_bf16_graphs_are_valid_and_keep_what_needs_fp32(
    name: str, written: Written, tmp_path: Path
) -> None:
    written.convert(name, "bf16", "bf16", tmp_path)
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    graph = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph
    exact, narrow = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16
    borders = {x.name: x.type.tensor_type.elem_type for x in [*graph.input, *graph.output]}
    for border, kind in borders.items():
        if kind in (exact, narrow):
            assert (kind == exact) == (border in ("timestep", "latents")), border
    kinds = {x.name: x.data_type for x in graph.initializer}
    for node in graph.node:
        if node.op_type in ("MatMul", "Conv", "Gemm"):
            assert all(kinds.get(x, narrow) == narrow for x in node.input)
        if node.op_type == "Mul" and "frequencies" in node.input[1]:
            assert kinds[node.input[1]] == exact
    before = (written.folder / name / "model.onnx.data").stat().st_size
    assert (tmp_path / "model.onnx.data").stat().st_size < 0.52 * before


def test_a_quantizing_recipe_needs_ranges(written: Written, tmp_path: Path) -> None:
    model = ir.load(written.folder / "dit" / "model.onnx")
    recipe = load_recipe("fp8")["dit"]
    weights = written.weights["dit"]
    with pytest.raises(ExportError, match=r"recipe 'fp8', dit needs the ranges of activations"):
        convert_engine(written.engines["dit"], model, weights, recipe, None, tmp_path, ignore)
    empty = Calibration(tmp_path / "c", {}, {})
    with pytest.raises(ExportError, match=r"has no range of dit/transformer_blocks\.0"):
        convert_engine(written.engines["dit"], model, weights, recipe, empty, tmp_path, ignore)
