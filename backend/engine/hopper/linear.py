"""Matrix products with FP8 or BF16 weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hopper.ops import quantize_rows, scaled_mm

# BF16 [R, in] with None, or E4M3 [R, in] with the rows' scales, FP32 [R].
Rows = tuple[Tensor, Tensor | None]


class Linear(NamedTuple):
    """x @ weightᵀ + bias; weight [out, in] BF16, or E4M3 with a scale FP32 [out] for each row."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None

    @property
    def fp8(self) -> bool:
        return self.scale is not None

    def to(self, device: torch.device) -> Linear:
        """The same on another device; from page-locked memory without waiting for the copy."""
        return Linear(*(None if x is None else x.to(device, non_blocking=True) for x in self))

    def into(self, x: Rows, out: Tensor) -> None:
        """Writes BF16 [R, out]; `x` has the format of the weight."""
        values, scales = x
        if self.scale is not None:
            assert scales is not None
            scaled_mm(values, scales, self.weight, self.scale, self.bias, out)
        elif self.bias is None:
            torch.mm(values, self.weight.T, out=out)
        else:
            torch.addmm(self.bias, values, self.weight.T, out=out)

    def __call__(self, x: Tensor) -> Tensor:
        """BF16 [..., in] → [..., out]."""
        if self.scale is None:
            return functional.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(len(rows), len(self.weight), dtype=x.dtype, device=x.device)
        self.into(quantize_rows(rows), out)
        return out.view(*x.shape[:-1], -1)


def linear(weights: Mapping[str, Tensor], name: str) -> Linear:
    """The layer `name`; without bias or scale where the file has none."""
    return Linear(
        weights[f"{name}.weight"], weights.get(f"{name}.bias"), weights.get(f"{name}.scale")
    )
