"""RMS norm and rotary embedding of queries and keys, and their places in the joint attention."""

# The kernels' language has no types.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["text_rows"])  # it varies from prompt to prompt
def _place_heads(
    qkv_ptr,
    norms_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    v_scale_ptr,
    text_rows,
    heads,
    FP8: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    width = heads * SIZE
    head = tl.arange(0, HEADS)
    column = tl.arange(0, 2 * PAIRS)
    inside = (head < heads)[:, None] & (column < SIZE)[None, :]
    place = head[:, None] * SIZE + column[None, :]
    pair = tl.arange(0, PAIRS)
    cos = tl.load(cos_ptr + row * (SIZE // 2) + pair, mask=pair < SIZE // 2, other=0.0)
    sin = tl.load(sin_ptr + row * (SIZE // 2) + pair, mask=pair < SIZE // 2, other=0.0)
    norms = norms_ptr + tl.where(row >= text_rows, 2 * SIZE, 0) + column
    for part in tl.static_range(2):
        x = tl.load(qkv_ptr + row * 3 * width + part * width + place, mask=inside, other=0.0)
        x = x.to(tl.float32)
        weight = tl.load(norms + part * SIZE, mask=column < SIZE, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + 1e-6)[:, None] * weight[None, :]
        even, odd = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
        turned = tl.join(
            even * cos[None, :] - odd * sin[None, :], even * sin[None, :] + odd * cos[None, :]
        )
        out = (q_ptr if part == 0 else k_ptr) + slot * width + place
        turned = tl.reshape(turned, (HEADS, 2 * PAIRS))
        tl.store(out, turned.to(q_ptr.dtype.element_ty), mask=inside)
    v = tl.load(qkv_ptr + row * 3 * width + 2 * width + place, mask=inside, other=0.0)
    if FP8:
        v = v.to(tl.float32) * tl.load(v_scale_ptr)
    tl.store(v_ptr + slot * width + place, v.to(v_ptr.dtype.element_ty), mask=inside)


def place_heads(
    qkv: Tensor,
    norms: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    text_rows: int,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, size = len(qkv), norms.shape[-1]
    heads = qkv.shape[1] // (3 * size)
    dtype = qkv.dtype if v_scale is None else torch.float8_e4m3fn
    q, k, v = torch.empty(3, rows, heads, size, dtype=dtype, device=qkv.device).unbind()
    _place_heads[(rows,)](
        qkv,
        norms,
        cos,
        sin,
        slots,
        q,
        k,
        v,
        v_scale,
        text_rows,
        heads,
        FP8=v_scale is not None,
        SIZE=size,
        HEADS=triton.next_power_of_2(heads),
        PAIRS=triton.next_power_of_2(size // 2),
        num_warps=2,
    )
    return q, k, v
