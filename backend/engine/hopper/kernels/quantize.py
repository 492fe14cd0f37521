"""BF16 rows → E4M3 rows with a scale each, with GELU or a gather on the way.

A row is held in registers in pieces of a power of two: 3072 is 3 · 1024, without idle lanes.
"""

# The kernels' language has no types, and no unpacking of tuples.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def load_row(ptr, width, columns, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """A row's pieces; noughts behind its end."""
    pieces = ()
    for i in tl.static_range(PIECES):
        at = i * BLOCK + columns
        pieces = pieces + (tl.load(ptr + at, mask=at < width, other=0.0),)
    return pieces


@triton.jit
def tanh(x, INTERPRETED: tl.constexpr):
    """To 11 bits on a GPU, in one instruction; E4M3 keeps 4."""
    if INTERPRETED:
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def store_e4m3(
    pieces, out_ptr, scales_ptr, row, width, columns, PIECES: tl.constexpr, BLOCK: tl.constexpr
):
    """Stores one row, FP32, and its scale. The conversion saturates."""
    largest = tl.abs(pieces[0])
    for i in tl.static_range(1, PIECES):
        largest = tl.maximum(largest, tl.abs(pieces[i]))
    scale = tl.maximum(tl.max(largest, axis=0) / 448.0, 1e-8)
    inverse = 1.0 / scale
    for i in tl.static_range(PIECES):
        at = i * BLOCK + columns
        values = (pieces[i] * inverse).to(tl.float8e4nv)
        tl.store(out_ptr + row * width + at, values, mask=at < width)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # parts of it begin anywhere
def _quantize_rows(
    x_ptr,
    slots_ptr,
    out_ptr,
    scales_ptr,
    width,
    GELU: tl.constexpr,
    GATHER: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    source = row
    if GATHER:
        source = tl.load(slots_ptr + row).to(tl.int64)
    readable = tl.where(source >= 0, width, 0)
    loaded = load_row(x_ptr + source * width, readable, columns, PIECES, BLOCK)
    pieces = ()
    for i in tl.static_range(PIECES):
        x = loaded[i].to(tl.float32)
        if GELU:
            angle = x * (0.7978845608 + 0.0356774081 * x * x)
            x = 0.5 * x * tanh(angle, INTERPRETED) + 0.5 * x
        pieces = pieces + (x,)
    store_e4m3(pieces, out_ptr, scales_ptr, row, width, columns, PIECES, BLOCK)


def pieces_of(width: int) -> dict[str, int]:
    """How a row is cut: into three where its width allows it."""
    block = triton.next_power_of_2(triton.cdiv(width, 3))
    return {"PIECES": triton.cdiv(width, block), "BLOCK": block}


def quantize_rows(
    x: Tensor, gelu: bool = False, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, width = len(x) if slots is None else len(slots), x.shape[1]
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _quantize_rows[(rows,)](
        x,
        slots,
        out,
        scales,
        width,
        GELU=gelu,
        GATHER=slots is not None,
        INTERPRETED=INTERPRETED,
        **pieces_of(width),
        num_warps=8 if width > 8192 else 4,
    )
    return out, scales
