"""Triton's tensors ↔ those that a runtime computes with."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class HostArrays:
    """numpy arrays, views of the server's memory."""

    def from_triton(self, tensor: Any) -> np.ndarray:
        array: np.ndarray = tensor.as_numpy()
        return array

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]

    def to_triton(self, name: str, array: np.ndarray) -> Any:
        return pb_utils.Tensor(name, array)


class DeviceTensors:
    """torch tensors through DLPack: nothing is copied, BF16 passes, and what is on a GPU stays."""

    def __init__(self, device: str) -> None:
        """
        Args:
            device: where the rows of several requests come together if they are not in one place.
        """
        self._torch = importlib.import_module("torch")  # which runtimes of arrays do without
        self._device = device

    def from_triton(self, tensor: Any) -> Any:
        return self._torch.from_dlpack(tensor.to_dlpack())

    def join(self, tensors: Sequence[Any]) -> Any:
        if len(tensors) == 1:
            return tensors[0]
        if len({tensor.device for tensor in tensors}) > 1:
            tensors = [tensor.to(self._device) for tensor in tensors]
        return self._torch.cat(list(tensors))

    def to_triton(self, name: str, tensor: Any) -> Any:
        return pb_utils.Tensor.from_dlpack(name, self._torch.utils.dlpack.to_dlpack(tensor))
