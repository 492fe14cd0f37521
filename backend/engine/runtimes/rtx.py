"""TensorRT-RTX: `model.rtx`, built for one architecture of GPU, and its description `model.json`.

Parameters of the model's configuration:

- `runtime_cache`: the file that keeps the kernels compiled for this GPU from one start to the
  next, relative to the engine's folder (default `model.cache`, if the folder can be written);
- `cuda_graphs`: `true` (default) captures every shape's run once and replays it, `false` does not;
- `weights_on_gpu_mib`: how much of the weights stays on the GPU, in MiB, the rest being streamed
  from the host in every run; for engines that were built for it (default: all).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from runtimes import EngineError, TensorSpec

# Triton's names → torch's.
_DTYPES: dict[str, torch.dtype] = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}
# What is read of a description.
_FIELDS: dict[str, type] = {
    "bytes": int,
    "library": str,
    "version": str,
    "target": str,
    "made_from": dict,
    "weight_streaming": bool,
    "inputs": dict,
    "outputs": dict,
    "profiles": list,
}
Shapes = Mapping[str, Sequence[int]]
# The optimization profiles: for every input the bounds `min`, `opt` and `max` of its shape.
Profiles = Sequence[Mapping[str, Mapping[str, Sequence[int]]]]


class Runtime:
    """One engine on one GPU, with one stream and its own device memory."""

    def __init__(self, artifact: Path, parameters: Mapping[str, str], gpu: int = 0) -> None:
        """
        Args:
            artifact: `model.rtx`, with `model.json` beside it.
            gpu: its number.

        Raises:
            EngineError: the engine is not this library's or this GPU's, or cannot be loaded.
        """
        description = read_description(artifact)
        self.inputs = tensor_specs(description["inputs"])
        self.outputs = tensor_specs(description["outputs"])
        self._profiles: Profiles = description["profiles"]
        self._cache_path = cache_path(artifact, parameters)
        graphs = parameters.get("cuda_graphs", "true")
        if graphs not in ("true", "false"):
            raise EngineError(f"the parameter cuda_graphs is {graphs!r}; it must be true or false")
        budget = weight_budget(description, parameters)

        try:
            trt = importlib.import_module("tensorrt_rtx")
        except (ImportError, OSError) as error:
            version = description["version"]
            raise EngineError(
                f"{artifact.name} needs TensorRT-RTX {version}, which is not installed ({error}): "
                f"`pip install tensorrt-rtx=={version}`"
            ) from None
        check_fit(artifact, description, trt.__version__, find_gpu(gpu))
        self.device = f"cuda:{gpu}"
        torch.cuda.set_device(gpu)

        self._log = _log(trt)
        self._runtime = trt.Runtime(self._log)
        with artifact.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        validity, diagnostics = self._runtime.get_engine_validity(data)
        if validity == trt.EngineValidity.INVALID:
            reasons = names_of(trt.EngineInvalidityDiagnostics, diagnostics)
            raise EngineError(f"{artifact.name} cannot run here: {reasons or self._log.last_error}")
        self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise EngineError(f"{artifact.name} cannot be loaded: {self._log.last_error}")
        if budget is not None:
            self._engine.weight_streaming_budget_v2 = budget
        config = self._engine.create_runtime_config()
        if graphs == "true":
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        self._cache = config.create_runtime_cache()
        if self._cache_path.is_file():
            self._cache.deserialize(self._cache_path.read_bytes())  # left empty if it is another's
        config.set_runtime_cache(self._cache)
        self._context = self._engine.create_execution_context(config)
        if self._context is None:
            raise EngineError(f"{artifact.name} cannot be started: {self._log.last_error}")
        self._stream = torch.cuda.Stream()
        self._buffers: dict[str, torch.Tensor] = {}  # on the GPU, bytes
        self._save_cache()

    def run(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Computes one batch; takes tensors in any memory, returns new ones on the GPU.

        Raises:
            EngineError: no profile holds the shapes, or the GPU failed or ran out of memory.
        """
        profile = choose_profile(self._profiles, {name: x.shape for name, x in batch.items()})
        try:
            with torch.cuda.stream(self._stream):
                outputs = self._enqueue(profile, batch)
            self._stream.synchronize()
        except RuntimeError as error:  # torch's, out of memory among them, and TensorRT's
            raise EngineError(f"the engine failed: {' '.join(str(error).split())}") from None
        return outputs

    def close(self) -> None:
        """Keeps the kernels that were compiled since the start."""
        self._save_cache()

    def _enqueue(self, profile: int, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Puts copies and computation on the stream; the outputs are whole when it is done."""
        stream, context = self._stream.cuda_stream, self._context
        if context.active_optimization_profile != profile:
            self._succeeded(context.set_optimization_profile_async(profile, stream))
        for spec in self.inputs:
            tensor = batch[spec.name]
            self._succeeded(context.set_input_shape(spec.name, tuple(tensor.shape)))
            self._bind(spec, tuple(tensor.shape)).copy_(tensor, non_blocking=True)
        if context.infer_shapes():
            raise RuntimeError(f"not every shape is known: {self._log.last_error}")
        results = {
            spec.name: self._bind(spec, tuple(context.get_tensor_shape(spec.name)))
            for spec in self.outputs
        }
        self._succeeded(context.execute_async_v3(stream))
        # The engine's own memory is written again in the next run.
        return {name: result.clone() for name, result in results.items()}

    def _bind(self, spec: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the engine's own memory for a tensor, in this shape, grown if need be.

        Addresses change only then, so that captured graphs stay valid.
        """
        dtype = _DTYPES[spec.dtype]
        size = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(spec.name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._buffers[spec.name] = buffer
        self._succeeded(self._context.set_tensor_address(spec.name, buffer.data_ptr()))
        return buffer[:size].view(dtype).view(shape)

    def _succeeded(self, success: bool) -> None:
        if not success:
            raise RuntimeError(self._log.last_error)

    def _save_cache(self) -> None:
        partial = self._cache_path.with_name(f".{self._cache_path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # such as a repository that is mounted read-only
            try:
                partial.write_bytes(self._cache.serialize())
                partial.replace(self._cache_path)
            finally:
                partial.unlink(missing_ok=True)


def read_description(artifact: Path) -> dict[str, Any]:
    """Returns what the build wrote beside the engine.

    Raises:
        EngineError: there is no such file, or it is not this engine's.
    """
    path = artifact.with_suffix(".json")
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(
            f"{path.name}, the description of {artifact.name}, cannot be read "
            f"({type(error).__name__}: {error}): run 'make export'"
        ) from None
    if not _is_sound(description):
        raise EngineError(f"{path.name} does not describe {artifact.name}: run 'make export'")
    size = description["bytes"]
    if size != artifact.stat().st_size:
        raise EngineError(
            f"{artifact.name} has {artifact.stat().st_size} bytes, and {path.name} describes one "
            f"of {size}: run 'make export'"
        )
    return description


def _is_sound(description: Any) -> bool:
    """Whether the fields that are read are there and of their types."""
    if not isinstance(description, dict) or not all(
        isinstance(description.get(name), wanted) for name, wanted in _FIELDS.items()
    ):
        return False
    inputs, outputs = description["inputs"], description["outputs"]
    return (
        isinstance(description["made_from"].get("checkpoint"), str | None)
        and all(
            isinstance(tensor, dict) and isinstance(tensor.get("dtype"), str)
            for tensor in (*inputs.values(), *outputs.values())
        )
        and all(
            isinstance(profile, dict)
            and profile.keys() == inputs.keys()
            and all(_are_bounds(bounds) for bounds in profile.values())
            for profile in description["profiles"]
        )
    )


def _are_bounds(bounds: Any) -> bool:
    return isinstance(bounds, dict) and all(
        isinstance(bounds.get(name), list) and all(isinstance(size, int) for size in bounds[name])
        for name in ("min", "max")
    )


def tensor_specs(tensors: Mapping[str, Mapping[str, Any]]) -> list[TensorSpec]:
    """Returns an engine's inputs or outputs.

    Raises:
        EngineError: a data type that does not pass through Triton.
    """
    for name, tensor in tensors.items():
        if tensor["dtype"] not in _DTYPES:
            raise EngineError(
                f"{name} is {tensor['dtype']}, which does not pass through Triton: build the "
                f"engine with {', '.join(_DTYPES)} at its borders"
            )
    return [TensorSpec(name, tensor["dtype"]) for name, tensor in tensors.items()]


def find_gpu(number: int) -> tuple[str, str] | None:
    """Returns a GPU's name and its architecture, such as `sm120`; None if there is none."""
    if number >= torch.cuda.device_count():
        return None
    major, minor = torch.cuda.get_device_capability(number)
    return torch.cuda.get_device_name(number), f"sm{major}{minor}"


def check_fit(
    artifact: Path,
    description: Mapping[str, Any],
    version: str,
    gpu: tuple[str, str] | None,
) -> None:
    """Compares the engine with what is here: library, GPU, and the repository's checkpoint.

    Args:
        version: of the TensorRT-RTX that is installed.
        gpu: name and architecture, None if there is none.

    Raises:
        EngineError: names both sides.
    """
    built_by = (description["library"], description["version"])
    if built_by != ("tensorrt_rtx", version):
        raise EngineError(
            f"{artifact.name} was built by {' '.join(built_by)}, and here is tensorrt_rtx "
            f"{version}: run 'make export', or install that version"
        )
    target = description["target"]
    if gpu is None:
        raise EngineError(
            f"{artifact.name} was built for {target}, and torch finds no GPU here: start the "
            "server where there is one, in a container with `--gpus all`"
        )
    name, sm = gpu
    if sm != target:
        raise EngineError(
            f"{artifact.name} was built for {target}, and the GPU here, {name}, is {sm}: run "
            f"'make export' with a profile for {sm}"
        )
    made_from = description["made_from"].get("checkpoint")
    served = _served_checkpoint(artifact)
    if made_from and served and made_from != served:
        raise EngineError(
            f"{artifact.name} was made from the checkpoint {made_from[:12]}, and this repository "
            f"is of {served[:12]}: run 'make export'"
        )


def cache_path(artifact: Path, parameters: Mapping[str, str]) -> Path:
    """Returns the file of the runtime cache.

    Raises:
        EngineError: a configured one cannot be written.
    """
    path = artifact.parent / parameters.get("runtime_cache", "model.cache")
    if "runtime_cache" in parameters and not os.access(path.parent, os.W_OK):
        raise EngineError(
            f"the parameter runtime_cache is {str(path)!r}, and its folder cannot be written"
        )
    return path


def weight_budget(description: Mapping[str, Any], parameters: Mapping[str, str]) -> int | None:
    """Returns how many bytes of the weights stay on the GPU, None for all.

    Raises:
        EngineError: it is no number, or the engine cannot stream its weights.
    """
    budget = parameters.get("weights_on_gpu_mib")
    if budget is None:
        return None
    if not budget.strip().isdecimal():
        raise EngineError(
            f"the parameter weights_on_gpu_mib is {budget!r}; it must be a whole number"
        )
    if not description["weight_streaming"]:
        raise EngineError(
            "the parameter weights_on_gpu_mib is set, but the engine was built without weight "
            "streaming"
        )
    return int(budget) * 1024**2


def choose_profile(profiles: Profiles, shapes: Shapes) -> int:
    """Returns the first of the profiles that holds the shapes of all inputs.

    Raises:
        EngineError: none does; gives the shapes and what they may be.
    """
    for number, profile in enumerate(profiles):
        if all(_holds(profile[name], shape) for name, shape in shapes.items()):
            return number
    # Those that fit no profile at all; if each fits some, they do not fit together.
    wrong = [
        name
        for name, shape in shapes.items()
        if not any(_holds(profile[name], shape) for profile in profiles)
    ]
    named = wrong or list(shapes)
    actual = ", ".join(f"{name} {list(shapes[name])}" for name in named)
    allowed = " or ".join(
        ", ".join(
            f"{name} {list(profile[name]['min'])} to {list(profile[name]['max'])}" for name in named
        )
        for profile in profiles
    )
    raise EngineError(f"the engine does not take {actual}; it takes {allowed}")


def _holds(bounds: Mapping[str, Sequence[int]], shape: Sequence[int]) -> bool:
    return len(shape) == len(bounds["min"]) and all(
        low <= size <= high
        for low, size, high in zip(bounds["min"], shape, bounds["max"], strict=True)
    )


def _served_checkpoint(artifact: Path) -> str | None:
    """Returns the fingerprint of the checkpoint that the repository around the engine is of."""
    try:  # model_repository/<model>/<version>/model.rtx
        path = artifact.parents[2] / "checkpoint.json"
        checkpoint = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, IndexError):
        return None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path} is no JSON ({error}): run 'make export'") from None
    fingerprint = checkpoint.get("fingerprint") if isinstance(checkpoint, dict) else None
    if not isinstance(fingerprint, str):
        raise EngineError(f"{path} has no fingerprint of a checkpoint: run 'make export'")
    return fingerprint


def names_of(flags: Any, value: int) -> str:
    """Returns in words which of an enumeration's flags are set, such as `old cuda driver`."""
    return ", ".join(
        name.replace("_", " ").lower()
        for name, flag in flags.__members__.items()
        if value & flag.value
    )


@functools.cache
def _log(trt: Any) -> Any:
    """Returns the library's ILogger: there is one, as it ignores a second while the first lives."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last_error = "TensorRT-RTX gives no reason"

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.last_error = " ".join(msg.split())

    return Log()
