"""A baseline that skips steps: the stock module with cache-dit's DBCache.

Where the first blocks change a step's residual by little against the last step computed, DBCache
adds the rest of that step's residual again instead of computing the other blocks.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import cache_dit
import torch
from torch import Tensor, nn

from bench.common import Stopwatch

STEPS = 50
SETTINGS: dict[str, dict[str, Any]] = {
    "by its defaults": {},
    "every second step skipped": {
        "residual_diff_threshold": float("inf"),
        "max_continuous_cached_steps": 1,
    },
}


def measure(
    stock: nn.Module, step: Callable[[Tensor, float], Tensor], latents: Tensor
) -> dict[str, Any]:
    """Seconds of a picture's steps by each of `SETTINGS`, and how far its latents are off.

    Args:
        stock: diffusers' transformer; its hooks are removed in the end.
        step: (latents [B, L, 64], sigma) → the velocity that `stock` predicts.
        latents: noise, [B, L, 64].
    """
    adapter = cache_dit.BlockAdapter(
        transformer=stock,
        blocks=stock.transformer_blocks,
        forward_pattern=cache_dit.ForwardPattern.Pattern_1,
        has_separate_cfg=False,  # both predictions of a guided step are one batch
    )
    step(latents, 1.0)  # warm-up
    expected, times = picture(step, latents)
    result: dict[str, Any] = {"nothing skipped": {"s": round(sum(times), 3)}}
    for name, options in SETTINGS.items():
        config = cache_dit.DBCacheConfig(num_inference_steps=STEPS, **options)
        cache_dit.enable_cache(adapter, cache_config=config)
        found, times = picture(step, latents)
        skipped = cache_dit.summary(stock, logging=False)[0].cached_steps
        cache_dit.disable_cache(adapter)
        computed = set(range(STEPS)).difference(skipped)
        result[name] = {
            "s": round(sum(times), 3),
            "steps_skipped": len(skipped),
            "computed_step_ms": median_step_ms(times, computed),
            "skipped_step_ms": median_step_ms(times, skipped) if skipped else None,
            "relative_difference": round(float((found - expected).norm() / expected.norm()), 4),
        }
    return result


def picture(step: Callable[[Tensor, float], Tensor], latents: Tensor) -> tuple[Tensor, list[float]]:
    """The last latents, FP32, and the seconds of each step."""
    sigmas = torch.linspace(1, 0, STEPS + 1).tolist()
    times = []
    x = latents.float()
    for sigma, following in itertools.pairwise(sigmas):
        watch = Stopwatch()
        x = x + (following - sigma) * step(x.to(latents.dtype), sigma).float()
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(watch.seconds())
    return x, times


def median_step_ms(times: list[float], steps: Iterable[int]) -> float:
    return round(statistics.median(times[i] for i in steps) * 1e3, 2)
