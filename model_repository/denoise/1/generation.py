"""What one generation asks for, and how it ends early."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# How often a waiting request looks whether it was cancelled or is past its deadline.
_POLL_SECONDS = 0.05


class GenerationError(Exception):
    """Ends one generation; the message is for its sender."""

    outcome = "error"


class InvalidGeneration(GenerationError):
    """The inputs cannot be served as they stand."""

    outcome = "invalid"


class Unavailable(GenerationError):
    """No capacity now, or the server is shutting down: the same request may succeed later."""

    outcome = "unavailable"


class Cancelled(GenerationError):
    """Cancelled by its client, or past its deadline."""

    outcome = "cancelled"


@dataclass(frozen=True)
class Generation:
    """The judged inputs of one request; `tokenize` guarantees them through the ensemble.

    input_ids, negative_input_ids: INT64 [S], the whole template.
    height, width: pixels. seed: image i uses seed + i.
    """

    input_ids: NDArray[np.int64]
    negative_input_ids: NDArray[np.int64]
    num_inference_steps: int
    true_cfg_scale: float
    height: int
    width: int
    seed: int
    num_images_per_prompt: int
    request_id: str = ""

    @property
    def guided(self) -> bool:
        return self.true_cfg_scale > 1.0

    @property
    def seeds(self) -> list[int]:
        return [self.seed + index for index in range(self.num_images_per_prompt)]

    @classmethod
    def from_tensors(
        cls,
        tensors: dict[str, NDArray[Any]],
        *,
        size_multiple: int,
        dropped_tokens: int,
        max_prompt_tokens: int,
        vocabulary: int,
        request_id: str = "",
    ) -> Generation:
        """Builds it from input tensors and refuses what would break the computation.

        The limits of a profile are judged in `tokenize`; this guards direct callers.

        Raises:
            InvalidGeneration: names the tensor, its value and what is allowed.
        """
        values: dict[str, Any] = {}
        for name in ("input_ids", "negative_input_ids"):
            ids = _required(tensors, name)
            tokens = ids.size - dropped_tokens
            if not 1 <= tokens <= max_prompt_tokens:
                raise InvalidGeneration(
                    f"{name} holds {ids.size} token ids; the template's {dropped_tokens} and "
                    f"1 to {max_prompt_tokens} more are allowed"
                )
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise InvalidGeneration(
                    f"{name} holds ids from {ids.min()} to {ids.max()}; "
                    f"the text encoder knows 0 to {vocabulary - 1}"
                )
            values[name] = ids.reshape(-1).astype(np.int64)
        for name, high in (
            ("num_inference_steps", 1000),
            ("num_images_per_prompt", 64),
            ("height", 4096),
            ("width", 4096),
        ):
            number = int(_required(tensors, name).reshape(-1)[0])
            multiple = size_multiple if name in ("height", "width") else 1
            if not multiple <= number <= high or number % multiple:
                raise InvalidGeneration(
                    f"{name} is {number}; it must be a multiple of {multiple} "
                    f"from {multiple} to {high}"
                )
            values[name] = number
        scale = float(_required(tensors, "true_cfg_scale").reshape(-1)[0])
        if not math.isfinite(scale) or scale < 1.0:
            raise InvalidGeneration(f"true_cfg_scale is {scale:g}; it must be a number from 1 on")
        seed = int(_required(tensors, "seed").reshape(-1)[0])
        highest = 2**63 - values["num_images_per_prompt"]
        if not 0 <= seed <= highest:
            raise InvalidGeneration(f"seed is {seed}; it must be from 0 to {highest}")
        return cls(true_cfg_scale=scale, seed=seed, request_id=request_id, **values)


def _required(tensors: dict[str, NDArray[Any]], name: str) -> NDArray[Any]:
    if name not in tensors or tensors[name].size == 0:
        raise InvalidGeneration(f"{name} is missing: 'denoise' needs it in every request")
    return tensors[name]


class StopSignal:
    """Tells a running generation that it must end: cancelled, or past its deadline."""

    def __init__(self, timeout_ms: int, is_disconnected: Callable[[], bool] = lambda: False):
        """
        Args:
            timeout_ms: from now on, in milliseconds.
            is_disconnected: whether the server knows that nobody waits any more.
        """
        self._timeout_ms = timeout_ms
        self._deadline = time.monotonic() + timeout_ms / 1000
        self._is_disconnected = is_disconnected
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def check(self) -> None:
        """Raises `Cancelled` when the generation must end; asks the server, too."""
        self.check_known()
        if self._is_disconnected():
            raise Cancelled("cancelled by the client")

    def check_known(self) -> None:
        """The same by what is known here, at no cost."""
        if self._cancelled:
            raise Cancelled("cancelled by the parameter 'cancel'")
        if time.monotonic() > self._deadline:
            raise Cancelled(f"deadline of {self._timeout_ms} ms exceeded")

    async def wait_for(self, future: asyncio.Future[Any]) -> Any:
        """Waits for `future`, which others may share, unless `check` raises first."""
        while not future.done():
            self.check()
            await asyncio.wait([future], timeout=_POLL_SECONDS)
        return future.result()

    async def during(self, future: asyncio.Future[Any]) -> Any:
        """Waits for `future`, which uses an engine, to its end; then raises what `check` raised
        meanwhile: a place that was left earlier would let more computations pile up than there are
        places."""
        try:
            return await self.wait_for(future)
        except Cancelled:
            await asyncio.gather(future, return_exceptions=True)
            raise
