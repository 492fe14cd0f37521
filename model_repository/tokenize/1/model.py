"""Triton model `tokenize`: judges a request's fields and turns its prompts into token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from generation_fields import (
    FIELDS,
    GenerationFields,
    InvalidRequest,
    Limits,
    judge,
    judge_parameters,
)
from prompt_tokenizer import PromptTokenizer


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = {
            name: value["string_value"]
            for name, value in json.loads(args["model_config"])["parameters"].items()
        }
        folder = Path(args["model_repository"])
        checkpoint = json.loads((folder.parent / "checkpoint.json").read_text(encoding="utf-8"))
        try:
            self._limits = Limits.from_parameters(parameters, checkpoint)
        except ValueError as error:
            raise pb_utils.TritonModelException(f"tokenize/config.pbtxt: {error}") from None
        self._tokenizer = PromptTokenizer(
            folder / args["model_version"] / "tokenizer.json",
            checkpoint["prompt_template"],
            checkpoint["prompt_template_dropped_tokens"],
            checkpoint["max_prompt_tokens"],
        )
        self._requests_total = pb_utils.MetricFamily(
            name="qwen_image_requests_total",
            description="Requests by their outcome",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._invalid_total = self._requests_total.Metric(labels={"outcome": "invalid"})

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            judge_parameters(json.loads(request.parameters() or "{}"))
            fields = judge(_raw_fields(request), self._limits)
            input_ids = self._tokenizer.encode("prompt", fields.prompt)
            negative_input_ids = self._tokenizer.encode("negative_prompt", fields.negative_prompt)
        except InvalidRequest as error:
            self._invalid_total.increment(1)
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            )
        tensors = {"input_ids": input_ids, "negative_input_ids": negative_input_ids}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in (tensors | _arrays(fields)).items()]
        )


def _raw_fields(request: Any) -> dict[str, bytes | int | float]:
    raw = {}
    for name in FIELDS:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is not None:
            raw[name] = tensor.as_numpy().reshape(-1)[0]
    return raw


def _arrays(fields: GenerationFields) -> dict[str, np.ndarray]:
    """The judged fields that later models read, each of shape [1]."""
    return {
        "num_inference_steps": np.array([fields.num_inference_steps], np.int32),
        "true_cfg_scale": np.array([fields.true_cfg_scale], np.float32),
        "height": np.array([fields.height], np.int32),
        "width": np.array([fields.width], np.int32),
        "seed": np.array([fields.seed], np.int64),
        "num_images_per_prompt": np.array([fields.num_images_per_prompt], np.int32),
        "output_format": np.array([fields.output_format.encode()], np.object_),
        "response_format": np.array([fields.response_format.encode()], np.object_),
    }
