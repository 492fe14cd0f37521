"""Torch and fused kernels on Hopper GPUs: `model.safetensors`; the forward passes are in `hopper/`.

Parameters of the model's configuration:

- `device`: `cuda` (default), or `cpu`, where the same arithmetic runs in plain torch and slowly.
- `weights`: `device` (default), or `host`: they stay in the host's memory, page-locked, and cross
  over in every call. Only for `modulation`, which is called once a schedule.
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
from runtimes import EngineError, TensorSpec

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
# Inputs that engines take in the host's memory: the lengths of texts decide what is launched, the
# embeddings are looked up there.
_ON_HOST = frozenset({"text_mask", "input_ids"})


class Runtime:
    """One engine on one GPU."""

    def __init__(self, artifact: Path, parameters: Mapping[str, str], gpu: int = 0) -> None:
        """
        Args:
            artifact: `model.safetensors`, as `export.packed` writes it.
            gpu: its number.

        Raises:
            EngineError: there is no GPU that can run it, or the file cannot be loaded.
        """
        on_host = stay_on_host(parameters.get("weights", "device"))
        try:
            device = choose_device(parameters.get("device", "cuda"), gpu, artifact.name)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            place = torch.device("cpu") if on_host else device
            weights, description = load(artifact, place, on_host and device.type == "cuda")
            if on_host and description["engine"] != "modulation":
                raise EngineError(
                    "the parameter weights is 'host', which is for modulation alone; "
                    f"{artifact.name} is of {description['engine']}"
                )
            self.inputs, self.outputs = (
                [TensorSpec(name, tensor["dtype"]) for name, tensor in description[border].items()]
                for border in ("inputs", "outputs")
            )
            self._shapes = {name: each["shape"] for name, each in description["inputs"].items()}
            self._engine = _ENGINES[description["engine"]](weights, description["config"])
            with torch.inference_mode():
                self._engine.warm_up(device)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # what the small calls needed, other processes may use
        except RuntimeError as error:  # torch's, out of memory among them
            raise EngineError(f"{artifact.name} cannot be started: {one_line(error)}") from None
        except KeyError as error:
            raise EngineError(f"{artifact.name} lacks {error.args[0]}: run 'make export'") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"{artifact.name} is none of this version ({one_line(error)}): run 'make export'"
            ) from None
        self.device = str(device)

    @torch.inference_mode()
    def run(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Computes one batch; takes tensors in any memory, returns new ones on the device.

        Raises:
            EngineError: the inputs do not fit, the GPU failed or ran out of memory.
        """
        check_shapes(batch, self._shapes)
        try:
            given = [
                batch[spec.name].to(
                    "cpu" if spec.name in _ON_HOST else self.device, _DTYPES[spec.dtype]
                )
                for spec in self.inputs
            ]
            result = self._engine(*given)
            if self.device != "cpu":
                torch.cuda.synchronize()
        except EngineError:
            raise
        except Exception as error:  # whatever it is, it must end this batch alone
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
            raise EngineError(f"the engine failed on {shapes}: {one_line(error)}") from None
        results = result if isinstance(result, tuple) else (result,)
        return {
            spec.name: tensor.contiguous()
            for spec, tensor in zip(self.outputs, results, strict=True)
        }

    def close(self) -> None:
        """Nothing is kept."""


def check_shapes(batch: Mapping[str, torch.Tensor], shapes: Mapping[str, list[int]]) -> None:
    """Compares a batch with the shapes of the file's description; in them −1 is any size from 1.

    Raises:
        EngineError: an input has another shape, or not as many rows as the others.
    """
    rows = len(batch[next(iter(shapes))])
    for name, shape in shapes.items():
        found, wanted = list(batch[name].shape), [rows, *shape[1:]]
        if len(found) != len(wanted) or any(
            size != expected if expected >= 0 else size < 1
            for size, expected in zip(found, wanted, strict=True)
        ):
            raise EngineError(
                f"{name} has the shape {found}; it must be {wanted}, where -1 is any size from 1"
            )


def choose_device(name: str, gpu: int, artifact: str) -> torch.device:
    """Returns the device that the parameter names.

    Raises:
        EngineError: there is none of this name, or its GPU has no FP8.
    """
    if name not in ("cuda", "cpu"):
        raise EngineError(f"the parameter device is {name!r}; it must be cuda or cpu")
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise EngineError(
            f"{artifact} needs a GPU, and torch finds none here: start the server where there is "
            "one, in a container with `--gpus all`"
        )
    capability = torch.cuda.get_device_capability(gpu)
    if capability != (9, 0):
        raise EngineError(
            f"{artifact} is for Hopper (SM90), and the GPU here, {torch.cuda.get_device_name(gpu)}"
            f", is SM{capability[0]}{capability[1]}: run 'make export' with a profile for it"
        )
    return torch.device(name, gpu)


def stay_on_host(weights: str) -> bool:
    """Raises EngineError if the parameter is wrong."""
    if weights not in ("device", "host"):
        raise EngineError(f"the parameter weights is {weights!r}; it must be device or host")
    return weights == "host"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
