"""Triton model `denoise`: runs every request as a coroutine on one event loop.

`execute` reads the inputs, hands a coroutine to the loop and returns; the coroutine sends the
request's single response. So requests overlap although the model is not decoupled, and Triton's
dynamic batcher on `dit` merges the steps of those in flight.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from generation import (
    Cancelled,
    Generation,
    GenerationError,
    InvalidGeneration,
    StopSignal,
    Unavailable,
)
from generator import Generator, Limits, Placement
from triton_engines import TritonEngines, current_request_id
from triton_metrics import TritonMetrics

_INPUTS = (
    "input_ids",
    "negative_input_ids",
    "num_inference_steps",
    "true_cfg_scale",
    "height",
    "width",
    "seed",
    "num_images_per_prompt",
)
# Names in pb_utils.TritonError, which Triton has not set up yet when it imports this module.
_CODES = {
    InvalidGeneration: "INVALID_ARG",
    Unavailable: "UNAVAILABLE",
    Cancelled: "CANCELLED",
}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = {
            name: value["string_value"]
            for name, value in json.loads(args["model_config"])["parameters"].items()
        }
        repository = Path(args["model_repository"]).parent
        self._checkpoint = json.loads((repository / "checkpoint.json").read_text(encoding="utf-8"))
        try:
            self._limits = Limits.from_parameters(parameters)
            placement = Placement.from_parameters(parameters)
        except ValueError as error:
            raise pb_utils.TritonModelException(f"denoise/config.pbtxt: {error}") from None
        self._metrics = TritonMetrics()
        self._versions = {"torch": torch.__version__, "diffusers": diffusers.__version__}
        engines = TritonEngines(self._limits.max_modulation_rows, placement)
        self._generator = Generator(
            self._checkpoint, engines, self._limits, self._metrics, placement
        )
        # Ids are the clients' and may repeat, hence a list.
        self._running: defaultdict[str, list[StopSignal]] = defaultdict(list)
        self._loop = asyncio.new_event_loop()
        # The engines do the work; this process only combines small tensors. Said in the loop's own
        # thread, since every thread of torch has its own count.
        self._loop.call_soon(torch.set_num_threads, 1)
        # `async_exec` occupies a thread a call, two at a time while a request encodes its prompts;
        # the default pool would cap the calls in flight at cores + 4.
        self._loop.set_default_executor(ThreadPoolExecutor(2 * self._limits.max_in_flight + 2))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            # Input tensors are gone once this method returns: read them now.
            tensors = {}
            for name in _INPUTS:
                tensor = pb_utils.get_input_tensor_by_name(request, name)
                if tensor is not None:
                    tensors[name] = tensor.as_numpy().copy()
            asyncio.run_coroutine_threadsafe(self._answer(request, tensors), self._loop)

    def finalize(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2)

    async def _answer(self, request: Any, tensors: dict[str, np.ndarray]) -> None:
        """Sends the one response of `request`, whatever happens."""
        current_request_id.set(request.request_id())
        try:
            parameters = json.loads(request.parameters() or "{}")
            if "cancel" in parameters:
                response = self._cancel(str(parameters["cancel"]))
            else:
                response = await self._generate(request, tensors, parameters)
        except GenerationError as error:
            self._metrics.outcome(error.outcome)
            code = getattr(pb_utils.TritonError, _CODES.get(type(error), "INTERNAL"))
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
        except Exception as error:
            self._metrics.outcome("error")
            pb_utils.Logger.log_error(f"denoise: {error!r}")
            response = pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"denoise failed: {error!r}")
            )
        request.get_response_sender().send(
            response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )

    def _cancel(self, request_id: str) -> Any:
        if not request_id:
            raise InvalidGeneration("cancel is empty; it must be the id of a request")
        signals = self._running.get(request_id, [])
        for stop in signals:
            stop.cancel()
        record = json.dumps({"cancelled": int(bool(signals))})
        return pb_utils.InferenceResponse([_bytes_tensor("record", record)])

    async def _generate(
        self, request: Any, tensors: dict[str, np.ndarray], parameters: dict[str, Any]
    ) -> Any:
        generation = Generation.from_tensors(
            tensors,
            size_multiple=self._checkpoint["size_multiple"],
            dropped_tokens=self._checkpoint["prompt_template_dropped_tokens"],
            max_prompt_tokens=self._checkpoint["max_prompt_tokens"],
            vocabulary=self._checkpoint["text_encoder"]["vocab_size"],
            request_id=request.request_id(),
        )
        stop = StopSignal(self._timeout_ms(request, parameters), request.is_cancelled)
        self._running[generation.request_id].append(stop)
        try:
            latents, record = await self._generator.generate(generation, stop)
        finally:
            self._running[generation.request_id].remove(stop)
            if not self._running[generation.request_id]:
                del self._running[generation.request_id]
        record["checkpoint"] = {
            "name": self._checkpoint["name"],
            "fingerprint": self._checkpoint["fingerprint"],
        }
        record["versions"] = self._versions
        record["denoised_at"] = time.monotonic()
        # Nothing but what was asked for: Triton 24.10 drops the rest without holding Python's lock
        # when it is sent late, and that ends the process.
        wanted = request.requested_output_names()
        outputs = [
            pb_utils.Tensor("latents", latents.numpy()),
            pb_utils.Tensor("seeds", np.array(generation.seeds, np.int64)),
            _bytes_tensor("record", json.dumps(record)),
        ]
        return pb_utils.InferenceResponse([each for each in outputs if each.name() in wanted])

    def _timeout_ms(self, request: Any, parameters: dict[str, Any]) -> int:
        """The request's own timeout (µs; from /generate it comes as a parameter) or the default."""
        sent = parameters.get("timeout", request.timeout())
        if type(sent) is not int or sent < 0:
            raise InvalidGeneration(
                f"timeout is {sent!r}; it must be a whole number of microseconds, "
                f"or 0 for the default of {self._limits.default_timeout_ms} ms"
            )
        return -(-sent // 1000) or self._limits.default_timeout_ms


def _bytes_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], np.object_))
