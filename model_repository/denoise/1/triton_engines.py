"""The engines of a generation, called through Triton (BLS)."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from generation import Cancelled, GenerationError, InvalidGeneration, Unavailable
from generator import Conditioning, Modulation, Placement

# What Triton puts before an engine's own words.
_TRITON_PREFIX = re.compile(
    r"^(Model \S+ - Error when running inference: )?(\[request id: [^\]]*\] )?"
)
# The id of the request on whose behalf the running coroutine calls engines; they log it. They do
# not get its trace: with one, concurrent calls crash the server (24.10).
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")


class TritonEngines:
    """Implements `generator.Engines`."""

    def __init__(self, max_modulation_rows: int, placement: Placement) -> None:
        """
        Args:
            max_modulation_rows: timesteps in one call of `modulation`.
            placement: where the engines are to leave their outputs.
        """
        self._max_modulation_rows = max_modulation_rows
        self._device = placement.device
        self._on_gpu = self._device.type == "cuda"
        self._memory = pb_utils.PreferredMemory(
            pb_utils.TRITONSERVER_MEMORY_GPU if self._on_gpu else pb_utils.TRITONSERVER_MEMORY_CPU,
            self._device.index or 0,
        )

    async def encode_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        (states,) = await self._call("text_encoder", {"input_ids": input_ids}, ["hidden_states"])
        return states

    async def modulate(self, timesteps: torch.Tensor) -> list[Modulation]:
        modulations: list[Modulation] = []
        for rows in timesteps[:, None].split(self._max_modulation_rows):
            block, final = await self._call(
                "modulation", {"timestep": rows}, ["block_modulation", "final_modulation"]
            )
            modulations += [Modulation(b, f) for b, f in zip(block, final, strict=True)]
        return modulations

    async def predict_noise(
        self, hidden_states: torch.Tensor, conditioning: Conditioning, modulation: Modulation
    ) -> torch.Tensor:
        rows = hidden_states.shape[0]
        (noise_pred,) = await self._call(
            "dit",
            {
                "hidden_states": hidden_states,
                "encoder_hidden_states": conditioning.encoder_hidden_states,
                "text_mask": conditioning.text_mask,
                "position_ids": conditioning.position_ids,
                "block_modulation": modulation.block.expand(rows, -1, -1, -1),
                "final_modulation": modulation.final.expand(rows, -1),
            },
            ["noise_pred"],
        )
        return noise_pred

    async def _call(
        self, model: str, inputs: dict[str, torch.Tensor], outputs: list[str]
    ) -> list[torch.Tensor]:
        request = pb_utils.InferenceRequest(
            model_name=model,
            request_id=current_request_id.get(),
            inputs=[_to_triton(name, tensor) for name, tensor in inputs.items()],
            requested_output_names=outputs,
            preferred_memory=self._memory,
        )
        self._finish()  # another process reads the tensors
        try:
            response = await request.async_exec()
        except pb_utils.TritonModelException as error:
            raise _failure(model, None, str(error)) from None
        if response.has_error():
            failure = response.error()
            raise _failure(model, failure.code(), failure.message())
        tensors = [pb_utils.get_output_tensor_by_name(response, name) for name in outputs]
        # They are views of the response's memory, which goes with it: copy.
        copies = [torch.from_dlpack(tensor.to_dlpack()).clone() for tensor in tensors]
        self._finish()  # another response may get that memory
        return copies

    def _finish(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()


def _to_triton(name: str, tensor: torch.Tensor) -> Any:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bool:  # which DLPack has not in every version
        return pb_utils.Tensor(name, tensor.numpy())
    return pb_utils.Tensor.from_dlpack(name, torch.utils.dlpack.to_dlpack(tensor))


def _failure(model: str, code: Any, message: str) -> GenerationError:
    """Says in one line which engine failed, in the class that a client can act on."""
    line = _TRITON_PREFIX.sub("", " ".join(message.split()))
    if code == pb_utils.TritonError.UNAVAILABLE or "not ready" in line or "is stopped" in line:
        return Unavailable(f"the server is shutting down or {model!r} is not ready: {line}")
    if code == pb_utils.TritonError.CANCELLED:
        return Cancelled(line)
    if code == pb_utils.TritonError.INVALID_ARG:
        return InvalidGeneration(f"{model!r} refused its inputs: {line}")
    return GenerationError(f"{model!r} failed: {line}")
