"""The blocking client: an AsyncClient on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from .async_client import AsyncClient
from .errors import QwenImageError
from .results import Generation, ServerStatus
from .wire import Protocol

T = TypeVar("T")


class Handle:
    """A request under way; every method may be called from any thread."""

    def __init__(
        self, client: Client, request_id: str, future: concurrent.futures.Future[Generation]
    ) -> None:
        self.request_id = request_id
        self._client = client
        self._future = future

    def result(self, timeout: float | None = None) -> Generation:
        """Waits for the images.

        Raises what `Client.generate` raises, or concurrent.futures.TimeoutError after `timeout`
        seconds; the request then goes on.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> bool:
        """`Client.cancel` for this request; `result` then raises RequestCancelledError."""
        return not self.done() and self._client.cancel(self.request_id)


class Client:
    """Talks to the Triton model `qwen_image` at `url` (host:port); safe to share among threads.

    retries: how often a request is sent again after UNAVAILABLE.
    """

    def __init__(
        self, url: str | None = None, protocol: Protocol = "grpc", retries: int = 3
    ) -> None:
        self._client = AsyncClient(url, protocol, retries)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="qwen-image-client", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the requests in flight, at the server too, and disconnects."""
        if self._loop.is_closed():
            return
        self._wait(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
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
        KeyboardInterrupt cancels the request at the server before it goes on.
        Raises QwenImageError's subclasses.
        """
        handle = self.submit(
            prompt,
            negative_prompt,
            num_inference_steps,
            true_cfg_scale,
            height,
            width,
            seed,
            num_images_per_prompt,
            output_format,
            timeout,
            request_id,
        )
        try:
            return handle.result()
        finally:
            if not handle.done():
                self._wait(self._client.abandon(handle.request_id))

    def submit(
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
    ) -> Handle:
        """`generate` without waiting; its errors come out of the handle's `result`."""
        if request_id is None:
            request_id = str(uuid.uuid4())
        future = self._start(
            self._client.generate(
                prompt,
                negative_prompt,
                num_inference_steps,
                true_cfg_scale,
                height,
                width,
                seed,
                num_images_per_prompt,
                output_format,
                timeout,
                request_id,
            )
        )
        return Handle(self, request_id, future)

    def cancel(self, request_id: str) -> bool:
        """Ends a request, of this client or of another, at its next step.

        True when it was ended; its caller then gets RequestCancelledError. False when it was
        over, or past its last step. Raises ServerUnavailableError or ServerError.
        """
        return self._wait(self._client.cancel(request_id))

    def server_ready(self) -> bool:
        """Whether the server and all of its models take requests; False if unreachable."""
        return self._wait(self._client.server_ready())

    def status(self, metrics_url: str | None = None) -> ServerStatus:
        """The server's and its models' state; with `metrics_url` the service's metrics too.

        metrics_url: of Triton's metrics port, e.g. http://localhost:8002/metrics.
        Raises ServerUnavailableError, ServerError.
        """
        return self._wait(self._client.status(metrics_url))

    async def _finish(self) -> None:
        await self._client.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            await asyncio.wait(rest, timeout=1.0)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._loop.is_closed():
            coroutine.close()
            raise QwenImageError("the client is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._start(coroutine).result()
