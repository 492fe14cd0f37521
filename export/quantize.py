"""Quantizes layers of a graph, in the forms that TensorRT takes.

FP8 and INT8: the activation goes through QuantizeLinear and DequantizeLinear with one calibrated
scale, the weight is stored quantized with a scale for each output channel. `int8_weights`: only the
weight, as INT8 has it. NVFP4: both in blocks of 16 along the input channels, E2M1 elements with
E4M3 scales and one FP32 scale over these; the activation's block scales are found at run time by
TensorRT's own operator. Scales are FP32; what comes out of them is cast to the type that the layer
computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from export.cast import insert_cast
from export.graph import ExportError
from export.rows import by_rows
from export.write import Weight

FLOAT = ir.DataType.FLOAT
FP8, INT8, FP4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.INT8, ir.DataType.FLOAT4E2M1
LARGEST = {"fp8": 448.0, "int8": 127.0, "fp4": 6.0}  # of E4M3FN, symmetric INT8, E2M1
BLOCK = 16  # elements of NVFP4 that share a scale
E4M3_SCALES = (2.0**-9, 448.0)  # a block's scale: not nought, so that it can be divided by
# What the largest weight of a block may become, in E2M1's units: steps are finer below 4, and an
# outlier may be cut for the others' sake. More candidates changed nothing measurable.
BLOCK_PEAKS = (6.0, 5.5, 5.0, 4.5, 4.0, 6.5, 7.0, 7.5)
TRT = "trt"  # the domain of TensorRT's own operators
SMALLEST = 1e-8  # a scale is never nought
# Activations may be so many times as large as in calibration. Where rounding is relative it costs
# nothing; INT8 would lose a bit.
HEADROOM = {"fp8": 2.0, "nvfp4": 2.0, "int8": 1.0}


@dataclass(frozen=True)
class Layer:
    """A matrix multiplication or convolution with a weight; `transpose` lies between the two."""

    name: str
    node: ir.Node
    weight: ir.Value
    transpose: ir.Node | None

    @property
    def first_node(self) -> ir.Node:
        """The one that reads the weight."""
        return self.transpose or self.node

    @property
    def activation(self) -> ir.Value:
        value = self.node.inputs[0]
        assert value is not None
        return value


@dataclass(frozen=True)
class Activations:
    """What calibration found: by layer the largest absolute input, that of each channel, and each
    channel's mean square."""

    amax: Callable[[str], float]
    channels: Callable[[str], np.ndarray]
    squares: Callable[[str], np.ndarray]


def layers(model: ir.Model, weights: Mapping[str, Weight]) -> dict[str, Layer]:
    """The layers of a graph by their names, in order."""
    found: dict[str, Layer] = {}
    for node in model.graph:
        if node.op_type not in ("MatMul", "Gemm", "Conv"):
            continue
        value = node.inputs[1]
        producer = value.producer() if value is not None else None
        transpose = producer if producer is not None and producer.op_type == "Transpose" else None
        weight = transpose.inputs[0] if transpose is not None else value
        if weight is not None and weight.is_initializer() and weight.name in weights:
            name = str(weight.name).removesuffix(".weight")
            found[name] = Layer(name, node, weight, transpose)
    return found


def quantize(
    model: ir.Model,
    weights: Mapping[str, Weight],
    formats: Mapping[str, str],
    activations: Activations,
    smooth: float | None = None,
) -> dict[str, Weight]:
    """Quantizes the layers named in `formats` in place; returns the weights as they then are.

    weights: in FP32, whatever the graph computes in. smooth: SmoothQuant's alpha, for INT8.
    Raises ExportError, which names the layer.
    """
    found = layers(model, weights)
    quantizer = _Quantizer(model.graph, dict(weights), activations)
    for group in _sharing_an_input(found, formats):
        kind = formats[group[0].name]
        if kind == "nvfp4":
            quantizer.nvfp4(group)
        elif kind == "int8_weights":
            quantizer.weights_only(group)
        else:
            quantizer.scaled(group, kind, smooth)
    if any(name == "nvfp4" for name in formats.values()):
        model.graph.opset_imports[TRT] = 1
    return quantizer.weights


def _sharing_an_input(
    found: Mapping[str, Layer], formats: Mapping[str, str]
) -> Iterator[list[Layer]]:
    """Layers of one format that read the same value: it is quantized once."""
    groups: dict[tuple[ir.Value, str], list[Layer]] = {}
    for name, kind in formats.items():
        groups.setdefault((found[name].activation, kind), []).append(found[name])
    yield from groups.values()


class _Quantizer:
    def __init__(
        self, graph: ir.Graph, weights: dict[str, Weight], activations: Activations
    ) -> None:
        self.graph = graph
        self.weights = weights
        self.activations = activations

    def scaled(self, group: list[Layer], kind: str, smooth: float | None) -> None:
        """FP8 or INT8."""
        dtype = FP8 if kind == "fp8" else INT8
        first, x = group[0], group[0].activation
        amax = max(self._amax(layer) for layer in group)
        factors = None
        if kind == "int8" and smooth is not None:
            channels = np.max([self._channels(layer) for layer in group], 0)
            strengths = [np.abs(self._read(layer)).max(0) for layer in group]
            factors = smoothing(channels, np.max(strengths, 0), smooth)
            amax = float((channels / factors).max())
            x = self._node(
                first.node,
                "Mul",
                [x, self._constant(f"{first.name}.smoothing", (1 / factors), x.dtype)],
                f"{first.name}/smoothed",
                x.dtype,
            )
        amax *= HEADROOM[kind]
        scale = self._constant(
            f"{first.name}.input_scale", np.array(max(amax / LARGEST[kind], SMALLEST)), FLOAT
        )
        zero = self._constant(f"zero.{kind}", np.zeros((), dtype.numpy()), dtype)
        name = f"{first.name}/input"
        q = self._node(first.node, "QuantizeLinear", [x, scale, zero], f"{name}.{kind}", dtype)
        exact = self._node(first.node, "DequantizeLinear", [q, scale, zero], name, FLOAT)
        x = self._as(first.node, exact, x.dtype)
        for layer in group:
            self._connect(layer, x, self._by_channel(layer, kind, factors))

    def weights_only(self, group: list[Layer]) -> None:
        for layer in group:
            self._connect(layer, layer.activation, self._by_channel(layer, "int8", None))

    def _by_channel(self, layer: Layer, kind: str, factors: np.ndarray | None) -> ir.Value:
        """The weight stored with a scale for each output channel → FP32."""
        weight = self.weights.pop(str(layer.weight.name))
        if factors is not None:
            weight = replace(weight, pieces=partial(_smoothed, weight, factors))
        part = partial(_part, weight, partial(scaled, kind=kind))
        dtype = FP8 if kind == "fp8" else INT8
        stored = self._store(layer.weight.name, weight.shape, dtype, partial(part, 0))
        scales = self._store(
            f"{layer.name}.weight_scale", weight.shape[:1], FLOAT, partial(part, 1)
        )
        return self._node(
            layer.first_node,
            "DequantizeLinear",
            [stored, scales],
            f"{layer.name}/weight",
            FLOAT,
            axis=0,
        )

    def nvfp4(self, group: list[Layer]) -> None:
        first, x = group[0], group[0].activation
        name = f"{first.name}/input"
        amax = HEADROOM["nvfp4"] * max(self._amax(layer) for layer in group)
        overall = max(amax / (LARGEST["fp4"] * LARGEST["fp8"]), SMALLEST)
        scale = self._constant(f"{first.name}.input_scale", np.array(overall), FLOAT)
        q = ir.Value(name=f"{name}.fp4", type=ir.TensorType(FP4))
        q_scale = ir.Value(name=f"{name}.scale", type=ir.TensorType(FP8))
        attributes = [
            ir.AttrInt64("axis", -1),
            ir.AttrInt64("block_size", BLOCK),
            ir.AttrInt64("scale_type", FP8),
        ]
        dynamic = ir.Node(
            TRT, "TRT_FP4DynamicQuantize", [x, scale], attributes, outputs=[q, q_scale], name=name
        )
        self.graph.insert_before(first.node, dynamic)
        x = self._as(first.node, self._blocks(first.node, q, q_scale, scale, name), x.dtype)
        for layer in group:
            weight = self.weights.pop(layer.weight.name)
            if weight.shape[-1] % BLOCK:
                raise ExportError(
                    f"{layer.name} has {weight.shape[-1]} input channels; NVFP4 takes multiples "
                    f"of {BLOCK}"
                )
            squares = self.activations.squares(layer.name)
            part = partial(_part, weight, partial(_packed, squares=squares))
            stored = self._store(layer.weight.name, weight.shape, FP4, partial(part, 0))
            block_shape = (*weight.shape[:-1], weight.shape[-1] // BLOCK)
            block_scales = self._store(
                f"{layer.name}.block_scale", block_shape, FP8, partial(part, 1)
            )
            over = self._store(f"{layer.name}.weight_scale", (), FLOAT, partial(part, 2))
            wide = self._blocks(
                layer.first_node, stored, block_scales, over, f"{layer.name}/weight"
            )
            self._connect(layer, x, wide)

    def _blocks(
        self, before: ir.Node, q: ir.Value, scales: ir.Value, over: ir.Value, name: str
    ) -> ir.Value:
        """E2M1 elements, E4M3 block scales and the scale over these → FP32."""
        wide = self._node(before, "DequantizeLinear", [scales, over], f"{name}.wide_scale", FLOAT)
        return self._node(
            before, "DequantizeLinear", [q, wide], f"{name}.wide", FLOAT, axis=-1, block_size=BLOCK
        )

    def _connect(self, layer: Layer, x: ir.Value, weight: ir.Value) -> None:
        """Puts the quantized input and weight into their places."""
        weight = self._as(layer.first_node, weight, layer.weight.dtype)
        layer.node.replace_input_with(0, x)
        if layer.transpose is not None:
            layer.transpose.replace_input_with(0, weight)
        else:
            layer.node.replace_input_with(1, weight)

    def _as(self, before: ir.Node, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        assert dtype is not None
        return value if value.dtype == dtype else insert_cast(self.graph, before, value, dtype)

    def _node(
        self,
        before: ir.Node,
        op: str,
        inputs: list[ir.Value],
        name: str,
        dtype: ir.DataType | None,
        **attributes: int,
    ) -> ir.Value:
        assert dtype is not None
        output = ir.Value(name=name, type=ir.TensorType(dtype))
        given = [ir.AttrInt64(key, value) for key, value in attributes.items()]
        self.graph.insert_before(
            before, ir.Node("", op, inputs, given, outputs=[output], name=name)
        )
        return output

    def _constant(self, name: str, array: np.ndarray, dtype: ir.DataType | None) -> ir.Value:
        """A small initializer within the graph's file."""
        assert dtype is not None
        if name not in self.graph.initializers:
            tensor = ir.tensor(array.astype(dtype.numpy()), name=name)
            value = ir.Value(
                name=name, type=ir.TensorType(dtype), shape=tensor.shape, const_value=tensor
            )
            self.graph.register_initializer(value)
        return self.graph.initializers[name]

    def _store(
        self,
        name: str | None,
        shape: tuple[int, ...],
        dtype: ir.DataType,
        pieces: Callable[[], Iterator[np.ndarray]],
    ) -> ir.Value:
        """An initializer in the data file, in place of one with its name."""
        assert name is not None
        self.weights[name] = Weight(name, shape, dtype, pieces)
        value = self.weights[name].value()
        self.graph.initializers[name] = value
        return value

    def _read(self, layer: Layer) -> np.ndarray:
        return self.weights[str(layer.weight.name)].read()

    def _amax(self, layer: Layer) -> float:
        return self.activations.amax(layer.name)

    def _channels(self, layer: Layer) -> np.ndarray:
        return self.activations.channels(layer.name)


def smoothing(activations: np.ndarray, weights: np.ndarray, alpha: float) -> np.ndarray:
    """SmoothQuant's factors (Xiao et al. 2023, eq. 4): channels are divided by them, the weight's
    columns multiplied; here powers of two, which no type rounds. activations, weights: the largest
    absolute values, FP32 [in]."""
    factors = np.maximum(activations, 1e-5) ** alpha / np.maximum(weights, 1e-5) ** (1 - alpha)
    return np.exp2(np.rint(np.log2(factors))).astype(np.float32)


Quantize = Callable[[np.ndarray], tuple[np.ndarray, ...]]


def _part(weight: Weight, how: Quantize, number: int) -> Iterator[np.ndarray]:
    """One of the tensors that a weight is stored as."""
    yield _quantized(weight, how)[number]


@lru_cache(maxsize=1)  # they are written behind each other
def _quantized(weight: Weight, how: Quantize) -> tuple[np.ndarray, ...]:
    return how(weight.read())


def _packed(array: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, ...]:
    """NVFP4 as it is stored: two elements to a byte, and the scales."""
    elements, scales, overall = nvfp4(array, squares)
    codes = elements.reshape(-1).view(np.uint8)
    return codes[0::2] | codes[1::2] << 4, scales, np.array(overall)  # the first one is lower


def _smoothed(weight: Weight, factors: np.ndarray) -> Iterator[np.ndarray]:
    yield weight.read() * factors


def scaled(array: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """FP32 [out, ...] → (FP8 E4M3 or INT8 [out, ...], FP32 [out]): elements and their scales."""
    elements, scales = by_rows(partial(_scaled_rows, kind=kind), array)
    return (to_e4m3(elements) if kind == "fp8" else elements), scales


def _scaled_rows(array: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Of some rows, the elements of FP8 still in FP32."""
    amax = np.abs(array.reshape(len(array), -1)).max(1)
    scales = np.maximum(amax / np.float32(LARGEST[kind]), SMALLEST).astype(np.float32)
    quotients = array / scales.reshape(-1, *[1] * (array.ndim - 1))
    if kind == "fp8":
        return np.clip(quotients, -448, 448, out=quotients), scales
    np.rint(quotients, out=quotients)
    return np.clip(quotients, -127, 127, out=quotients).astype(np.int8), scales


def nvfp4(array: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """FP32 [out, in] → (E2M1 [out, in], E4M3 [out, in/16], FP32): elements, block scales, and the
    scale over these. The value of an element is the product of the three.

    Each block gets that scale of a few whose error, weighted by the inputs' mean squares
    (FP32 [in]), is least: the error that the layer's output has of it if channels are independent.
    """
    # The largest block scale is that of a block whose peak becomes 4.
    overall = np.float32(
        max(float(np.abs(array).max()) / (min(BLOCK_PEAKS) * LARGEST["fp8"]), SMALLEST)
    )
    squares = squares.reshape(-1, BLOCK)
    elements, scales = by_rows(partial(_blocks, squares=squares, overall=overall), array)
    return elements, scales, overall


def _blocks(
    array: np.ndarray, squares: np.ndarray, overall: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Elements and block scales of some rows."""
    blocks = array.reshape(len(array), -1, BLOCK)
    scales = _block_scales(blocks, squares, overall)
    wide = scales.astype(np.float32)[..., None] * overall
    elements = (blocks / wide).clip(-6, 6)
    return to_e2m1(elements).reshape(array.shape), scales


def _block_scales(blocks: np.ndarray, squares: np.ndarray, overall: np.float32) -> np.ndarray:
    """The best scale of each block: FP32 [out, in/16, 16], [in/16, 16] → E4M3 [out, in/16]."""
    magnitudes = np.abs(blocks)
    # Written to again and again: new memory for each step would take as long as the arithmetic.
    errors, scratch = np.empty_like(magnitudes), np.empty_like(magnitudes)
    amax = magnitudes.max(-1)
    least = np.full(amax.shape, np.inf, np.float32)
    best = np.zeros(amax.shape, ml_dtypes.float8_e4m3fn)
    for peak in BLOCK_PEAKS:
        scales = (amax / (np.float32(peak) * overall)).clip(*E4M3_SCALES).astype(best.dtype)
        wide = scales.astype(np.float32)[..., None] * overall
        np.divide(magnitudes, wide, out=errors)
        round_to_e2m1(errors, scratch)
        errors *= wide
        errors -= magnitudes
        error = np.einsum("...i,...i,...i->...", errors, errors, squares)
        better = error < least
        least[better], best[better] = error[better], scales[better]
    return best


def to_e4m3(array: np.ndarray) -> np.ndarray:
    """FP32 from -448 to 448 → E4M3; as ml_dtypes casts it, but by torch, on all cores."""
    bits = torch.from_numpy(array).to(torch.float8_e4m3fn).view(torch.uint8)
    return bits.numpy().view(ml_dtypes.float8_e4m3fn)


def to_e2m1(array: np.ndarray) -> np.ndarray:
    """FP32 from -6 to 6 → E2M1, ties to even; as ml_dtypes casts it, and five times as fast."""
    magnitudes = np.abs(array)
    codes = np.signbit(array).view(np.uint8) << 3
    # Between the codes 0 to 7 for 0, 0.5, 1, 1.5, 2, 3, 4 and 6: a tie belongs to the even one.
    for i, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        beyond = np.greater_equal if i % 2 else np.greater
        codes += beyond(magnitudes, np.float32(middle)).view(np.uint8)
    return codes.view(ml_dtypes.float4_e2m1fn)


def round_to_e2m1(magnitudes: np.ndarray, scratch: np.ndarray) -> None:
    """Makes each the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to even; FP32, not negative.

    A cast there and back takes many times as long. scratch: of the same shape and type.
    """
    np.minimum(magnitudes, np.float32(6), out=magnitudes)
    # A step is half the power of two that is not above the number, 0.5 below 2. Adding 1.5 · 2²³
    # steps leaves no bits for less than one, and FP32's own rounding does the rest.
    bits = scratch.view(np.uint32)
    np.bitwise_and(magnitudes.view(np.uint32), 0x7F800000, out=bits)
    np.maximum(bits, 0x3F800000, out=bits)
    scratch *= np.float32(0.5 * 1.5 * 2**23)
    magnitudes += scratch
    magnitudes -= scratch
