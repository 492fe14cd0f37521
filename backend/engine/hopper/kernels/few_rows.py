"""The texts' FP8 matrix products: few rows, whose long sums are split over the multiprocessors.

Such a product is bound by the reading of its weights, for which all multiprocessors have to work.
"""

# The kernels' language has no types.
# mypy: ignore-errors

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # of a tile


class Tile(NamedTuple):
    """step: elements of a sum at a time. split: parts of a sum, as long as the result's rows at
    most, or longer."""

    features: int
    step: int
    warps: int
    stages: int
    split: int
    split_long: int


# What was fastest on an H200 for one, two, three and four tiles of rows, with 3072 features and
# sums of 3072 and 12288: see docs/hopper.md.
TILES = (
    Tile(128, 256, 8, 3, 3, 4),
    Tile(64, 128, 4, 6, 1, 2),
    Tile(128, 128, 4, 4, 1, 3),
    Tile(64, 128, 4, 4, 1, 2),
)


@triton.jit(do_not_specialize=["rows", "split"], do_not_specialize_on_alignment=["x_scale_ptr"])
def _scaled_mm(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    features,
    length,
    split,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
):
    # Programs that read the same weights run next to each other.
    tiles = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    row = tile % tiles * ROWS + tl.arange(0, ROWS)
    feature = tile // tiles * FEATURES + tl.arange(0, FEATURES)
    part = tl.program_id(1)
    steps = tl.cdiv(length, STEP)
    first, last = part * steps // split, (part + 1) * steps // split
    at = tl.arange(0, STEP)
    # What lies outside is read from the last row, and not stored.
    x = x_ptr + tl.minimum(row, rows - 1)[:, None] * length + at[None, :]
    weight = weight_ptr + tl.minimum(feature, features - 1).to(tl.int64)[None, :] * length
    weight += at[:, None]
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    for step in range(first, last):
        inside = step * STEP + at < length
        a = tl.load(x + step * STEP, mask=inside[None, :], other=0.0)
        b = tl.load(weight + step * STEP, mask=inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
    stored = (row < rows)[:, None] & (feature < features)[None, :]
    place = row[:, None] * features + feature[None, :]
    if not WHOLE:
        # The last program to arrive adds up the parts, always in the same order.
        size = rows.to(tl.int64) * features
        tl.store(parts_ptr + part * size + place, total, mask=stored)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") < split - 1:
            return
        tl.store(arrived_ptr + tile, 0)  # as the next product expects it
        total = tl.zeros([ROWS, FEATURES], tl.float32)
        for other in range(split):
            total += tl.load(parts_ptr + other * size + place, mask=stored, cache_modifier=".cg")
    x_scale = tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)
    scale = tl.load(scale_ptr + feature, mask=feature < features, other=0.0)
    total = total * x_scale[:, None] * scale[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature < features, other=0.0)
        total += bias.to(tl.float32)[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=stored)


@functools.cache
def counters(device: torch.device, tiles: int) -> Tensor:
    """INT32, noughts between products: how many parts of a tile have arrived. A size's first
    product makes them, which is not recorded (hopper/replay.py)."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def scaled_mm(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    (rows, length), features = x.shape, len(weight)
    row_tiles = triton.cdiv(rows, ROWS)
    tile = TILES[min(row_tiles, len(TILES)) - 1]
    tiles = row_tiles * triton.cdiv(features, tile.features)
    split = tile.split_long if length > features else tile.split
    parts = arrived = None
    if split > 1:
        arrived = counters(x.device, tiles)
        parts = torch.empty(split * rows * features, dtype=torch.float32, device=x.device)
    _scaled_mm[(tiles, split)](
        x,
        x_scale,
        weight,
        scale,
        bias,
        out,
        parts,
        arrived,
        rows,
        features,
        length,
        split,
        BIAS=bias is not None,
        WHOLE=split == 1,
        ROWS=ROWS,
        FEATURES=tile.features,
        STEP=tile.step,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
