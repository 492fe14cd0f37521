"""CUDA graphs: a forward pass launches a thousand kernels; recorded, they are launched at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

GRAPHS = 64  # kept; the one that was not used for longest goes first


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor


class Replayed:
    """`forward(*tensors, *rest)` → a tensor. It is recorded when its shapes and `rest` come for the
    second time, and replayed from then on; the first time compiles and plans what it needs."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward
        self._recordings: OrderedDict[Any, Recording | None] = OrderedDict()
        # Shared by all recordings, only one of which runs at a time:
        self._pool: Any = None
        self._buffers: dict[int, Tensor] = {}  # of the inputs, by their number

    def __call__(self, *tensors: Tensor, rest: tuple[Any, ...] = ()) -> Tensor:
        if not tensors[0].is_cuda:
            return self._forward(*tensors, *rest)
        key = (rest, *(tensor.shape for tensor in tensors))
        if key not in self._recordings:
            result = self._forward(*tensors, *rest)
            self._keep(key, None)
            return result
        recording = self._recordings[key] or self._record(tensors, rest)
        self._keep(key, recording)
        for own, given in zip(recording.inputs, tensors, strict=True):
            own.copy_(given)
        recording.graph.replay()
        return recording.output.clone()

    def _keep(self, key: Any, recording: Recording | None) -> None:
        self._recordings[key] = recording
        self._recordings.move_to_end(key)
        if len(self._recordings) > GRAPHS:
            self._recordings.popitem(last=False)

    def _record(self, tensors: tuple[Tensor, ...], rest: tuple[Any, ...]) -> Recording:
        inputs = [self._buffer(i, tensor) for i, tensor in enumerate(tensors)]
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._forward(*inputs, *rest)
        return Recording(graph, inputs, output)

    def _buffer(self, number: int, tensor: Tensor) -> Tensor:
        """A copy of an input, in memory that recordings of smaller ones use too."""
        buffer = self._buffers.get(number)
        if buffer is None or buffer.numel() < tensor.numel():
            buffer = self._buffers[number] = torch.empty_like(tensor).flatten()
        return buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
