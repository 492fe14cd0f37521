"""BF16 rows → E4M3 rows with a scale each, with GELU or a gather on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def to_e4m3(wide, out_ptr, scales_ptr, row, width, columns, inside):
    """Stores one row that is held in registers, FP32, and its scale."""
    scale = tl.maximum(tl.max(tl.abs(wide), axis=0) / 448.0, 1e-8)
    values = tl.clamp(wide / scale, -448.0, 448.0)
    tl.store(out_ptr + row * width + columns, values.to(tl.float8e4nv), mask=inside)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _quantize_rows(
    x_ptr,
    slots_ptr,
    out_ptr,
    scales_ptr,
    width,
    GELU: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    source = row
    readable = inside
    if GATHER:
        source = tl.load(slots_ptr + row).to(tl.int64)
        readable = inside & (source >= 0)
    wide = tl.load(x_ptr + source * width + columns, mask=readable, other=0.0).to(tl.float32)
    if GELU:  # 0.5 x (1 + tanh(u)) is x · sigmoid(2u)
        wide = wide * tl.sigmoid(1.5957691216 * (wide + 0.044715 * wide * wide * wide))
    to_e4m3(wide, out_ptr, scales_ptr, row, width, columns, inside)


def quantize_rows(
    x: Tensor, gelu: bool = False, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, width = len(x) if slots is None else len(slots), x.shape[1]
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _quantize_rows[(rows,)](
        x,
        slots,
        out,
        scales,
        width,
        GELU=gelu,
        GATHER=slots is not None,
        BLOCK=block,
        num_warps=16 if block > 8192 else 4,
    )
    return out, scales
