"""An NVFP4 graph as one that any ONNX runtime computes in FP32, for checking its numerics.

TensorRT's operator is replaced by its arithmetic in standard operators, and the stored weights by
the values that they stand for. The graph must have been made with `compute: fp32`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from export.quantize import BLOCK, FP4, LARGEST, TRT
from export.write import DATA, MODEL

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def simulate(source: Path, target: Path) -> None:
    """Reads SOURCE/model.onnx and .data, writes TARGET/model.onnx and .data. FP8 stays as it is."""
    model = ir.load(source / MODEL)
    graph = model.graph
    for node in list(graph):
        if node.domain == TRT:
            _replace_dynamic(graph, node)
    for node in list(graph):
        if node.op_type == "DequantizeLinear" and node.inputs[0].dtype == FP4:
            _replace_weight(graph, node)
    for name in [n for n, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    graph.opset_imports.pop(TRT, None)
    ir.save(model, target / MODEL, external_data=DATA, size_threshold_bytes=1024)


def _replace_weight(graph: ir.Graph, node: ir.Node) -> None:
    """DequantizeLinear of stored elements and DequantizeLinear of their scales → a constant."""
    elements, wide = node.inputs
    assert elements is not None and wide is not None and wide.producer() is not None
    scales, overall = wide.producer().inputs
    arrays = [value.const_value.numpy().astype(np.float32) for value in (elements, scales, overall)]
    values = arrays[0] * np.repeat(arrays[1] * arrays[2], BLOCK, -1)
    tensor = ir.tensor(values.astype(np.float32), name=f"{elements.name}.value")
    constant = ir.Value(
        name=tensor.name, type=ir.TensorType(FLOAT), shape=tensor.shape, const_value=tensor
    )
    graph.register_initializer(constant)
    _take_over(graph, node, constant)
    _remove(graph, wide.producer())


def _replace_dynamic(graph: ir.Graph, node: ir.Node) -> None:
    """The operator and the two DequantizeLinear behind it → their values in FP32."""
    x, overall = node.inputs
    assert x is not None and overall is not None
    scales_user = node.outputs[1].uses()[0].node
    last = node.outputs[0].uses()[0].node
    fp8 = node.outputs[1].dtype
    new = _Expression(graph, node)
    blocks = new("Reshape", x, new.ints(-1, BLOCK))
    amax = new("ReduceMax", new("Abs", blocks), new.ints(-1))
    scale = new("Div", new("Div", amax, new.float(LARGEST["fp4"])), overall)
    scale = new("Min", scale, new.float(LARGEST["fp8"]))
    one, zero = new.float(1.0), new.constant(np.zeros((), fp8.numpy()), fp8)
    rounded = new("QuantizeLinear", scale, one, zero, dtype=fp8)
    scale = new("Mul", new("DequantizeLinear", rounded, one, zero), overall)
    # A block whose scale is 0 is 0: divided by 1 and multiplied by 0.
    divisor = new(
        "Where", new("Greater", scale, new.float(0.0), dtype=ir.DataType.BOOL), scale, one
    )
    scaled = new("Div", blocks, divisor)
    magnitude = new("Min", new("Abs", scaled), new.float(LARGEST["fp4"]))
    # E2M1's steps are 0.5 below 2, 1 below 4, 2 beyond; Round takes ties to even, as it does.
    half, two, four = new.float(0.5), new.float(2.0), new.float(4.0)
    fine = new("Mul", new("Round", new("Mul", magnitude, two)), half)
    coarse = new("Mul", new("Round", new("Mul", magnitude, half)), two)
    below_four = new("Less", magnitude, four, dtype=ir.DataType.BOOL)
    below_two = new("Less", magnitude, two, dtype=ir.DataType.BOOL)
    rough = new("Where", below_four, new("Round", magnitude), coarse)
    element = new("Mul", new("Where", below_two, fine, rough), new("Sign", scaled))
    value = new("Reshape", new("Mul", element, scale), new("Shape", x, dtype=INT64))
    _take_over(graph, last, value)
    _remove(graph, scales_user)
    _remove(graph, node)


class _Expression:
    """Adds nodes in front of another one."""

    def __init__(self, graph: ir.Graph, before: ir.Node) -> None:
        self.graph, self.before, self.count = graph, before, 0

    def __call__(self, op: str, *inputs: ir.Value, dtype: ir.DataType = FLOAT) -> ir.Value:
        self.count += 1
        name = f"{self.before.name}/{op}{self.count}"
        output = ir.Value(name=name, type=ir.TensorType(dtype))
        self.graph.insert_before(self.before, ir.Node("", op, inputs, outputs=[output], name=name))
        return output

    def constant(self, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        self.count += 1
        tensor = ir.tensor(array, name=f"{self.before.name}/constant{self.count}")
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(dtype), shape=tensor.shape, const_value=tensor
        )
        self.graph.register_initializer(value)
        return value

    def float(self, value: float) -> ir.Value:
        return self.constant(np.array(value, np.float32), FLOAT)

    def ints(self, *values: int) -> ir.Value:
        return self.constant(np.array(values, np.int64), INT64)


def _take_over(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Lets `value` stand for a node's output."""
    for user, index in list(node.outputs[0].uses()):
        user.replace_input_with(index, value)
    _remove(graph, node)


def _remove(graph: ir.Graph, node: ir.Node | None) -> None:
    if node is not None and not any(output.uses() for output in node.outputs):
        graph.remove(node, safe=True)
