import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from runtimes import EngineError, TensorSpec, check_signature
from runtimes.onnx import Runtime


@pytest.fixture
def engine(tmp_path):
    """y = x + x for any batch; x is FP32 [B, 3]."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return path


def test_it_runs_batches_of_any_size(engine):
    runtime = Runtime(engine, {})
    assert runtime.inputs == [TensorSpec("x", "FP32")]
    for rows in (1, 5):
        x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        assert np.array_equal(runtime.run({"x": x})["y"], 2 * x)


def test_int8_weights_leave_the_inputs_alone(tmp_path):
    """ONNX Runtime would round them to INT8, too, as it merges the two operators."""
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (64, 32), np.int8)
    scales = rng.uniform(0.01, 0.02, 32).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["q", "scales"], ["w"], axis=1),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        "weights",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 32])],
        [numpy_helper.from_array(weights, "q"), numpy_helper.from_array(scales, "scales")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    x = rng.standard_normal((8, 64)).astype(np.float32)
    y = Runtime(tmp_path / "model.onnx", {}).run({"x": x})["y"]
    np.testing.assert_allclose(y, x @ (weights * scales), rtol=1e-4, atol=1e-4)


def test_an_unknown_provider_lists_those_that_are_there(engine):
    with pytest.raises(EngineError, match=r"'NoSuchExecutionProvider'.*CPUExecutionProvider"):
        Runtime(engine, {"providers": "NoSuchExecutionProvider, CPUExecutionProvider"})


def test_a_corrupt_file_is_one_sentence(engine):
    engine.write_bytes(b"not a graph")
    with pytest.raises(EngineError, match=r"^model.onnx cannot be loaded: [^\n]+$"):
        Runtime(engine, {})


def test_wrong_shapes_are_one_sentence_that_names_them(engine):
    with pytest.raises(EngineError, match=r"the engine failed on x \[1, 4\]: [^\n]+$"):
        Runtime(engine, {}).run({"x": np.zeros((1, 4), np.float32)})


def test_a_config_that_disagrees_with_the_engine_names_both_sides(engine):
    actual = Runtime(engine, {}).inputs
    check_signature("inputs", [TensorSpec("x", "FP32")], actual)
    with pytest.raises(EngineError, match=r"config\.pbtxt has x INT64, the engine has x FP32"):
        check_signature("inputs", [TensorSpec("x", "INT64")], actual)
    with pytest.raises(EngineError, match="inputs x, z differ"):
        check_signature("inputs", [TensorSpec("z", "FP32")], actual)
