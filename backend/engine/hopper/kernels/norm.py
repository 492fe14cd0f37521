"""Gated residual, LayerNorm, modulation and quantization of a row in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopper.kernels.quantize import to_e4m3


@triton.jit
def _norm_modulate(
    x_ptr,
    y_ptr,
    table_ptr,
    index_ptr,
    out_ptr,
    scales_ptr,
    width,
    gate,
    shift,
    scale,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    modulation = table_ptr + tl.load(index_ptr + row).to(tl.int64) + columns
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(modulation + gate, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + g * y).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * width + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, axis=0) / width + 1e-6)
    factor = 1.0 + tl.load(modulation + scale, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(modulation + shift, mask=inside, other=0.0).to(tl.float32)
    result = centred / deviation * factor + offset
    if FP8:
        to_e4m3(result, out_ptr, scales_ptr, row, width, columns, inside)
    else:
        tl.store(out_ptr + row * width + columns, result.to(x_ptr.dtype.element_ty), mask=inside)


def norm_modulate(
    x: Tensor,
    y: Tensor | None,
    table: Tensor,
    index: Tensor,
    gate: int,
    shift: int,
    scale: int,
    fp8: bool,
) -> tuple[Tensor, Tensor | None]:
    rows, width = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn if fp8 else x.dtype)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if fp8 else None
    _norm_modulate[(rows,)](
        x,
        y,
        table,
        index,
        out,
        scales,
        width,
        gate,
        shift,
        scale,
        ADD=y is not None,
        FP8=fp8,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )
    return out, scales
