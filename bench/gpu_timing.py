"""Times of work on a GPU: medians between CUDA events, warm-up apart; time by kernel."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PACKAGES = ("torch", "triton", "diffusers", "transformers", "fa3-fwd", "nvidia-pytriton")


def gpu_machine() -> dict[str, Any]:
    """The first GPU and what is around it; ends the program if there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a CUDA GPU, and torch finds none here")
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
    }


def median_ms(work: Callable[[], Any], repeats: int = 10, warm_up: int = 3) -> float:
    """One call's milliseconds, as they are when one call follows another."""
    for _ in range(warm_up):
        work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median(start.elapsed_time(end) for start, end in events), 3)


def kernel_times(work: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of one call by kind of kernel, their sum, and what passed from first to last."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(kind_of(event.name), []).append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    total = sum(sum(times) for times in kernels.values())
    return {
        "kernels": [
            {
                "kernel": kind,
                "calls": len(times),
                "ms": round(sum(times) / 1e3, 3),
                "share": round(sum(times) / total, 4),
            }
            for kind, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))
        ],
        "sum_ms": round(total / 1e3, 3),
        "span_ms": round(
            (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e3, 3
        ),
    }


def kind_of(kernel: str) -> str:
    """What a kernel's name says that it does."""
    kinds = {
        r"^nvjet.*qqtst": "FP8 matrix products",
        r"_scaled_mm": "FP8 matrix products of few rows",
        r"^nvjet|gemm|cutlass.*gemm": "BF16 matrix products",
        r"sdpa|flash|fmha": "attention",
        r"_norm_modulate": "residual, LayerNorm, modulation, quantization",
        r"_quantize_rows": "GELU and quantization of rows",
        r"_place_heads": "RMS norm and rotation of heads",
        r"gather|index": "gathering rows",
        r"Memset": "memset",
        r"Memcpy": "memcpy",
    }
    return next((kind for pattern, kind in kinds.items() if re.search(pattern, kernel)), "the rest")
