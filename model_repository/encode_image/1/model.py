"""Triton model `encode_image`: pixels → picture files, and the request's metadata made complete."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from image_files import encode

# The same as in `denoise`, whose histogram this one joins.
_STAGE_BUCKETS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        # The families must stay referenced: a metric whose family is gone raises.
        self._requests_total = pb_utils.MetricFamily(
            name="qwen_image_requests_total",
            description="Requests by their outcome",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._stage_seconds = pb_utils.MetricFamily(
            name="qwen_image_stage_seconds",
            description="Time of a stage of a request",
            kind=pb_utils.MetricFamily.HISTOGRAM,
        )
        self._outcomes = {
            outcome: self._requests_total.Metric(labels={"outcome": outcome})
            for outcome in ("ok", "error")
        }
        self._stages = {
            stage: self._stage_seconds.Metric(labels={"stage": stage}, buckets=_STAGE_BUCKETS)
            for stage in ("decode", "pack")
        }

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        started = time.monotonic()
        try:
            pixels = pb_utils.get_input_tensor_by_name(request, "pixels").as_numpy()
            record = json.loads(_text(request, "record"))
            output_format = _text(request, "output_format")
            response_format = _text(request, "response_format")
            images = [encode(image, output_format, response_format) for image in pixels]
            # Decoding counts from the end of denoising, so that it holds the decoder's queue.
            seconds = {
                "decode": started - record.pop("denoised_at"),
                "pack": time.monotonic() - started,
            }
            record["stages_ms"] |= {stage: round(v * 1000, 3) for stage, v in seconds.items()}
            record["output_format"] = output_format
        except Exception as error:
            self._outcomes["error"].increment(1)
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"encode_image failed: {error!r}")
            )
        for stage, value in seconds.items():
            self._stages[stage].observe(value)
        self._outcomes["ok"].increment(1)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("generated_image", np.array(images, np.object_)),
                pb_utils.Tensor("metadata", np.array([json.dumps(record).encode()], np.object_)),
            ]
        )


def _text(request: Any, name: str) -> str:
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0].decode()
