"""Attention over text and image together, without a mask: each sample has its own length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class Joint(NamedTuple):
    """Where the rows of a batch lie in the joint attention: [text, image] of the first sample,
    then of the next, without the texts' padding.

    slots: INT32 [R], of rows in the order "all text, then all image"; −1 for padding.
    lengths: tokens of each sample.
    """

    slots: Tensor
    lengths: list[int]


def join(text_mask: Tensor, image_tokens: int) -> Joint:
    """text_mask: BOOL [B, T]."""
    counts = text_mask.sum(1)
    lengths = (counts + image_tokens).tolist()
    starts = (counts + image_tokens).cumsum(0) - counts - image_tokens
    text = starts[:, None] + text_mask.cumsum(1) - 1
    text = torch.where(text_mask, text, -1)
    image = (starts + counts)[:, None] + torch.arange(image_tokens, device=text_mask.device)
    return Joint(torch.cat([text.flatten(), image.flatten()]).int(), lengths)


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """q, k, v: BF16 [R, H, D] in the order of the slots → [R, H·D]; rows behind the last sample's
    are left unwritten."""
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
