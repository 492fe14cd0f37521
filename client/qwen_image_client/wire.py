"""One connection to Triton, over gRPC or HTTP, that raises only this package's errors.

Both protocols go through tritonclient's asyncio clients. Its blocking HTTP client is not used:
it is bound to one thread and cannot abort a request.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Literal, TypeVar

import aiohttp
import numpy as np
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from .errors import (
    InvalidRequestError,
    QwenImageError,
    ServerError,
    ServerUnavailableError,
    from_status,
)

Protocol = Literal["grpc", "http"]
DEFAULT_ADDRESS = {"grpc": "localhost:8001", "http": "localhost:8000"}

_CHANNEL_OPTIONS = [
    # protobuf's own limit. Four images of 4096 x 4096 take up to 200 MB; gRPC's default is 4 MB.
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
    # gRPC fails calls at once between its tries to reach a lost server again, which it makes up to
    # 120 s apart: nearer together than our retries, or these never reach a server that is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
]

T = TypeVar("T")


class Wire:
    """Connects on first use, inside the running event loop, and belongs to that loop.

    Raises InvalidRequestError for a URL of the wrong kind.
    """

    def __init__(self, url: str | None, protocol: Protocol) -> None:
        if protocol not in DEFAULT_ADDRESS:
            raise InvalidRequestError(f"protocol must be 'grpc' or 'http', got {protocol!r}")
        scheme, separator, address = (url or DEFAULT_ADDRESS[protocol]).rpartition("://")
        if separator and scheme != protocol:
            raise InvalidRequestError(
                f"url must be host:port or {protocol}://host:port "
                f"for protocol '{protocol}', got {url!r}"
            )
        self.address = address.rstrip("/")
        self.protocol = protocol
        self._module: Any = None
        self._client: Any = None
        self._closed = False

    def _connection(self) -> Any:
        if self._closed:
            raise QwenImageError("the client is closed")
        if self._client is None:
            # Imported here because each takes a noticeable part of a second.
            if self.protocol == "grpc":
                import tritonclient.grpc.aio as module

                self._client = module.InferenceServerClient(
                    self.address, channel_args=_CHANNEL_OPTIONS
                )
            else:
                import tritonclient.http.aio as module

                # tritonclient's defaults end every request after 60 s and would make a
                # cancellation wait behind 100 others.
                self._client = module.InferenceServerClient(
                    self.address, conn_timeout=None, conn_limit=0
                )
            self._module = module
        return self._client

    async def infer(
        self,
        model: str,
        tensors: dict[str, np.ndarray],
        request_id: str = "",
        timeout_us: int | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> Any:
        """Triton's answer (tritonclient's InferResult), all outputs."""
        connection = self._connection()
        inputs = []
        for name, array in tensors.items():
            tensor = self._module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        return await self._checked(
            connection.infer(
                model,
                inputs,
                request_id=request_id,
                timeout=timeout_us,
                parameters=parameters,
                headers=self._headers(),
            )
        )

    def _headers(self) -> dict[str, str] | None:
        if self.protocol == "grpc":
            return None
        # aiohttp asks for gzip by default, and Triton then spends seconds on compressing images.
        return {"Accept-Encoding": "identity"}

    async def live(self) -> bool:
        return await self._checked(self._connection().is_server_live())

    async def ready(self) -> bool:
        return await self._checked(self._connection().is_server_ready())

    async def version(self) -> str:
        return (await self._json("get_server_metadata"))["version"]

    async def models(self) -> list[dict[str, Any]]:
        """Triton's repository index: `name`, `version`, `state`, `reason`."""
        index = await self._json("get_model_repository_index")
        return index["models"] if isinstance(index, dict) else index

    async def statistics(self) -> list[dict[str, Any]]:
        return (await self._json("get_inference_statistics"))["model_stats"]

    async def _json(self, method: str) -> Any:
        options = {"as_json": True} if self.protocol == "grpc" else {}
        return await self._checked(getattr(self._connection(), method)(**options))

    async def _checked(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except InferenceServerException as error:
            message = error.message() or "no reason given"
            if self.protocol == "http" and error.debug_details() is not None:
                message = "the answer is not Triton's"  # a proxy's page, which is in the details
            raise from_status(error.status() or "UNKNOWN", message, self.address) from None
        except aiohttp.ClientResponseError:
            raise ServerError(f"{self.address} does not speak HTTP: is it the gRPC port?") from None
        except (aiohttp.ClientError, OSError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise ServerUnavailableError(
                f"the server at {self.address} is not reachable: {reason}"
            ) from None

    async def close(self) -> None:
        self._closed = True
        if self._client is not None:
            await self._client.close()
