"""The asyncio client: one request from its fields to its images, with retries and cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import urllib.error
import urllib.request
import uuid
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from .errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QwenImageError,
    RequestCancelledError,
    ServerError,
    ServerUnavailableError,
)
from .fields import check_timeout, encode_fields
from .results import Generation, ModelStatus, ServerStatus
from .wire import Protocol, Wire

MODEL = "qwen_image"
# The ensemble's step that knows the requests in flight and takes `cancel`.
CANCEL_MODEL = "denoise"

# Seconds.
GRACE = 1.0  # past the server's own deadline, so that its answer arrives first
# Between the tries of one cancellation: the request may still be on its way to `denoise`.
CANCEL_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
ABANDON_LIMIT = 3.0  # how long a caller who gives up is kept for the cancellation
CALL_LIMIT = 10.0  # for a call that needs no computation
PROBE_INTERVAL = 5.0  # between checks that a waiting call's server still answers
FIRST_RETRY_PAUSE = 0.2
LONGEST_RETRY_PAUSE = 5.0

T = TypeVar("T")


@dataclass
class _Call:
    """A request of this client: `answer` is its attempt in flight, None between attempts."""

    answer: asyncio.Task[Any] | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncClient:
    """Talks to the Triton model `qwen_image` at `url` (host:port).

    Belongs to the event loop that first uses it; any number of calls may run at once.
    retries: how often a request is sent again after UNAVAILABLE.
    """

    def __init__(
        self, url: str | None = None, protocol: Protocol = "grpc", retries: int = 3
    ) -> None:
        self.retries = retries
        self._wire = Wire(url, protocol)
        self._calls: dict[str, _Call] = {}

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels the requests in flight, at the server too, and disconnects."""
        calls = dict(self._calls)
        await asyncio.gather(*(self.abandon(request_id) for request_id in calls))
        for call in calls.values():
            if call.answer is not None:
                call.answer.cancel()
        await self._wire.close()

    async def generate(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        num_inference_steps: int | None = None,
        true_cfg_scale: float | None = None,
        height: int | None = None,
        width: int | None = None,
        seed: int | None = None,
        num_images_per_prompt: int | None = None,
        output_format: str | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Generation:
        """Images for a prompt; a field left None is the server's to choose.

        timeout: seconds for all of it, retries included; the server gets it too and stops there.
        request_id: for `cancel` and the server's logs; a new UUID by default.
        Cancelling the task cancels the request at the server before CancelledError goes on.
        Raises QwenImageError's subclasses.
        """
        tensors = encode_fields(
            {
                "prompt": prompt,
                "negative_prompt": negative_prompt,
                "num_inference_steps": num_inference_steps,
                "true_cfg_scale": true_cfg_scale,
                "height": height,
                "width": width,
                "seed": seed,
                "num_images_per_prompt": num_images_per_prompt,
                "output_format": output_format,
            }
        )
        check_timeout(timeout)
        if request_id is None:
            request_id = str(uuid.uuid4())
        elif not request_id or request_id in self._calls:
            raise InvalidRequestError(f"request_id must be new and not empty, got {request_id!r}")
        call = self._calls[request_id] = _Call()
        try:
            result = await self._with_retries(call, request_id, tensors, timeout)
        except asyncio.CancelledError:
            await self.abandon(request_id)
            raise
        finally:
            del self._calls[request_id]
        return _read(result, request_id)

    async def cancel(self, request_id: str) -> bool:
        """Ends a request, of this client or of another, at its next step.

        True when it was ended; its caller then gets RequestCancelledError. False when it was
        over, or past its last step. Raises ServerUnavailableError or ServerError.
        """
        call = self._calls.get(request_id)
        if call is not None:
            call.cancelled.set()
        for pause in CANCEL_PAUSES:
            if await self._cancel_at_server(request_id):
                return True
            if call is None:
                await asyncio.sleep(pause)
                continue
            if call.answer is None:
                return True
            await asyncio.wait({call.answer}, timeout=pause)
            if call.answer is None or call.answer.done():
                return False
        return await self._cancel_at_server(request_id)

    async def abandon(self, request_id: str) -> None:
        """`cancel` for a caller who is leaving: bounded in time, without errors."""
        with contextlib.suppress(QwenImageError, asyncio.TimeoutError):
            await asyncio.wait_for(self.cancel(request_id), ABANDON_LIMIT)

    async def server_ready(self) -> bool:
        """Whether the server and all of its models take requests; False if unreachable."""
        try:
            return await self._limited(self._wire.ready())
        except ServerUnavailableError:
            return False

    async def status(self, metrics_url: str | None = None) -> ServerStatus:
        """The server's and its models' state; with `metrics_url` the service's metrics too.

        metrics_url: of Triton's metrics port, e.g. http://localhost:8002/metrics.
        Raises ServerUnavailableError, ServerError.
        """
        ready, version, models, statistics = await asyncio.gather(
            self._limited(self._wire.ready()),
            self._limited(self._wire.version()),
            self._limited(self._wire.models()),
            self._limited(self._wire.statistics()),
        )
        metrics = {}
        if metrics_url is not None:
            metrics = await asyncio.to_thread(_read_metrics, metrics_url)
        counts = {(entry["name"], entry["version"]): entry for entry in statistics}
        return ServerStatus(
            ready=ready,
            triton_version=version,
            models=[
                _model_status(model, counts.get((model["name"], model.get("version", "")), {}))
                for model in models
            ],
            metrics=metrics,
        )

    async def _with_retries(
        self,
        call: _Call,
        request_id: str,
        tensors: dict[str, np.ndarray],
        timeout: float | None,
    ) -> Any:
        now = asyncio.get_running_loop().time
        deadline = None if timeout is None else now() + timeout
        attempt = 0
        lost = False  # an attempt that the server may still compute
        while True:
            attempt += 1
            try:
                if lost:
                    await self._end_lost(call, request_id, deadline)
                    lost = False
                if call.cancelled.is_set():
                    raise RequestCancelledError(f"request {request_id} was cancelled")
                return await self._attempt(call, request_id, tensors, deadline)
            except ServerUnavailableError as caught:
                error = caught
            call.answer = None
            # Every attempt has the same id, so that whoever knows it can cancel whichever
            # attempt is running. If only the connection broke, the server may still compute
            # the last one: end that, for nobody waits for it. A server that cannot be told now
            # is told before the next attempt, which fails if that does.
            if not lost:
                try:
                    await self._end_lost(call, request_id, deadline)
                except ServerUnavailableError:
                    lost = True
            pause = min(FIRST_RETRY_PAUSE * 2 ** (attempt - 1), LONGEST_RETRY_PAUSE)
            pause *= random.uniform(0.5, 1.5)
            late = deadline is not None and now() + pause >= deadline
            if (attempt > self.retries or late) and not call.cancelled.is_set():
                if attempt == 1:
                    raise error
                raise ServerUnavailableError(f"{error} ({attempt} attempts)")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(call.cancelled.wait(), pause)

    async def _attempt(
        self,
        call: _Call,
        request_id: str,
        tensors: dict[str, np.ndarray],
        deadline: float | None,
    ) -> Any:
        remaining = None
        if deadline is not None:
            remaining = max(deadline - asyncio.get_running_loop().time(), 0.001)
        answer = call.answer = _started(
            self._wire.infer(
                MODEL,
                tensors,
                request_id=request_id,
                timeout_us=None if remaining is None else int(remaining * 1e6),
            )
        )
        lost = asyncio.ensure_future(self._until_lost(answer))
        try:
            if await _is_first(answer, lost, None if remaining is None else remaining + GRACE):
                return answer.result()
            if lost.done():
                raise ServerUnavailableError(
                    f"the server at {self._wire.address} stopped answering"
                )
            await self.abandon(request_id)
            raise DeadlineExceededError(
                f"no answer by the deadline: request {request_id} was given up"
            )
        finally:
            lost.cancel()
            answer.cancel()

    async def _until_lost(self, answer: asyncio.Task[Any]) -> None:
        """Returns when the server has not answered two checks in a row, or the answer is there.

        A killed process closes its connections, which ends the call itself. A dead machine or
        network does not, HTTP has no keepalive, and Triton takes gRPC's keepalive pings within
        five minutes for abuse.
        """
        failures = 0
        # A cancellation can get lost: `wait_for` drops it if the check ends in the same moment
        # (Python before 3.12). The answer, which is given up with it, then ends this.
        while failures < 2 and not answer.done():
            await asyncio.sleep(PROBE_INTERVAL)
            try:
                await self._limited(self._wire.live())
                failures = 0
            except ServerUnavailableError:
                failures += 1
            except QwenImageError:
                failures = 0

    async def _end_lost(self, call: _Call, request_id: str, deadline: float | None) -> None:
        """Ends an attempt that no answer came of, if the server still has it.

        Gives up at the deadline, or when the caller cancels, who tells the server then.

        Raises ServerUnavailableError: it could not be told.
        """
        limit = ABANDON_LIMIT
        if deadline is not None:
            limit = min(limit, max(deadline - asyncio.get_running_loop().time(), 0.0))
        ending = _started(self._end_at_server(request_id))
        cancelled = asyncio.ensure_future(call.cancelled.wait())
        try:
            if await _is_first(ending, cancelled, limit):
                ending.result()
            elif not cancelled.done():
                raise ServerUnavailableError(
                    f"the server at {self._wire.address} did not answer within {limit:g} s"
                )
        finally:
            ending.cancel()
            cancelled.cancel()

    async def _end_at_server(self, request_id: str) -> None:
        """Cancels until the server does not know the request, or for as long as `cancel` tries.

        Raises ServerUnavailableError. A server that has no `cancel` is left alone.
        """
        try:
            for pause in CANCEL_PAUSES:
                if not await self._cancel_at_server(request_id):
                    return
                await asyncio.sleep(pause)
        except ServerUnavailableError:
            raise
        except QwenImageError:
            return

    async def _cancel_at_server(self, request_id: str) -> bool:
        result = await self._limited(
            self._wire.infer(CANCEL_MODEL, {}, parameters={"cancel": request_id})
        )
        try:
            return bool(json.loads(result.as_numpy("record").item())["cancelled"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ServerError(f"model '{CANCEL_MODEL}' does not answer `cancel`") from None

    async def _limited(self, call: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(call, CALL_LIMIT)
        except asyncio.TimeoutError:
            raise ServerUnavailableError(
                f"the server at {self._wire.address} did not answer within {CALL_LIMIT:g} s"
            ) from None


def _started(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose exception counts as seen, should nobody wait for it any more."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def _is_first(
    task: asyncio.Task[Any], other: asyncio.Task[Any], timeout: float | None
) -> bool:
    """Whether `task` is done before `other` is and `timeout` seconds are over.

    Raises RequestCancelledError: the connection was closed under it.
    """
    await asyncio.wait({task, other}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    if task.cancelled():
        raise RequestCancelledError("the client was closed")
    return task.done()


def _read(result: Any, request_id: str) -> Generation:
    """Raises ServerError if an output is missing or the metadata are not JSON."""
    try:
        metadata = json.loads(result.as_numpy("metadata").item())
        return Generation(
            encoded=list(result.as_numpy("generated_image").reshape(-1)),
            seeds=[int(seed) for seed in metadata["seeds"]],
            metadata=metadata,
            request_id=request_id,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ServerError(f"the answer of model '{MODEL}' cannot be read: {error!r}") from None


def _model_status(model: dict[str, Any], statistics: dict[str, Any]) -> ModelStatus:
    """gRPC's JSON leaves out zeros and writes 64-bit numbers as strings."""
    counts = statistics.get("inference_stats", {})
    succeeded = int(counts.get("success", {}).get("count", 0))
    nanoseconds = int(counts.get("success", {}).get("ns", 0))
    return ModelStatus(
        name=model["name"],
        version=model.get("version", ""),
        state=model.get("state", "UNKNOWN"),
        reason=model.get("reason", ""),
        succeeded=succeeded,
        failed=int(counts.get("fail", {}).get("count", 0)),
        mean_ms=nanoseconds / succeeded / 1e6 if succeeded else None,
    )


def _read_metrics(url: str) -> dict[str, float]:
    """Samples of the `qwen_image_*` families, histogram buckets left out."""
    try:
        with urllib.request.urlopen(url, timeout=CALL_LIMIT) as response:
            text = response.read().decode()
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ServerUnavailableError(f"the metrics at {url} cannot be read: {reason}") from None
    samples = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("qwen_image_") and "_bucket{" not in name:
            samples[name] = float(value)
    return samples
