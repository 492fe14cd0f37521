"""The fused operations: by the kernels on a GPU, elsewhere by what they compute in torch.

Arguments and results are those of the namesakes in `hopper/reference.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hopper import reference
from runtimes import EngineError

# Up to so many rows our own product is faster than cuBLAS's, if its sums are long.
FEW_ROWS = 256

if torch.cuda.is_available():  # the compiler need not be installed elsewhere
    try:
        from hopper import kernels
    except ImportError as missing:
        raise EngineError(
            f"engines for Hopper need the compiler triton, which cannot be imported ({missing}): "
            "`pip install triton`"
        ) from None


def norm_modulate(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    return (kernels if x.is_cuda else reference).norm_modulate(x, *arguments)


def place_heads(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (kernels if qkv.is_cuda else reference).place_heads(qkv, *arguments)


def quantize_rows(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return (kernels if x.is_cuda else reference).quantize_rows(x, **options)


def norm_silu(x: Tensor, gamma: Tensor, **options: Any) -> Tensor:
    return (kernels if x.is_cuda else reference).norm_silu(x, gamma, **options)


def scaled_mm(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """The GPU's tensor cores add up to 128 products with fewer bits than FP32 has (“fast
    accumulation”), which makes them an eighth faster."""
    if not x.is_cuda:
        reference.scaled_mm(x, x_scale, weight, scale, bias, out)
        return
    if len(x) <= FEW_ROWS and x.shape[1] >= len(weight):
        kernels.scaled_mm(x, x_scale, weight, scale, bias, out)
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
