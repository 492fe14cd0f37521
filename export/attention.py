"""Attention in FP8: queries, keys, values and attention weights as E4M3.

The operator Attention is written out, since it has no place for the quantized weights; TensorRT
fuses the parts again. Both products take what DequantizeLinear gives in FP32, softmax computes in
the graph's own type: the form that NVIDIA's ModelOpt exports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from export.quantize import FLOAT, FP8, LARGEST, SMALLEST

PARTS = ("query", "key", "value")
_ORDER = {"query": (0, 2, 1, 3), "key": (0, 2, 3, 1), "value": (0, 2, 1, 3)}  # of B, S, H, D


def quantize_attention(
    graph: ir.Graph,
    name_of: Callable[[ir.Node], str | None],
    channels: Callable[[str], np.ndarray],
) -> None:
    """Replaces the graph's Attention operators in place.

    Args:
        name_of: the attention module's name, such as `transformer_blocks.0.attn`; None for one that
            stays.
        channels: the largest absolute values of `<module>.query`, `.key` and `.value`, FP32
            [heads · head size].
    """
    for node in [node for node in graph if node.op_type == "Attention"]:
        name = name_of(node)
        if name is None:
            continue
        ranges = {part: channels(f"{name}.{part}") for part in PARTS}
        size = len(ranges["query"]) // node.attributes["q_num_heads"].as_int()
        attention = _Attention(graph, node, name, size)
        attention.replace({part: float(range.max()) for part, range in ranges.items()})


class _Attention:
    def __init__(self, graph: ir.Graph, node: ir.Node, name: str, size: int) -> None:
        self.graph, self.node, self.name, self.size = graph, node, name, size
        query = node.inputs[0]
        assert query is not None and query.dtype is not None
        self.dtype = query.dtype

    def replace(self, amax: Mapping[str, float]) -> None:
        query, key, value = (
            self._heads(part, x, max(amax[part], SMALLEST))
            for part, x in zip(PARTS, self.node.inputs, strict=False)
        )
        scores = self._cast("scores", self._op("scores", "MatMul", [query, key], FLOAT))
        bias = self.node.inputs[3]
        biased = self._op("biased", "Add", [scores, bias], self.dtype)
        weights = self._op("weights", "Softmax", [biased], self.dtype, ir.AttrInt64("axis", -1))
        exact = self._e4m3("weights", weights, 1.0)
        mixed = self._cast("mixed", self._op("mixed", "MatMul", [exact, value], FLOAT))
        order = ir.AttrInt64s("perm", _ORDER["value"])
        rows = self._op("rows", "Transpose", [mixed], self.dtype, order)
        joined = self._op("out", "Reshape", [rows, self._constant("flat", [0, 0, -1])], self.dtype)
        self.node.outputs[0].replace_all_uses_with(joined)
        self.graph.remove(self.node, safe=True)

    def _heads(self, part: str, x: ir.Value | None, amax: float) -> ir.Value:
        """[B, S, H·D] → [B, H, S, D], of keys [B, H, D, S], FP32 as it comes from E4M3."""
        assert x is not None
        if part == "query":
            factor = self.size**-0.5
            scale = self._constant("scale", factor, self.dtype)
            x, amax = self._op("scaled", "Mul", [x, scale], self.dtype), amax * factor
        shape = self._constant("heads", [0, 0, -1, self.size])
        split = self._op(f"{part}.heads", "Reshape", [x, shape], self.dtype)
        order = ir.AttrInt64s("perm", _ORDER[part])
        turned = self._op(f"{part}.turned", "Transpose", [split], self.dtype, order)
        return self._e4m3(part, turned, amax)

    def _e4m3(self, part: str, x: ir.Value, amax: float) -> ir.Value:
        scale = self._constant(f"{part}.scale", amax / LARGEST["fp8"], FLOAT)
        zero = self._constant("zero", 0.0, FP8)
        q = self._op(f"{part}.fp8", "QuantizeLinear", [x, scale, zero], FP8)
        return self._op(f"{part}.exact", "DequantizeLinear", [q, scale, zero], FLOAT)

    def _cast(self, part: str, x: ir.Value) -> ir.Value:
        if self.dtype == FLOAT:
            return x
        return self._op(f"{part}.cast", "Cast", [x], self.dtype, ir.AttrInt64("to", self.dtype))

    def _op(
        self,
        part: str,
        op: str,
        inputs: list[ir.Value | None],
        dtype: ir.DataType,
        *attributes: ir.Attr,
    ) -> ir.Value:
        name = f"{self.name}/{part}"
        output = ir.Value(name=name, type=ir.TensorType(dtype))
        made = ir.Node("", op, inputs, list(attributes), outputs=[output], name=name)
        self.graph.insert_before(self.node, made)
        return output

    def _constant(
        self, part: str, value: float | list[int], dtype: ir.DataType = ir.DataType.INT64
    ) -> ir.Value:
        name = f"{self.name}/{part}"
        if name not in self.graph.initializers:
            tensor = ir.tensor(np.array(value).astype(dtype.numpy()), name=name)
            self.graph.register_initializer(
                ir.Value(
                    name=name, type=ir.TensorType(dtype), shape=tensor.shape, const_value=tensor
                )
            )
        return self.graph.initializers[name]
