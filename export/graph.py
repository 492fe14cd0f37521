"""From torch modules to one ONNX graph: trace a part once, repeat it, join the parts.

The weights of a part are inputs of its traced graph, not constants: tracing needs no memory for
them, the optimizer cannot fold them into anything, and a copy of the part takes other ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from onnxscript import optimizer
from torch import nn

from export.quiet import quiet
from export.stored import first_line

# The first with Attention, RotaryEmbedding and RMSNormalization, and the last that TensorRT's FP8
# and NVFP4 forms are known to work with (they begin at 20).
OPSET = 23
# What a free dimension measures in the example inputs: more than 1, since the exporter takes 0 and
# 1 for constants; `all_tokens` is the sum of the two before it, `tokens` exceeds a template's.
EXAMPLE_SIZES = {
    "batch": 2,
    "text_tokens": 3,
    "image_tokens": 5,
    "all_tokens": 8,
    "tokens": 99,
    "height": 6,
    "width": 7,
}


class ExportError(Exception):
    """An engine could not be exported or failed its check; the message names engine and tensor."""


@dataclass(frozen=True)
class Tensor:
    """Name, element type and dims (a size, or the name of a free dimension) of a graph's border."""

    name: str
    dtype: ir.DataType
    shape: tuple[int | str, ...]

    def value(self) -> ir.Value:
        return ir.Value(name=self.name, type=ir.TensorType(self.dtype), shape=ir.Shape(self.shape))


@dataclass(frozen=True)
class Part:
    """A module and the borders it is traced with."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class TracedPart:
    """A traced module. `graph`'s inputs are `inputs` and then `weights` (their names)."""

    graph: ir.Graph
    inputs: list[str]
    outputs: list[str]
    weights: list[str]


TORCH_TYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.BOOL: torch.bool,
}


def trace(part: Part) -> TracedPart:
    """Traces a module, whose parameters may be on the meta device.

    Raises ExportError if the trace fails or fixes a dimension that `part.inputs` names.
    """
    kind = type(part.module).__name__
    weights = [name for name, _ in part.module.named_parameters()]
    module = copy.deepcopy(part.module)
    hold_places(module)
    examples, dynamic = [], []
    for tensor in part.inputs:
        sizes = [EXAMPLE_SIZES[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
        examples.append(torch.zeros(sizes, dtype=TORCH_TYPES[tensor.dtype]))
        # DYNAMIC: may depend on another dimension, may not become a constant.
        names = {
            i: torch.export.Dim.DYNAMIC
            for i, dim in enumerate(tensor.shape)
            if isinstance(dim, str)
        }
        dynamic.append(names)
    try:
        with quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                module.eval(),
                tuple(examples),
                dynamic_shapes=tuple(dynamic),
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise ExportError(f"{kind} cannot be traced: {first_line(cause)}") from error
    model = program.model
    graph = model.graph
    placeholders = [graph.initializers.pop(name) for name in weights]
    for value in placeholders:
        value.const_value = None
    graph.inputs.extend(placeholders)
    with quiet():
        optimizer.optimize(model)
        CommonSubexpressionEliminationPass()(model)
    return TracedPart(graph, [tensor.name for tensor in part.inputs], list(part.outputs), weights)


def hold_places(module: nn.Module) -> None:
    """Gives every parameter an element that fills its whole shape without memory."""
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None:
                filler = torch.zeros(1).expand(parameter.shape)
                child._parameters[name] = nn.Parameter(filler, requires_grad=False)


@dataclass
class GraphBuilder:
    """Joins parts into one graph. `values` holds the newest value of each name."""

    name: str
    inputs: Sequence[Tensor]
    nodes: list[ir.Node] = field(default_factory=list)
    values: dict[str, ir.Value] = field(default_factory=dict)
    initializers: dict[str, ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.borders = [tensor.value() for tensor in self.inputs]
        self.values |= {
            tensor.name: value for tensor, value in zip(self.inputs, self.borders, strict=True)
        }

    def constant(self, name: str, tensor: Any) -> ir.Value:
        """The initializer of this name; made on first use."""
        if name not in self.initializers:
            self.initializers[name] = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
            )
        return self.initializers[name]

    def add(self, part: TracedPart, stage: str, weights: dict[str, ir.Value]) -> None:
        """Appends a copy of `part`, which reads `values` by its inputs' names and replaces those of
        its outputs' names. New names are `<stage>.<output>` and, inside, `<stage>/<value>`; the
        copies of a part share its constants."""
        known: dict[ir.Value, ir.Value] = {}
        graph = part.graph
        for value, name in zip(graph.inputs, part.inputs + part.weights, strict=True):
            known[value] = weights[name] if name in weights else self.values[name]
        for name, value in graph.initializers.items():
            known[value] = self.constant(
                f"{stage.split('.')[0]}.constant.{name}", value.const_value
            )
        outputs = {
            value: f"{stage}.{name}"
            for value, name in zip(graph.outputs, part.outputs, strict=True)
        }
        for node in graph:
            for value in node.outputs:
                known[value] = ir.Value(
                    name=outputs.get(value, f"{stage}/{value.name}"), type=value.type
                )
            self.nodes.append(
                ir.Node(
                    node.domain,
                    node.op_type,
                    [None if value is None else known[value] for value in node.inputs],
                    node.attributes.values(),
                    outputs=[known[value] for value in node.outputs],
                    name=f"{stage}/{node.name}",
                )
            )
        for value, name in zip(graph.outputs, part.outputs, strict=True):
            self.values[name] = known[value]

    def concat(self, name: str, values: Sequence[ir.Value], axis: int) -> None:
        node = ir.Node("", "Concat", values, [ir.AttrInt64("axis", axis)], name=name)
        self.nodes.append(node)
        self.values[name] = node.outputs[0]

    def model(self, outputs: Sequence[Tensor]) -> ir.Model:
        """The graph with `outputs` under exactly their names."""
        borders = []
        for tensor in outputs:
            value = self.values[tensor.name]
            value.name, value.type, value.shape = (
                tensor.name,
                ir.TensorType(tensor.dtype),
                ir.Shape(tensor.shape),
            )
            borders.append(value)
        graph = ir.Graph(
            self.borders,
            borders,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": OPSET},
            name=self.name,
        )
        return ir.Model(graph, ir_version=10, producer_name="qwen-image-triton")
