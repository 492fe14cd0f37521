"""The fused kernels, in the Triton language (the compiler, not the server).

Each has the signature and meaning of its namesake in `hopper/reference.py`.
"""

from hopper.kernels.few_rows import scaled_mm
from hopper.kernels.heads import place_heads
from hopper.kernels.norm import norm_modulate
from hopper.kernels.pixels import norm_silu
from hopper.kernels.quantize import quantize_rows

__all__ = ["norm_modulate", "norm_silu", "place_heads", "quantize_rows", "scaled_mm"]
