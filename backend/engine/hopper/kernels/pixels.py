"""The VAE's norm over channels with the SiLU behind it, on channels-last pictures."""

# The kernels' language has no types.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["pixels"])
def _norm_silu(
    x_ptr,
    gamma_ptr,
    out_ptr,
    pixels,
    channels,
    root,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < pixels)[:, None] & (column < channels)[None, :]
    place = row[:, None] * channels + column[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), 1e-12)
    gamma = tl.load(gamma_ptr + column, mask=column < channels, other=0.0).to(tl.float32)
    x = x * (root / length)[:, None] * gamma[None, :]
    if SILU:
        x = x * tl.sigmoid(x)
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=inside)


def norm_silu(x: Tensor, gamma: Tensor, silu: bool = True) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x)
    channels = x.shape[1]
    pixels = x.numel() // channels
    block = triton.next_power_of_2(channels)
    rows = max(1, 4096 // block)
    _norm_silu[(triton.cdiv(pixels, rows),)](
        x,
        gamma,
        out,
        pixels,
        channels,
        channels**0.5,
        SILU=silu,
        ROWS=rows,
        BLOCK=block,
        num_warps=8,
    )
    return out
