"""Graphs of one input x and one output y, both [rows, 64], as exporters write them."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 64
BLOCK = 16  # values that share a scale in NVFP4
_random = np.random.default_rng(0)


def save(path: Path, nodes, weights, dtype=TensorProto.FLOAT, **options) -> Path:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", dtype, ["rows", WIDTH])],
        [helper.make_tensor_value_info("y", dtype, ["rows", WIDTH])],
        weights,
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 23), ("trt", 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, **options)
    return path


def matmul_chain(path: Path, dtype=TensorProto.FLOAT, **options) -> Path:
    """y = x · w · w; FP32 or BF16."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node("MatMul", ["h", "w"], ["y"], name="second"),
    ]
    values = _random.standard_normal((WIDTH, WIDTH)).astype("<f4") / WIDTH**0.5
    if dtype == TensorProto.BFLOAT16:  # the upper half of an FP32
        values = values.view("<u2")[:, 1::2]
    weight = helper.make_tensor("w", dtype, [WIDTH, WIDTH], values.tobytes(), raw=True)
    return save(path, nodes, [weight], dtype, **options)


def unknown_nodes(path: Path, count: int) -> Path:
    """A chain of nodes that no library has."""
    values = ["x", *(f"h{i}" for i in range(1, count)), "y"]
    nodes = [
        helper.make_node("Mystery", [values[i]], [values[i + 1]], name=f"node_{i}", domain="trt")
        for i in range(count)
    ]
    return save(path, nodes, [])


def fp8_matmul(path: Path) -> Path:
    """FP16 in and out; E4M3 activations and weights, a scale for each tensor."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["x8"]),
        helper.make_node("DequantizeLinear", ["x8", "scale"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w8", "scale"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["y"], name="matmul"),
    ]
    weights = [
        _raw("w8", TensorProto.FLOAT8E4M3FN, [WIDTH, WIDTH], WIDTH * WIDTH),
        numpy_helper.from_array(np.array(0.1, np.float16), "scale"),
        helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True),
    ]
    return save(path, nodes, weights, TensorProto.FLOAT16)


def nvfp4_matmul(path: Path) -> Path:
    """BF16 in and out; E2M1 activations and weights in blocks of 16 with E4M3 scales."""

    def dequantize(values, scales, result):
        return helper.make_node(
            "DequantizeLinear", [values, scales], [result], axis=-1, block_size=BLOCK
        )

    bf16 = {"to": TensorProto.BFLOAT16}
    nodes = [
        helper.make_node(
            "TRT_FP4DynamicQuantize",
            ["x", "x_scale"],
            ["x4", "x_scales8"],
            domain="trt",
            axis=-1,
            block_size=BLOCK,
            scale_type=TensorProto.FLOAT8E4M3FN,
        ),
        helper.make_node("DequantizeLinear", ["x_scales8", "x_scale"], ["x_scales"]),
        dequantize("x4", "x_scales", "x32"),
        helper.make_node("Cast", ["x32"], ["xd"], **bf16),
        helper.make_node("DequantizeLinear", ["w_scales8", "w_scale"], ["w_scales"]),
        dequantize("w4", "w_scales", "w32"),
        helper.make_node("Cast", ["w32"], ["wd"], **bf16),
        helper.make_node("Transpose", ["wd"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["xd", "wt"], ["y"], name="matmul"),
    ]
    weights = [
        _raw("w4", TensorProto.FLOAT4E2M1, [WIDTH, WIDTH], WIDTH * WIDTH // 2),
        _raw("w_scales8", TensorProto.FLOAT8E4M3FN, [WIDTH, WIDTH // BLOCK], WIDTH * 4),
        numpy_helper.from_array(np.array(0.02, np.float32), "w_scale"),
        numpy_helper.from_array(np.array(0.01, np.float32), "x_scale"),
    ]
    return save(path, nodes, weights, TensorProto.BFLOAT16)


def _raw(name: str, dtype: int, shape: list[int], size: int) -> onnx.TensorProto:
    # Below 60, no byte is a NaN in any of the formats.
    return helper.make_tensor(
        name, dtype, shape, _random.integers(1, 60, size, np.uint8).tobytes(), raw=True
    )
