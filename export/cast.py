"""FP32 graph → the same in BF16, with FP32 where BF16 would be wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import onnx_ir as ir

from export.write import Weight

FLOAT, BF16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
# Borders that are FP32 in every engine: small, and read or written by code that is not.
FP32_INPUTS = ("timestep", "latents")
# The picture is brought to bytes behind this layer; BF16 has eight bits for its 256 levels.
LAST_OF_PICTURE = "decoder.conv_out.weight"
RESIZE_SCALES = ("Resize", 2)  # the one float input here that an operator wants in FP32


def to_bf16(model: ir.Model, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Casts the graph in place; returns the weights as it then needs them.

    FP32 stay: what leads to a sine or cosine (positions up to thousands, of which BF16 keeps eight
    bits), and what follows the decoder's last convolution. Norms compute in FP32 inside
    (`stash_type`).
    """
    graph = model.graph
    exact = _leading_to_angles(graph) | _behind_the_picture(graph)
    cast: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    # Which values are BF16 in the end; initializers are cast for each use.
    narrow = {x for x in graph.inputs if x.dtype == FLOAT and x.name not in FP32_INPUTS}
    for node in list(graph):
        wanted = FLOAT if node in exact else BF16
        for i, value in enumerate(node.inputs):
            if value is None or (value.dtype != FLOAT and value not in narrow):
                continue
            if (node.op_type, i) == RESIZE_SCALES:
                continue
            if value.is_initializer():
                if wanted == BF16:
                    known = value.name in weights
                    value = _narrow_weight(value) if known else _twin(graph, value, cast)
                    node.replace_input_with(i, value)
            elif (value in narrow) != (wanted == BF16):
                key = (value, wanted)
                if key not in cast:
                    cast[key] = insert_cast(graph, node, value, wanted)
                node.replace_input_with(i, cast[key])
        for value in node.outputs:
            if value.dtype == FLOAT and wanted == BF16:
                narrow.add(value)
        if node.op_type == "Cast" and wanted == BF16 and node.attributes["to"].as_int() == FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", BF16)
    for value in narrow:
        value.type = ir.TensorType(BF16)
    for name in [n for n, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    return {
        name: replace(weight, dtype=BF16, pieces=partial(_narrow, weight))
        if graph.initializers[name].dtype == BF16
        else weight
        for name, weight in weights.items()
        if name in graph.initializers
    }


def _leading_to_angles(graph: ir.Graph) -> set[ir.Node]:
    pending = [node for node in graph if node.op_type in ("Cos", "Sin")]
    found = set(pending)
    while pending:
        for value in pending.pop().inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer not in found:
                found.add(producer)
                pending.append(producer)
    return found


def _behind_the_picture(graph: ir.Graph) -> set[ir.Node]:
    found: set[ir.Node] = set()
    last = graph.initializers.get(LAST_OF_PICTURE)
    pending = [] if last is None else [node for node, _ in last.uses()]
    while pending:
        for output in pending.pop().outputs:
            for node, _ in output.uses():
                if node not in found:
                    found.add(node)
                    pending.append(node)
    return found


def insert_cast(graph: ir.Graph, before: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A cast of `value` in front of a node that needs it."""
    name = f"{value.name}/{dtype.name.lower()}"
    output = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
    node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype)], outputs=[output], name=name)
    graph.insert_before(before, node)
    return output


def _narrow_weight(value: ir.Value) -> ir.Value:
    """The weight itself: it is cast as it is written."""
    value.type, value.const_value = ir.TensorType(BF16), None
    return value


def _twin(
    graph: ir.Graph, value: ir.Value, known: dict[tuple[ir.Value, ir.DataType], ir.Value]
) -> ir.Value:
    """A constant in BF16; FP32 nodes may need the other one, too."""
    key = (value, BF16)
    if key not in known:
        assert value.const_value is not None
        array = value.const_value.numpy().astype(ml_dtypes.bfloat16)
        tensor = ir.tensor(array, name=f"{value.name}/bfloat16")
        known[key] = ir.Value(
            name=tensor.name, type=ir.TensorType(BF16), shape=tensor.shape, const_value=tensor
        )
        graph.register_initializer(known[key])
    return known[key]


def _narrow(weight: Weight) -> Iterator[np.ndarray]:
    for piece in weight.pieces():
        yield piece.astype(ml_dtypes.bfloat16)
