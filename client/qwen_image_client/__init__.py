"""Client of a Triton server that serves Qwen-Image: `Client`, `AsyncClient` and their errors."""

from .async_client import AsyncClient
from .client import Client, Handle
from .errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QwenImageError,
    RequestCancelledError,
    ServerError,
    ServerUnavailableError,
)
from .results import Generation, ModelStatus, ServerStatus
from .wire import Protocol

__all__ = [
    "AsyncClient",
    "Client",
    "DeadlineExceededError",
    "Generation",
    "Handle",
    "InvalidRequestError",
    "ModelStatus",
    "Protocol",
    "QwenImageError",
    "RequestCancelledError",
    "ServerError",
    "ServerStatus",
    "ServerUnavailableError",
]
