"""The fused operations: the kernels where there is a GPU, what they compute in torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from hopper import reference

if torch.cuda.is_available():
    from hopper.kernels.heads import place_heads
    from hopper.kernels.norm import norm_modulate
    from hopper.kernels.pixels import norm_silu
    from hopper.kernels.quantize import quantize_rows
else:
    from hopper.reference import norm_modulate, norm_silu, place_heads, quantize_rows

__all__ = ["norm_modulate", "norm_silu", "place_heads", "quantize_rows", "scaled_mm"]


def scaled_mm(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """As `reference.scaled_mm`, on the tensor cores; their sums within 128 products have 22 bits
    (“fast accumulation”), which twice the speed is worth."""
    if not x.is_cuda:
        reference.scaled_mm(x, x_scale, weight, scale, bias, out)
        return
    torch._scaled_mm(
        x,
        weight.T,
        scale_a=x_scale[:, None],
        scale_b=scale[None],
        bias=bias,
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )
