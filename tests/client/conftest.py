from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from qwen_image_client import Client, Protocol

from .fake_server import FakeServer


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
def client(server: FakeServer, protocol: Protocol) -> Iterator[Client]:
    with Client(server.urls[protocol], protocol) as client:
        yield client


@pytest.fixture
def request_id() -> str:
    return str(uuid.uuid4())
