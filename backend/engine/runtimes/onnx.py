"""ONNX Runtime: `model.onnx`, on the CPU unless the configuration names other providers.

Parameters of the model's configuration:

- `providers`: comma-separated execution providers in the order of preference
  (default `CPUExecutionProvider`);
- `intra_op_num_threads`: threads of one operator (default 0: one a core).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

from runtimes import EngineError, TensorSpec

# ONNX Runtime's names → Triton's.
_DTYPES = {
    "tensor(float)": "FP32",
    "tensor(float16)": "FP16",
    "tensor(int64)": "INT64",
    "tensor(int32)": "INT32",
    "tensor(uint8)": "UINT8",
    "tensor(bool)": "BOOL",
}
# Providers that compute on a GPU, and take its number.
_ON_GPU = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")


class Runtime:
    """One ONNX Runtime session."""

    device = None

    def __init__(self, artifact: Path, parameters: Mapping[str, str], gpu: int = 0) -> None:
        """
        Args:
            artifact: `model.onnx`, its external data beside it.

        Raises:
            EngineError: an unknown provider, or a file that cannot be loaded.
        """
        wanted = [
            name.strip() for name in parameters.get("providers", "CPUExecutionProvider").split(",")
        ]
        available = onnxruntime.get_available_providers()
        for provider in wanted:
            if provider not in available:
                raise EngineError(
                    f"the execution provider {provider!r} is not available here; "
                    f"there are {', '.join(available)}"
                )
        options = onnxruntime.SessionOptions()
        threads = parameters.get("intra_op_num_threads", "0")
        if not threads.strip().isdecimal():
            raise EngineError(
                f"the parameter intra_op_num_threads is {threads!r}; it must be a whole number "
                "from 0 (one a core)"
            )
        options.intra_op_num_threads = int(threads)
        # Several engines share the cores, each in a process of its own: a thread that spins for
        # work takes them from the others.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Where only a layer's weights are INT8, its inputs are not rounded to INT8, too.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        # Shapes vary from call to call: a plan made for one of them does not fit the next.
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        providers = [(name, {"device_id": gpu} if name in _ON_GPU else {}) for name in wanted]
        try:
            self._session = onnxruntime.InferenceSession(str(artifact), options, providers)
        except Exception as error:
            raise EngineError(f"{artifact.name} cannot be loaded: {_one_line(error)}") from None
        self.inputs = [TensorSpec(n.name, _dtype(n)) for n in self._session.get_inputs()]
        self.outputs = [TensorSpec(n.name, _dtype(n)) for n in self._session.get_outputs()]

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Computes one batch.

        Raises:
            EngineError: the engine refused the shapes, or ran out of memory.
        """
        names = [spec.name for spec in self.outputs]
        try:
            return dict(zip(names, self._session.run(names, dict(batch)), strict=True))
        except Exception as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in batch.items())
            raise EngineError(f"the engine failed on {shapes}: {_one_line(error)}") from None

    def close(self) -> None:
        """The session has nothing to keep."""


def _dtype(node: onnxruntime.NodeArg) -> str:
    try:
        return _DTYPES[node.type]
    except KeyError:
        raise EngineError(f"{node.name} has the type {node.type}, which is not served") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
