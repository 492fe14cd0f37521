"""The fused kernels against torch, on random inputs of odd sizes.

On a GPU, or where the compiler's package is installed interpreted on the CPU:
`TRITON_INTERPRET=1 pytest tests/backend/engine/hopper/test_kernels.py`.
"""

from __future__ import annotations

import os

import pytest
import torch

from hopper import reference

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from hopper.dit import WARM_UP  # noqa: E402
from hopper.kernels.few_rows import ROWS, TILES, scaled_mm  # noqa: E402
from hopper.kernels.heads import place_heads  # noqa: E402
from hopper.kernels.norm import norm_modulate  # noqa: E402
from hopper.kernels.pixels import norm_silu  # noqa: E402
from hopper.kernels.quantize import quantize_rows  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter of Triton 3.6 cuts BF16 off, and loses the carry when it rounds up to a power of
# two in E4M3.
BF16_TOLERANCE = 1e-2 if INTERPRETED else 4e-3
E4M3_TOLERANCE = 0.1 if INTERPRETED else 5e-3
# Rows, width: odd, and full size where a GPU computes them.
SIZES = [(1, 16), (7, 160), (13, 3072)] + ([] if INTERPRETED else [(8449, 3072), (257, 12288)])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def random(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return (spread * torch.randn(*shape, device=DEVICE)).bfloat16()


def slots_of(rows: int) -> torch.Tensor:
    """A permutation with holes: every third row has no place."""
    slots = torch.randperm(rows, device=DEVICE).int()
    slots[torch.arange(rows, device=DEVICE) % 3 == 1] = -1
    return slots


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = BF16_TOLERANCE) -> None:
    """By the norm of the difference; not finite is never close."""
    error = (result.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6)
    assert error < tolerance, f"relative error {error}"


def same_rows(
    result: tuple[torch.Tensor, torch.Tensor | None],
    expected: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """Quantized rows: a value at the border between two codes may fall to either side."""
    assert result[1] is not None and expected[1] is not None
    torch.testing.assert_close(result[1], expected[1], rtol=BF16_TOLERANCE, atol=0)
    wide = [values.float() * scales[:, None] for values, scales in (result, expected)]
    close(wide[0], wide[1], E4M3_TOLERANCE)


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("gelu", [False, True])
def test_quantize_rows(rows: int, width: int, gelu: bool) -> None:
    x = random(rows, width, spread=3)
    same_rows(quantize_rows(x, gelu), reference.quantize_rows(x, gelu))


def test_quantize_rows_of_noughts_and_of_large_values() -> None:
    x = random(3, 48)
    x[0] = 0
    x[1] *= 1e30
    same_rows(quantize_rows(x), reference.quantize_rows(x))


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_quantize_rows_gathers(rows: int, width: int) -> None:
    x, slots = random(rows, width), slots_of(rows)
    values, scales = quantize_rows(x, slots=slots)
    same_rows((values, scales), reference.quantize_rows(x, slots=slots))
    assert not values[slots < 0].float().any()


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_norm_modulate(rows: int, width: int, fp8: bool, add: bool) -> None:
    x = random(rows, width, spread=5) + 3
    y = random(rows, width) if add else None
    table = random(3, 6 * width)
    index = (torch.randint(0, 3, (rows,), device=DEVICE) * 6 * width).int()
    where = (5 * width, 0, 2 * width)  # gate, shift, scale
    expected_x = x.clone()
    expected = reference.norm_modulate(expected_x, y, table, index, *where, fp8)
    result = norm_modulate(x, y, table, index, *where, fp8)
    close(x, expected_x)
    if fp8:
        same_rows(result, expected)
    else:
        close(result[0], expected[0])


@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 1, 16), (11, 4, 40), (37, 9, 128)])
def test_place_heads(rows: int, heads: int, size: int) -> None:
    qkv, norms = random(rows, 3 * heads * size), random(2, 2, size)
    angles = 100 * torch.randn(rows, size // 2, device=DEVICE)
    slots, text = slots_of(rows), rows // 2
    inputs = (qkv, norms, angles.cos(), angles.sin(), slots, text)
    taken = slots[slots >= 0].long()
    for result, expected in zip(place_heads(*inputs), reference.place_heads(*inputs), strict=True):
        assert result.shape == expected.shape == (rows, heads, size)
        close(result[taken], expected[taken])


def test_place_heads_in_e4m3() -> None:
    qkv, norms = random(11, 3 * 4 * 40), random(2, 2, 40)
    angles = torch.randn(11, 20, device=DEVICE)
    slots = torch.randperm(11, device=DEVICE).int()
    scale = torch.tensor([30.0], device=DEVICE)
    inputs = (qkv, norms, angles.cos(), angles.sin(), slots, 5, scale)
    for result, expected in zip(place_heads(*inputs), reference.place_heads(*inputs), strict=True):
        assert result.dtype == expected.dtype == torch.float8_e4m3fn
        close(result, expected, 0.2 if INTERPRETED else 0.01)


# Rows, features, length of the sums: odd, and full size where a GPU computes them.
PRODUCTS = [(1, 16, 32), (7, 160, 96), (70, 200, 400), (33, 48, 1040)] + (
    [] if INTERPRETED else [(16, 3072, 12288), (160, 3072, 12288), (256, 3072, 12288)]
)


@pytest.mark.parametrize(("rows", "features", "length"), PRODUCTS)
@pytest.mark.parametrize("biased", [False, True])
def test_scaled_mm(rows: int, features: int, length: int, biased: bool) -> None:
    x, weight = (random(n, length).to(torch.float8_e4m3fn) for n in (rows, features))
    scales = [torch.rand(n, device=DEVICE) + 0.1 for n in (rows, features)]
    bias = random(features, spread=10) if biased else None
    inputs = (x, scales[0], weight, scales[1], bias)
    out, again, expected = (random(rows, features) * torch.nan for _ in range(3))
    reference.scaled_mm(*inputs, expected)
    scaled_mm(*inputs, out)
    scaled_mm(*inputs, again)  # the first one has left its counters as it found them
    close(out, expected, 1e-2)
    assert torch.equal(out, again)


def test_the_dit_warms_every_tile_up() -> None:
    assert [tokens / ROWS for tokens in WARM_UP] == [i + 1 for i in range(len(TILES))]


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 24, 5, 7), (1, 96, 33, 31), (1, 384, 9, 8)])
@pytest.mark.parametrize("silu", [False, True])
def test_norm_silu(shape: tuple[int, ...], silu: bool) -> None:
    x, gamma = random(*shape, spread=4), random(shape[1])
    x = x.contiguous(memory_format=torch.channels_last)
    close(norm_silu(x, gamma, silu), reference.norm_silu(x, gamma, silu))
