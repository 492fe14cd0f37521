"""The Prometheus metrics of `denoise`, as Triton custom metrics."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

# Seconds; from a cached encoder on a GPU to a full-size picture on a CPU.
_STAGE_BUCKETS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
_STAGES = ("queue", "encode", "modulation", "denoise")
_OUTCOMES = ("invalid", "unavailable", "cancelled", "error")


class _CacheMetrics:
    def __init__(self, families: dict[str, Any], cache: str) -> None:
        self._metrics = {
            name: families[name].Metric(labels={"cache": cache})
            for name in ("cache_hits_total", "cache_misses_total", "cache_evictions_total")
        }
        self._bytes = families["cache_bytes"].Metric(labels={"cache": cache})

    def hit(self, count: int) -> None:
        self._metrics["cache_hits_total"].increment(count)

    def miss(self, count: int) -> None:
        self._metrics["cache_misses_total"].increment(count)

    def evicted(self, count: int) -> None:
        self._metrics["cache_evictions_total"].increment(count)

    def set_bytes(self, size: int) -> None:
        self._bytes.set(size)


class TritonMetrics:
    """Implements `generator.Metrics`."""

    def __init__(self) -> None:
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        # The families must stay referenced: a metric whose family is gone raises.
        self._families = families = {
            name: pb_utils.MetricFamily(
                name=f"qwen_image_{name}", description=description, kind=kind
            )
            for name, description, kind in (
                ("requests_total", "Requests by their outcome", counter),
                ("stage_seconds", "Time of a stage of a request", pb_utils.MetricFamily.HISTOGRAM),
                ("steps_total", "Denoising steps", counter),
                ("in_flight", "Requests that are being denoised", gauge),
                ("queued", "Requests that wait for a place", gauge),
                ("cache_hits_total", "Lookups that found their value", counter),
                ("cache_misses_total", "Lookups that had to compute their value", counter),
                ("cache_evictions_total", "Values dropped for newer ones", counter),
                ("cache_bytes", "Bytes held by a cache", gauge),
            )
        }
        self.encoder_cache = _CacheMetrics(families, "encoder")
        self.modulation_cache = _CacheMetrics(families, "modulation")
        self._steps = families["steps_total"].Metric(labels={})
        self._in_flight = families["in_flight"].Metric(labels={})
        self._queued = families["queued"].Metric(labels={})
        self._outcomes = {
            outcome: families["requests_total"].Metric(labels={"outcome": outcome})
            for outcome in _OUTCOMES
        }
        self._stages = {
            stage: families["stage_seconds"].Metric(labels={"stage": stage}, buckets=_STAGE_BUCKETS)
            for stage in _STAGES
        }

    def outcome(self, outcome: str) -> None:
        self._outcomes[outcome].increment(1)

    def stage(self, name: str, seconds: float) -> None:
        self._stages[name].observe(seconds)

    def step(self) -> None:
        self._steps.increment(1)

    def load(self, in_flight: int, queued: int) -> None:
        self._in_flight.set(in_flight)
        self._queued.set(queued)
