"""Attention over text and image together, without a mask: each sample has its own length."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class Samples(NamedTuple):
    """Where the samples lie that share one array of rows; what is behind the last only has to be
    finite.

    ends: INT32 [B + 1], the first row of each sample and the end of the last one.
    longest: rows that a sample may have at most.
    lengths: their numbers of rows, where the host has to know them.
    """

    ends: Tensor
    longest: int
    lengths: tuple[int, ...]


@functools.cache
def flash_attention() -> ModuleType | None:
    """FlashAttention-3, whose kernels read lengths on the GPU, and also compute in E4M3."""
    try:
        return importlib.import_module("fa3_fwd_interface")
    except (ImportError, OSError):
        return None


def needs_lengths(device: torch.device) -> bool:
    """Whether `attend` takes the samples' lengths from the host: cuDNN plans for each of them."""
    return device.type != "cuda" or flash_attention() is None


def join(
    text_mask: Tensor, image_tokens: int, text_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows "all texts, then all images", the texts without most of their padding.

    A sample has its valid text first, then its image, and the next sample follows at once. Padding
    lies behind the last sample: kernels read on to the end of a tile, and not finite values there
    would spread.

    Args:
        text_mask: BOOL [B, T].
        text_rows: the texts' rows, at least as many as are valid and at most B · T.

    Returns:
        INT64 [text_rows]: the place in the flat mask of each row of text; first what is valid, in
        its order, then padding.
        BOOL [text_rows]: whether it is valid.
        INT32 [R]: where in the attention each row lies.
        INT32 [B + 1]: the samples' `ends` there.
    """
    valid = text_mask.flatten()
    order = torch.where(valid, valid.cumsum(0), valid.sum() + (~valid).cumsum(0)) - 1
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = text_mask.sum(1, keepdim=True)
    ends = functional.pad((counts + image_tokens).flatten().cumsum(0), (1, 0))
    images_before = torch.arange(len(counts), device=ends.device)[:, None] * image_tokens
    last = images_before[-1] + image_tokens
    text = order + torch.where(text_mask, images_before, last).flatten()
    image = ends[:-1, None] + counts + torch.arange(image_tokens, device=ends.device)
    rows = rows[:text_rows]
    places = torch.cat([text[rows], image.flatten()]).int()
    return rows, valid[rows], places, ends.int()


def attend(
    q: Tensor, k: Tensor, v: Tensor, samples: Samples, v_descale: Tensor | None = None
) -> Tensor:
    """softmax(q kᵀ / √D) v of each sample.

    Args:
        q, k, v: BF16 [R, H, D], or E4M3.
        v_descale: of E4M3, FP32 [1], what values are multiplied by.

    Returns: BF16 [R, H·D].
    """
    kernels = None if samples.lengths else flash_attention()
    if kernels is not None:
        scale = None if v_descale is None else v_descale.expand(len(samples.ends) - 1, q.shape[1])
        ends, longest = samples.ends, samples.longest
        out = kernels.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, v_descale=scale)
        return out.flatten(1)
    one = _attend
    if v_descale is not None:
        q, k, v, one = q.float(), k.float(), v.float() * v_descale, _attend_e4m3
    lengths = samples.lengths
    if len(set(lengths)) == 1:
        return one(q, k, v, len(lengths), lengths[0])
    queries, keys, values = (x[: sum(lengths)].split(lengths) for x in (q, k, v))
    samples_of = zip(queries, keys, values, strict=True)
    return torch.cat([one(*each, 1, len(each[0])) for each in samples_of])


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    heads = [x[: batch * length].unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v)]
    # cuDNN's kernel is twice as fast as the others of torch.
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        out = functional.scaled_dot_product_attention(*heads)
    return out.transpose(1, 2).reshape(batch * length, -1)


def _attend_e4m3(q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    """As FlashAttention-3 computes from E4M3: the softmax's numerators are rounded to it, too, with
    256 for the largest of a row, and their sum is not. q, k, v: FP32."""
    samples = [x[: batch * length].unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v)]
    heads = [x.flatten(0, 1) for x in samples]
    out = torch.empty_like(heads[0], dtype=torch.bfloat16)
    for i, (query, key, value) in enumerate(zip(*heads, strict=True)):  # all would take gigabytes
        scores = query @ key.T * q.shape[-1] ** -0.5
        weights = 256 * (scores - scores.amax(-1, keepdim=True)).exp()
        mixed = weights.to(torch.float8_e4m3fn).float() @ value
        out[i] = mixed / weights.sum(-1, keepdim=True)
    return out.unflatten(0, (batch, -1)).transpose(1, 2).reshape(batch * length, -1)
