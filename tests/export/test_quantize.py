"""Recipes, casts and number formats: their arithmetic, their graphs, and what TensorRT says."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
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
from export.cast import to_bf16
from export.convert import convert_engine, write_checked
from export.quantize import (
    Activations,
    layers,
    nvfp4,
    quantize,
    round_to_e2m1,
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


EVEN = np.ones(96, np.float32)  # mean squares of inputs that matter alike


def value_of(quantized: tuple[np.ndarray, np.ndarray, np.float32]) -> np.ndarray:
    elements, scales, overall = quantized
    return elements.astype(np.float32) * np.repeat(scales.astype(np.float32) * overall, 16, -1)


def test_nvfp4_keeps_what_it_can_hold() -> None:
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    block = np.concatenate([grid, -grid])
    # Block scales 256 and 1 over an overall scale of 1/256: powers of two, which E4M3 holds.
    array = np.stack([np.concatenate([block, block / 256])])
    array[0, 0] = 448 * 4 / 256
    elements, scales, overall = nvfp4(array, EVEN[:32])
    assert overall == 1 / 256
    np.testing.assert_array_equal(scales.astype(np.float32), [[256, 1]])
    np.testing.assert_array_equal(value_of((elements, scales, overall))[0, 1:], array[0, 1:])


def test_nvfp4_is_as_near_as_its_steps() -> None:
    array = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    elements, scales, overall = nvfp4(array, EVEN)
    wide = np.repeat(scales.astype(np.float32), 16, -1) * overall
    error = np.abs(value_of((elements, scales, overall)) - array)
    # Half the widest step (2), and where a block's peak was cut, that of the highest one (7.5).
    assert (error <= wide * 1.6).all()
    assert 0.07 < np.sqrt((error**2).mean() / (array**2).mean()) < 0.09


def test_nvfp4_takes_the_best_of_its_scales() -> None:
    """Against every E4M3 scale there is, by ml_dtypes' own rounding."""
    rng = np.random.default_rng(0)
    array = rng.standard_normal((16, 96)).astype(np.float32)
    squares = rng.lognormal(0, 2, 96).astype(np.float32)
    found = nvfp4(array, squares)
    blocks, weights = array.reshape(16, 6, 16), squares.reshape(6, 16)
    codes = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wide = codes[:, None, None, None] * found[2]
    rounded = (blocks / wide).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    errors = ((rounded * wide - blocks) ** 2 * weights).sum(-1)
    error = ((value_of(found).reshape(blocks.shape) - blocks) ** 2 * weights).sum(-1)
    assert (error >= errors.min(0) * 0.9999).all()
    assert error.sum() < 1.1 * errors.min(0).sum()
    # What it would be if each block's peak became 6, as in activations.
    plain = np.abs(blocks).max(-1) / 6 / found[2]
    nearest = np.abs(codes[:, None, None] - plain).argmin(0)
    assert error.sum() < 0.6 * np.take_along_axis(errors, nearest[None], 0).sum()


def test_nvfp4_of_nought() -> None:
    array = np.zeros((2, 32), np.float32)
    assert not value_of(nvfp4(array, EVEN[:32])).any()
    array[0, 0] = 1e-3  # far below any scale of a block beside it
    array[0, 16:] = 1e4
    assert np.isfinite(value_of(nvfp4(array, EVEN[:32]))).all()


def test_rounding_to_e2m1_is_that_of_ml_dtypes() -> None:
    ties = np.arange(0, 8, 0.25, dtype=np.float32)
    near = np.concatenate([ties, np.nextafter(ties, np.float32(9)), np.nextafter(ties, 0)])
    some = np.random.default_rng(0).lognormal(0, 2, 10_000).astype(np.float32)
    for values in (near, some):
        expected = values.clip(0, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        rounded = values.copy()
        round_to_e2m1(rounded, np.empty_like(rounded))
        np.testing.assert_array_equal(rounded, expected)


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
    whole = nvfp4(array, EVEN[:64])
    monkeypatch.setattr(rows, "STRETCH", 3 * 64)
    for one, other in zip(nvfp4(array, EVEN[:64]), whole, strict=True):
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


@pytest.mark.parametrize("kind", ["fp8", "int8", "int8_weights", "nvfp4"])
def test_a_layer_computes_what_its_format_says(kind: str, tmp_path: Path) -> None:
    """ONNX Runtime on the graph against numpy with ml_dtypes' own rounding."""
    rng = np.random.default_rng(0)
    array = rng.standard_normal((24, 64)).astype(np.float32)
    x = rng.standard_normal((40, 64)).astype(np.float32) * 3
    x[0, :16], x[1, 3], x[2, :4] = 0, 50.0, [0.25, 0.75, 1.25, 2.5]  # also beyond the range
    amax = 8.0
    model, weights = small_graph(array)
    squares = (x**2).mean(0)
    activations = Activations(
        lambda name: amax, lambda name: np.abs(x).max(0), lambda name: squares
    )
    stored = quantize(model, weights, {"layer": kind}, activations)
    source = tmp_path / "source"
    source.mkdir()
    save("small", model, stored, source, ignore)
    if kind == "nvfp4":
        target = tmp_path / "target"
        target.mkdir()
        simulate(source, target)
        overall = np.float32(2 * amax / (6 * 448))  # with room for twice as much
        blocks = x.reshape(40, 4, 16)
        scales = (np.abs(blocks).max(-1) / np.float32(6) / overall).clip(0, 448)
        wide = scales.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)[..., None] * overall
        quotients = np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide > 0).clip(-6, 6)
        x_q = (quotients.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * wide).reshape(40, 64)
        w_q = value_of(nvfp4(array, squares))
    else:
        target = source
        onnx.checker.check_model(source / "model.onnx", full_check=True)
        largest = 448.0 if kind == "fp8" else 127.0
        scale = np.float32((2 if kind == "fp8" else 1) * amax / largest)
        w_scale = np.abs(array).max(1, keepdims=True) / np.float32(largest)
        if kind == "fp8":
            x_q = (x / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            w_q = (array / w_scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            x_q, w_q = np.rint(x / scale).clip(-128, 127), np.rint(array / w_scale)
        x_q, w_q = x if kind == "int8_weights" else x_q * scale, w_q * w_scale
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # each operator by itself
    session = ort.InferenceSession(
        str(target / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, x_q @ w_q.T, rtol=1e-4, atol=1e-4)
    assert not np.allclose(y, x @ array.T, atol=1e-3)  # it is not the exact product


@pytest.mark.parametrize(
    ("kind", "lowest", "highest"),
    [("int8", 0.9998, 0.99995), ("fp8", 0.9992, 0.9994), ("nvfp4", 0.991, 0.993)],
)
@pytest.mark.parametrize("width", [160, 3072])  # of checkpoints/tiny, of the published model
def test_a_product_is_no_nearer_for_being_wide(
    width: int, kind: str, lowest: float, highest: float, tmp_path: Path
) -> None:
    """What each format can hold of normal numbers where calibration saw what is measured."""
    rng = np.random.default_rng(0)
    array, x = (rng.standard_normal((n, width)).astype(np.float32) for n in (160, 256))
    model, weights = small_graph(array)
    channels, squares = np.abs(x).max(0), (x**2).mean(0)
    activations = Activations(
        lambda name: channels.max(), lambda name: channels, lambda name: squares
    )
    save("small", model, quantize(model, weights, {"layer": kind}, activations), tmp_path, ignore)
    path = tmp_path / "model.onnx"
    if kind == "nvfp4":
        path = tmp_path / "simulated" / "model.onnx"
        path.parent.mkdir()
        simulate(tmp_path, path.parent)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert lowest < cosine(session.run(None, {"x": x})[0], x @ array.T) < highest


def test_activations_may_exceed_what_calibration_saw(tmp_path: Path) -> None:
    """Twice as large costs FP8 nothing: its scale leaves room."""
    array = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    model, weights = small_graph(array)
    activations = Activations(lambda name: 1.0, lambda name: np.ones(16), lambda name: np.ones(16))
    save("small", model, quantize(model, weights, {"layer": "fp8"}, activations), tmp_path, ignore)
    path = str(tmp_path / "model.onnx")
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    once, twice = (session.run(None, {"x": np.full((1, 16), v, np.float32)})[0] for v in (1, 2))
    np.testing.assert_array_equal(twice, 2 * once)


def test_nvfp4_takes_multiples_of_16(tmp_path: Path) -> None:
    model, weights = small_graph(np.ones((8, 24), np.float32))
    activations = Activations(lambda name: 1.0, lambda name: np.ones(24), lambda name: np.ones(24))
    with pytest.raises(ExportError, match="layer has 24 input channels; NVFP4 takes multiples of"):
        quantize(model, weights, {"layer": "nvfp4"}, activations)


@pytest.mark.parametrize("kind", ["fp8", "int8", "nvfp4", "bf16"])
def test_few_weights_are_in_memory(kind: str, tmp_path: Path) -> None:
    """While 256 layers of 1 MB are converted and written."""
    width, count, float32 = 512, 256, ir.TensorType(ir.DataType.FLOAT)
    x = values = ir.Value(name="x", type=float32, shape=ir.Shape(["n", width]))
    weights, nodes = {}, []
    for i in range(count):

        def pieces(seed: int = i) -> Iterator[np.ndarray]:
            yield np.random.default_rng(seed).standard_normal((width, width), np.float32)

        weight = Weight(f"{i}.weight", (width, width), ir.DataType.FLOAT, pieces)
        weights[weight.name] = weight
        output = ir.Value(name=f"y{i}", type=float32, shape=x.shape)
        nodes.append(ir.Node("", "MatMul", [values, weight.value()], outputs=[output]))
        values = output
    stored = [node.inputs[1] for node in nodes]
    graph = ir.Graph(
        [x], [values], nodes=nodes, initializers=stored, opset_imports={"": 23}, name="chain"
    )
    model = ir.Model(graph, ir_version=10)
    ones = np.ones(width, np.float32)
    activations = Activations(lambda name: 1.0, lambda name: ones, lambda name: ones)
    tracemalloc.start()
    try:
        if kind == "bf16":
            converted = to_bf16(model, weights)
        else:
            converted = quantize(model, weights, {str(i): kind for i in range(count)}, activations)
        write_checked("chain", model, converted, tmp_path, ignore)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1 < peak / (4 * width * width) < 24


# ---------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_shipped_recipes_fit_every_layer(name: str, written: Written) -> None:
    for engine, recipe in load_recipe(name).items():
        model = ir.load(written.folder / engine / "model.onnx")
        found = layers(model, written.weights[engine])
        formats = recipe.assign(found, written.engines[engine].blocks)
        assert set(formats) <= set(found)
        assert bool(formats) == bool(recipe.formats)


def test_layers_have_the_names_of_the_checkpoint(written: Written) -> None:
    model = ir.load(written.folder / "dit" / "model.onnx")
    found = layers(model, written.weights["dit"])
    blocks = written.engines["dit"].blocks
    assert len(found) == 12 * blocks + 3
    assert "transformer_blocks.1.img_mlp.net.0.proj" in found and "proj_out" in found


def test_edge_blocks_have_their_own_format() -> None:
    entry: dict[str, Any] = {"edge_blocks": 2, "formats": {"fp8": ["b.*"], "keep": ["in"]}}
    recipe = parse_recipe("r", {"dit": entry})["dit"]
    names = ["in", *(f"b.{i}.x" for i in range(60))]
    inner = {f"b.{i}.x" for i in range(2, 58)}
    assert recipe.assign(names, 60) == dict.fromkeys(inner, "fp8")
    entry["edge_format"] = "int8_weights"
    edges = {f"b.{i}.x": "int8_weights" for i in (0, 1, 58, 59)}
    assert parse_recipe("r", {"dit": entry})["dit"].assign(names, 60) == edges | dict.fromkeys(
        inner, "fp8"
    )
    # At most a third of all at either end: one of four, none of two.
    assert set(recipe.assign(names[:5], 4)) == {"b.1.x", "b.2.x"}
    assert len(recipe.assign(names[:3], 2)) == 2


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"attention": "int8"}, "attention is 'int8'; it can be fp8, for dit alone"),
        ({"formats": {"fp8": ["a.*"]}}, "the layer b.0 matches no pattern, not just one"),
        (
            {"formats": {"fp8": ["*"], "keep": ["b.*"]}},
            r"the layer b\.0 matches '\*' \(fp8\) and 'b\.\*' \(keep\)",
        ),
        ({"formats": {"fp8": ["*.0"], "keep": ["c"]}}, r"the pattern 'c' \(keep\) matches no"),
        ({"formats": {"fp9": ["*"]}}, "'fp9' is unknown: did you mean fp8"),
        ({"formats": {"fp8": "*"}}, "formats must hold lists of patterns"),
        ({"formats": {"fp8": [3]}}, "formats must hold lists of patterns"),
        ({"formats": {"fp8": [None]}}, "formats must hold lists of patterns"),
        ({"format": {}}, "'format' is unknown: did you mean formats"),
        ({"compute": "fp16"}, "compute is 'fp16'; it must be one of fp32, bf16"),
        ({"smooth": 2}, "smooth is 2; it must be between 0 and 1"),
        ({"smooth": 0.5, "formats": {"fp8": ["*"]}}, "smooth is for the format int8, which has no"),
        ({"edge_blocks": -1}, "edge_blocks is -1; it must be a whole number from 0"),
        ({"edge_blocks": True}, "edge_blocks is True; it must be a whole number from 0"),
        ({"edge_format": "fp9"}, "edge_format is 'fp9'; it must be one of fp8, nvfp4, int8, int8_"),
        ("fp8", "must hold names and values"),
    ],
)
def test_wrong_recipes(entry: Any, sentence: str) -> None:
    with pytest.raises(ExportError, match=rf"^recipe 'r', dit.*{sentence}"):
        parse_recipe("r", {"dit": entry})["dit"].assign(["a.0", "b.0"], 1)


def test_an_engine_that_there_is_not() -> None:
    with pytest.raises(ExportError, match=r"^recipe 'r': 'dti' is unknown: did you mean dit"):
        parse_recipe("r", {"dit": {}, "dti": {}})


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
    assert made["layers"][recipe] >= 5 * written.engines[name].blocks
    assert sum(made["layers"].values()) - made["layers"].get("fp32", 0) >= (
        7 * written.engines[name].blocks
    )
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
    with pytest.raises(ExportError, match=r"has no range of dit/transformer_blocks\.2"):
        convert_engine(written.engines["dit"], model, weights, recipe, empty, tmp_path, ignore)


@pytest.mark.parametrize("name", ["fp8", "fp8-rows"])
def test_fp8_attention_is_the_only_difference(name: str) -> None:
    plain, with_attention = (load_recipe(each)["dit"] for each in (name, f"{name}-attention"))
    assert with_attention.attention == "fp8" and plain.attention is None
    assert replace(with_attention, attention=None, name=plain.name, where=plain.where) == plain


def test_attention_at_the_ends_stays(written: Written, tmp_path: Path) -> None:
    written.convert("dit", "fp8-attention", "fp32", tmp_path, edge_blocks=1)
    graph = ir.load(tmp_path / "model.onnx").graph
    blocks = [str(node.name).split("/")[0] for node in graph if node.op_type == "Attention"]
    assert blocks == ["block.0", f"block.{written.engines['dit'].blocks - 1}"]


def test_fp8_attention_computes_nearly_the_same(written: Written, tmp_path: Path) -> None:
    """With its layers as in the recipe fp8: a little less exact than these alone."""
    (tmp_path / "layers").mkdir()
    written.convert("dit", "fp8", "fp32", tmp_path / "layers")
    made = written.convert("dit", "fp8-attention", "fp32", tmp_path)
    assert made["attention"] == "fp8"
    exact, alone = written.run("dit"), written.run("dit", tmp_path / "layers")
    both = written.run("dit", tmp_path)
    assert 0.97 < cosine(both, exact) < 0.999999
    assert 1e-4 < 1 - cosine(both, alone) < 1e-2
