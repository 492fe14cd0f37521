"""What the fused kernels compute, in plain torch: the CPU's path, and what the kernels are tested
against. R rows (tokens), d width, H heads of size D."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LARGEST = 448.0  # of E4M3
SMALLEST = 1e-8  # a scale is never nought


def quantize_rows(
    x: Tensor, gelu: bool = False, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """E4M3 [R, d] and the rows' scales FP32 [R] of BF16 `x`.

    gelu: of gelu(x), the tanh form. slots: INT32 [R], the rows of `x` to take; −1 is a row of
    noughts.
    """
    wide = gather_rows(x, slots).float()
    return _quantized(functional.gelu(wide, approximate="tanh") if gelu else wide)


def gather_rows(x: Tensor, slots: Tensor | None) -> Tensor:
    """Rows of `x` as `slots` names them, −1 a row of noughts; all of them if there are none."""
    if slots is None:
        return x
    return torch.where(slots[:, None] >= 0, x[slots.long()], 0).to(x.dtype)


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
    """x += gate · y in place; returns layernorm(x) · (1 + scale) + shift, with its rows' scales
    if it is quantized.

    Args:
        x: the residual stream, BF16 [R, d].
        y: what a branch adds to it, BF16 [R, d]; None adds nothing.
        table: modulations, BF16, read as flat; row r's begin at element index[r].
        index: INT32 [R].
        gate, shift, scale: where, from there, the three vectors of d elements lie.
        fp8: whether the result is E4M3 or BF16.
    """
    width = x.shape[1]
    flat, columns = table.reshape(-1), torch.arange(width, device=x.device)

    def rows(offset: int) -> Tensor:
        return flat[index.long()[:, None] + offset + columns].float()

    if y is not None:
        x.copy_(x.float() + rows(gate) * y.float())
    normed = functional.layer_norm(x.float(), (width,), eps=1e-6)
    result = normed * (1 + rows(scale)) + rows(shift)
    return _quantized(result) if fp8 else (result.to(x.dtype), None)


def place_heads(
    qkv: Tensor,
    norms: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    text_rows: int,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm and rotation of queries and keys; all three [R, H, D], row r at slots[r].

    Args:
        qkv: BF16 [R, 3d], the first `text_rows` rows are text.
        norms: weights of the RMS norms, BF16 [2, 2, D]: text and image, query and key.
        cos, sin: FP32 [R, D/2], of the angles; adjacent pairs turn together.
        slots: INT32 [R]; rows at −1 are left out, and slots that none takes are left unwritten.
        v_scale: FP32 scalar. With it the results are E4M3, the values multiplied by it; without
            it they are BF16.
    """
    size = norms.shape[-1]
    stream = (torch.arange(len(qkv), device=qkv.device) >= text_rows).long()
    q, k, v = qkv.float().unflatten(1, (3, -1, size)).unbind(1)  # [R, H, D]

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        normed = functional.rms_norm(x, (size,), eps=1e-6) * weight[:, None].float()
        even, odd = normed.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[:, None], sin[:, None]
        return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)

    def placed(x: Tensor) -> Tensor:
        keep = slots >= 0
        out = torch.empty_like(x, dtype=qkv.dtype)
        if v_scale is not None:
            out, x = out.to(torch.float8_e4m3fn), x.clamp(-LARGEST, LARGEST)
        out.view(torch.uint8)[slots[keep].long()] = x[keep].to(out.dtype).view(torch.uint8)
        return out

    if v_scale is not None:
        v = v * v_scale
    return placed(turned(q, norms[stream, 0])), placed(turned(k, norms[stream, 1])), placed(v)


def norm_silu(x: Tensor, gamma: Tensor, silu: bool = True) -> Tensor:
    """The VAE's norm over the channels of BF16 [B, C, h, w], times √C · gamma [C], then SiLU."""
    wide = functional.normalize(x.float(), dim=1) * len(gamma) ** 0.5
    wide = wide * gamma.reshape(-1, 1, 1).float()
    return (functional.silu(wide) if silu else wide).to(x.dtype)


def scaled_mm(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out = (x · x_scale) @ (weight · scale)ᵀ + bias, summed in FP32.

    x: E4M3 [R, in]. x_scale: FP32 [R]. weight: E4M3 [out, in]. scale: FP32 [out]. out: BF16.
    """
    product = (x.float() @ weight.float().T) * x_scale[:, None] * scale
    out.copy_(product if bias is None else product + bias.float())


def _quantized(wide: Tensor) -> tuple[Tensor, Tensor]:
    scales = (wide.abs().amax(1) / LARGEST).clamp_min(SMALLEST)
    values = (wide / scales[:, None]).clamp(-LARGEST, LARGEST)
    return values.to(torch.float8_e4m3fn), scales
