"""Attention over text and image together, without a mask: each sample has its own length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


def join(text_mask: Tensor, image_tokens: int, padded: bool) -> Tensor:
    """Places INT32 [R] of rows in the order "all text, then all image" in the joint attention.

    A sample has its valid text first, then its image. padded: behind them comes the text's padding,
    so that every sample is equally long; else the next sample follows at once, and padding has the
    place −1. text_mask: BOOL [B, T].
    """
    batch, text_tokens = text_mask.shape
    counts = text_mask.sum(1, keepdim=True)
    valid = text_mask.cumsum(1) - 1
    if padded:
        samples = torch.arange(batch, device=text_mask.device)[:, None]
        starts = samples * (text_tokens + image_tokens)
        padding = starts + counts + image_tokens + (~text_mask).cumsum(1) - 1
    else:
        starts = (counts + image_tokens).cumsum(0) - counts - image_tokens
        padding = torch.full_like(valid, -1)
    text = torch.where(text_mask, starts + valid, padding)
    image = starts + counts + torch.arange(image_tokens, device=text_mask.device)
    return torch.cat([text.flatten(), image.flatten()]).int()


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """q, k, v: BF16 [R, H, D], sample after sample → [R, H·D]; rows behind the last sample's are
    left unwritten."""
    if len(set(lengths)) == 1:
        return _attend(q, k, v, len(lengths), lengths[0])
    out = torch.empty(len(q), q[0].numel(), dtype=q.dtype, device=q.device)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        out[rows] = _attend(q[rows], k[rows], v[rows], 1, length)
        start += length
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    heads = [x[: batch * length].unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v)]
    # cuDNN's kernel is twice as fast as the others at a head size of 128.
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        out = functional.scaled_dot_product_attention(*heads)
    return out.transpose(1, 2).reshape(batch * length, -1)
