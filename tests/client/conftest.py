from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator

import pytest

from qwen_image_client import Client, Protocol

from .fake_server import FakeServer
from .relay import Relay


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    server = FakeServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def mortal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """One that a test may kill."""
    server = FakeServer(tmp_path_factory.mktemp("mortal_server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return request.param


@pytest.fixture
def relay(server: FakeServer, protocol: Protocol) -> Iterator[Relay]:
    relay = Relay(server.urls[protocol])
    yield relay
    relay.close()


@pytest.fixture
def dead_address() -> Iterator[str]:
    """Taken, but nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def client(server: FakeServer, protocol: Protocol) -> Iterator[Client]:
    with Client(server.urls[protocol], protocol) as client:
        yield client


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between retries and between the tries of a cancellation."""
    monkeypatch.setattr("qwen_image_client.async_client.FIRST_RETRY_PAUSE", 0.01)
    monkeypatch.setattr("qwen_image_client.async_client.CANCEL_PAUSES", (0.01, 0.01))


@pytest.fixture
def request_id() -> str:
    return str(uuid.uuid4())
