"""FP8 attention against attention with E4M3 inputs computed by torch."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from build.engine_builder import RTX, ShapeRange, build_engine
from export.attention import PARTS, quantize_attention

HEADS, SIZE, TOKENS = 3, 32, 24
AMAX = {"query": 5.0, "key": 4.0, "value": 3.0}
DTYPES = {"fp32": ir.DataType.FLOAT, "bf16": ir.DataType.BFLOAT16}


def attention(folder, dtype):
    """A graph of one Attention, batch and tokens free."""
    wide = ir.Shape(["batch", "tokens", HEADS * SIZE])
    square = ir.Shape(["batch", 1, "tokens", "tokens"])
    values = [
        ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)
        for name, shape in (*((part, wide) for part in PARTS), ("bias", square), ("out", wide))
    ]
    heads = [ir.AttrInt64(f"{kind}_num_heads", HEADS) for kind in ("q", "kv")]
    node = ir.Node("", "Attention", values[:4], heads, name="attention")
    last = ir.Node("", "Identity", node.outputs, outputs=values[4:])
    nodes = [node, last]
    graph = ir.Graph(values[:4], values[4:], nodes=nodes, opset_imports={"": 23}, name="graph")
    model = ir.Model(graph, ir_version=11)
    quantize_attention(
        graph,
        lambda node: "attn",
        lambda name: np.full(HEADS * SIZE, AMAX[name.split(".")[1]], np.float32),
    )
    folder.mkdir(exist_ok=True)
    ir.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def feed():
    rng = np.random.default_rng(0)
    values = {
        part: (rng.standard_normal((2, TOKENS, HEADS * SIZE)) * AMAX[part] / 4).astype(np.float32)
        for part in PARTS
    }
    bias = np.zeros((2, 1, TOKENS, TOKENS), np.float32)
    bias[1, ..., :5] = -65504.0
    return values | {"bias": bias}


def test_it_computes_attention_of_e4m3(tmp_path):
    def e4m3(x, amax):
        scale = amax / 448
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    path = attention(tmp_path / "attention", DTYPES["fp32"])
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    values = feed()
    (ours,) = session.run(None, values)
    q, k, v = (
        torch.from_numpy(values[part]).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        for part in PARTS
    )
    q, k, v = (e4m3(x, AMAX[part]) for x, part in zip((q, k, v), PARTS, strict=True))
    weights = (q @ k.transpose(2, 3) * SIZE**-0.5 + torch.from_numpy(values["bias"])).softmax(-1)
    expected = (e4m3(weights, 1.0) @ v).transpose(1, 2).flatten(2).numpy()
    np.testing.assert_allclose(ours, expected, atol=2e-3)
    exact = scaled_dot_product_attention(
        *(
            torch.from_numpy(values[part]).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for part in PARTS
        ),
        attn_mask=torch.from_numpy(values["bias"]),
    )
    difference = np.abs(ours - exact.transpose(1, 2).flatten(2).numpy())
    assert 1e-4 < difference.mean() < 0.05  # it is quantized, and still attention


@pytest.mark.parametrize("target", ["sm89", "sm120"])
def test_tensorrt_compiles_it_in_bf16(target, tmp_path):
    path = attention(tmp_path / "attention", DTYPES["bf16"])
    shape = (TOKENS, HEADS * SIZE)
    ranges = {part: ShapeRange(*((rows, *shape) for rows in (1, 2, 8))) for part in PARTS}
    ranges["bias"] = ShapeRange(*((rows, 1, TOKENS, TOKENS) for rows in (1, 2, 8)))
    description = build_engine(path, tmp_path / "model.rtx", RTX, target, [ranges])
    assert description["inputs"]["query"]["dtype"] == "BF16"
