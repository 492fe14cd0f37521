"""Attention in E4M3 by cuDNN: queries, keys, values, the softmax's result and the output.

Lengths are on the device: one plan serves every mix of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from runtimes import EngineError

LARGEST = 448.0  # of E4M3
SOFTMAX_SCALE = 256.0  # what is at most 1 comes near 448, and stays a power of two
HEADROOM = 2.0  # of values over what calibration saw


class Scales(NamedTuple):
    """Of one block, FP32 [1] on the device: values are stored times `value`, outputs times
    `output`. Queries and keys, which are normed, need none."""

    value: Tensor
    output: Tensor
    inverse_value: Tensor
    inverse_output: Tensor

    @classmethod
    def of(cls, amax: Tensor) -> Scales:
        """amax: FP32 [2], the largest absolute value and output that calibration saw."""
        inverse = HEADROOM * amax / LARGEST
        return cls(*(1 / inverse).split(1), *inverse.split(1))


class Fp8Attention:
    """softmax(q kᵀ / √D) v for all of an engine's blocks."""

    def __init__(self, device: torch.device) -> None:
        """Raises:
        EngineError: cuDNN's frontend is not installed.
        """
        self._plans: dict[tuple[int, ...], Any] = {}
        if device.type == "cuda":
            try:
                self._cudnn = importlib.import_module("cudnn")
            except ImportError as error:
                raise EngineError(
                    f"FP8 attention needs cuDNN's frontend, which cannot be imported ({error}): "
                    "`pip install nvidia-cudnn-frontend`, or export without FP8 attention"
                ) from None
            self._handle = self._cudnn.create_handle()
            softmax = torch.tensor([1.0, 1.0 / SOFTMAX_SCALE, SOFTMAX_SCALE], device=device)
            self._one, self._descale_s, self._scale_s = softmax.split(1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scales: Scales) -> Tensor:
        """q, k, v: E4M3 [B·S, H, D]; lengths: INT32 [B] → E4M3 [B·S + 1, H·D]. The last row is
        noughts; what padded queries get is undefined."""
        batch, (rows, heads, size) = len(lengths), q.shape
        out = torch.empty(rows + 1, heads * size, dtype=q.dtype, device=q.device)
        out[rows:].view(torch.uint8).zero_()
        if not q.is_cuda:
            self._reference(q, k, v, lengths, scales, out)
            return out
        plan = self._plan(batch, heads, rows // batch, size)
        counts = lengths.view(-1, 1, 1, 1)
        amax = torch.empty(2, device=q.device).split(1)  # of this call, which nothing reads
        given = {"q": q, "k": k, "v": v, "o": out, "seq_q": counts, "seq_kv": counts}
        scalars = {
            "descale_q": self._one,
            "descale_k": self._one,
            "descale_v": scales.inverse_value,
            "descale_s": self._descale_s,
            "scale_s": self._scale_s,
            "scale_o": scales.output,
            "amax_s": amax[0],
            "amax_o": amax[1],
        }
        workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=q.device)
        stream = torch.cuda.current_stream().cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)
        given |= {name: tensor.view(1, 1, 1, 1) for name, tensor in scalars.items()}
        pointers = {plan.tensors[name]: tensor for name, tensor in given.items()}
        plan.graph.execute(pointers, workspace, handle=self._handle)
        return out

    def _plan(self, batch: int, heads: int, tokens: int, size: int) -> _Plan:
        """cuDNN's kernel for these sizes; found once for each."""
        key = (batch, heads, tokens, size)
        if key not in self._plans:
            self._plans[key] = _build(self._cudnn, self._handle, *key)
        plan: _Plan = self._plans[key]
        return plan

    def _reference(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scales: Scales, out: Tensor
    ) -> None:
        tokens = len(q) // len(lengths)
        for i, length in enumerate(lengths.tolist()):
            rows = slice(i * tokens, i * tokens + length)
            heads = [x[rows].float().transpose(0, 1) for x in (q, k, v)]
            mixed = functional.scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1)
            wide = mixed * scales.inverse_value * scales.output
            out[rows] = wide.clamp(-LARGEST, LARGEST).to(out.dtype)


class _Plan(NamedTuple):
    graph: Any
    tensors: Mapping[str, Any]
    workspace: int  # bytes


def _build(cudnn: Any, handle: Any, batch: int, heads: int, tokens: int, size: int) -> _Plan:
    fp8, fp32, int32 = (getattr(cudnn.data_type, n) for n in ("FP8_E4M3", "FLOAT", "INT32"))
    graph = cudnn.pygraph(
        io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle
    )
    shape, one = [batch, heads, tokens, size], [1, 1, 1, 1]
    strides = [tokens * heads * size, size, heads * size, 1]
    tensors = {
        name: graph.tensor(name=name, dim=shape, stride=strides, data_type=fp8) for name in "qkv"
    }
    for name in ("seq_q", "seq_kv"):
        tensors[name] = graph.tensor(name=name, dim=[batch, 1, 1, 1], stride=one, data_type=int32)
    scales = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    for name in scales:
        tensors[name] = graph.tensor(name=name, dim=one, stride=one, data_type=fp32)
    output, _, amax_s, amax_o = graph.sdpa_fp8(
        name="attention",
        q=tensors["q"],
        k=tensors["k"],
        v=tensors["v"],
        **{name: tensors[name] for name in scales},
        generate_stats=False,
        attn_scale=size**-0.5,
        use_causal_mask=False,
        use_padding_mask=True,
        seq_len_q=tensors["seq_q"],
        seq_len_kv=tensors["seq_kv"],
    )
    tensors["o"] = output.set_output(True).set_dim(shape).set_stride(strides).set_data_type(fp8)
    for name, amax in (("amax_s", amax_s), ("amax_o", amax_o)):
        tensors[name] = amax.set_output(True).set_dim(one).set_stride(one).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return _Plan(graph, tensors, max(graph.get_workspace_size(), 1))
