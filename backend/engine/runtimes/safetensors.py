"""Torch and fused kernels on Hopper GPUs: `model.safetensors`; the forward passes are in `hopper/`.

Parameters of the model's configuration:

- `device`: `cuda` (default), or `cpu`, where the same arithmetic runs in plain torch and slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hopper.dit import Dit
from hopper.modulation import Modulation
from hopper.text_encoder import TextEncoder
from hopper.vae_decoder import VaeDecoder
from hopper.weights import load
from runtimes import EngineError

_ENGINES: dict[str, Any] = {
    "text_encoder": TextEncoder,
    "modulation": Modulation,
    "dit": Dit,
    "vae_decoder": VaeDecoder,
}
_DTYPES = {
    "FP32": torch.float32,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}


class Runtime:
    """One engine on the first GPU; takes and returns tensors of torch, on its device."""

    def __init__(self, artifact: Path, parameters: Mapping[str, str]) -> None:
        """
        Args:
            artifact: `model.safetensors`, as `export.packed` writes it.

        Raises:
            EngineError: there is no GPU that can run it, or the file cannot be loaded.
        """
        self._device = choose_device(parameters.get("device", "cuda"), artifact.name)
        weights, description = load(artifact, self._device)
        self.inputs: dict[str, torch.dtype] = _dtypes(description["inputs"])
        self.outputs: dict[str, torch.dtype] = _dtypes(description["outputs"])
        self._engine = _ENGINES[description["engine"]](weights, description["config"])

    @torch.inference_mode()
    def run(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Computes one batch; tensors elsewhere are brought to the engine's device.

        Raises:
            EngineError: the GPU failed or ran out of memory.
        """
        given = [batch[name].to(self._device, dtype) for name, dtype in self.inputs.items()]
        try:
            result = self._engine(*given)
        except RuntimeError as error:  # torch's, out of memory among them
            raise EngineError(f"the engine failed: {' '.join(str(error).split())}") from None
        results = result if isinstance(result, tuple) else (result,)
        return dict(zip(self.outputs, results, strict=True))

    def close(self) -> None:
        """Nothing is kept."""


def choose_device(name: str, artifact: str) -> torch.device:
    """Returns the device that the parameter names.

    Raises:
        EngineError: there is none of this name, or its GPU has no FP8.
    """
    if name not in ("cuda", "cpu"):
        raise EngineError(f"the parameter device is {name!r}; it must be cuda or cpu")
    if name == "cuda":
        if not torch.cuda.is_available():
            raise EngineError(
                f"{artifact} needs a GPU, and torch finds none here: start the server where there "
                "is one, in a container with `--gpus all`"
            )
        capability = torch.cuda.get_device_capability()
        if capability < (9, 0):
            raise EngineError(
                f"{artifact} is for Hopper (SM90) and later, and the GPU here, "
                f"{torch.cuda.get_device_name()}, is SM{capability[0]}{capability[1]}: run "
                "'make export' with a profile for it"
            )
    return torch.device(name)


def _dtypes(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.dtype]:
    return {name: _DTYPES[tensor["dtype"]] for name, tensor in tensors.items()}
