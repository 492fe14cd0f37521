"""Gated residual, LayerNorm, modulation and quantization of a row in one pass."""

# The kernels' language has no types, and no unpacking of tuples.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopper.kernels.quantize import load_row, pieces_of, store_e4m3

# Of one program: they share their sample's modulation, which is read once, and each is read while
# the one before it is computed.
ROWS = 8


# Lengths vary from picture to picture: none of them is worth a compilation.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["index_ptr"])
def _norm_modulate(
    x_ptr,
    y_ptr,
    table_ptr,
    index_ptr,
    out_ptr,
    scales_ptr,
    rows,
    width,
    gate,
    shift,
    scale,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * ROWS
    sample = tl.load(index_ptr + first)
    gates = load_row(table_ptr + sample + gate, width, columns, PIECES, BLOCK)
    shifts = load_row(table_ptr + sample + shift, width, columns, PIECES, BLOCK)
    factors = load_row(table_ptr + sample + scale, width, columns, PIECES, BLOCK)
    last = tl.minimum(first + ROWS, rows)
    following_x = load_row(x_ptr + first * width, width, columns, PIECES, BLOCK)
    following_y = following_x
    if ADD:
        following_y = load_row(y_ptr + first * width, width, columns, PIECES, BLOCK)
    for row in range(first, last):
        xs, ys = following_x, following_y
        following = tl.minimum(row + 1, last - 1)
        following_x = load_row(x_ptr + following * width, width, columns, PIECES, BLOCK)
        if ADD:
            following_y = load_row(y_ptr + following * width, width, columns, PIECES, BLOCK)
        here = tl.load(index_ptr + row)
        if here != sample:
            sample = here
            gates = load_row(table_ptr + sample + gate, width, columns, PIECES, BLOCK)
            shifts = load_row(table_ptr + sample + shift, width, columns, PIECES, BLOCK)
            factors = load_row(table_ptr + sample + scale, width, columns, PIECES, BLOCK)
        added = ()
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PIECES):
            x = xs[i].to(tl.float32)
            if ADD:
                x += gates[i].to(tl.float32) * ys[i].to(tl.float32)
                at = i * BLOCK + columns
                rounded = x.to(x_ptr.dtype.element_ty)
                tl.store(x_ptr + row * width + at, rounded, mask=at < width)
                x = rounded.to(tl.float32)
            added = added + (x,)
            total += x
        mean = tl.sum(total, axis=0) / width
        squares = tl.zeros([BLOCK], tl.float32)
        centred = ()
        for i in tl.static_range(PIECES):
            x = tl.where(i * BLOCK + columns < width, added[i] - mean, 0.0)
            centred = centred + (x,)
            squares += x * x
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / width + 1e-6)
        results = ()
        for i in tl.static_range(PIECES):
            factor = factors[i].to(tl.float32) * inverse + inverse
            results = results + (centred[i] * factor + shifts[i].to(tl.float32),)
        if FP8:
            store_e4m3(results, out_ptr, scales_ptr, row, width, columns, PIECES, BLOCK)
        else:
            for i in tl.static_range(PIECES):
                at = i * BLOCK + columns
                result = results[i].to(x_ptr.dtype.element_ty)
                tl.store(out_ptr + row * width + at, result, mask=at < width)


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
    _norm_modulate[(triton.cdiv(rows, ROWS),)](
        x,
        y,
        table,
        index,
        out,
        scales,
        rows,
        width,
        gate,
        shift,
        scale,
        ADD=y is not None,
        FP8=fp8,
        ROWS=ROWS,
        **pieces_of(width),
        num_warps=4,
    )
    return out, scales
