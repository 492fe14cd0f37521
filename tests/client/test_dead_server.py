"""Servers that are not there, die, freeze, or are cut off."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from qwen_image_client import (
    AsyncClient,
    Client,
    Protocol,
    RequestCancelledError,
    ServerUnavailableError,
)
from tests.waiting import wait_until

from .fake_server import FakeServer
from .relay import Relay


@pytest.mark.usefixtures("short_pauses")
def test_nothing_listens(protocol: Protocol, dead_address: str) -> None:
    with Client(dead_address, protocol) as client:
        begin = time.monotonic()
        with pytest.raises(ServerUnavailableError) as caught:
            client.generate("fox")
        assert time.monotonic() - begin < 30
        assert f"the server at {dead_address}" in str(caught.value)
        assert not client.server_ready()
        with pytest.raises(ServerUnavailableError):
            client.status()


def test_killed_while_calls_wait_and_back_again(mortal_server: FakeServer, request_id: str) -> None:
    urls = mortal_server.urls
    with Client(urls["grpc"], "grpc") as grpc, Client(urls["http"], "http") as http:
        handles = [grpc.submit("sleep 60"), http.submit("sleep 60", request_id=request_id)]
        mortal_server.wait_for(request_id, "request")
        time.sleep(0.2)
        mortal_server.kill()
        begin = time.monotonic()
        for handle in handles:
            with pytest.raises(ServerUnavailableError):
                handle.result(timeout=10)
        assert time.monotonic() - begin < 30
        mortal_server.start()
        for client in (grpc, http):
            assert client.generate("fox", timeout=10).images


def test_a_lost_connection_ends_the_first_attempt_before_the_second(
    relay: Relay, server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    with Client(relay.address, protocol) as client:
        handle = client.submit("sleep 3", request_id=request_id)
        server.wait_for(request_id, "request")
        relay.cut()
        assert handle.result(timeout=20).images
    assert_one_after_the_other(server, request_id)


def test_a_network_that_was_away_does_not_leave_two_attempts(
    relay: Relay, server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    """The first attempt cannot be cancelled before the network is back."""
    with Client(relay.address, protocol, retries=30) as client:
        handle = client.submit("sleep 20", request_id=request_id, timeout=40)
        server.wait_for(request_id, "request")
        relay.go_down()
        wait_until(lambda: relay.refused > 2)
        assert server.count(request_id, "cancel") == 0
        relay.come_back()
        server.wait_for(request_id, "answer", seconds=10.0)
        wait_until(lambda: server.count(request_id, "request") == 2)
        handle.cancel()
        with pytest.raises(RequestCancelledError):
            handle.result(timeout=10)
    assert_one_after_the_other(server, request_id)


def test_the_timeout_holds_when_a_lost_attempt_cannot_be_ended(
    relay: Relay, server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    with Client(relay.address, protocol) as client:
        begin = time.monotonic()
        handle = client.submit("sleep 60", request_id=request_id, timeout=2.0)
        server.wait_for(request_id, "request")
        relay.fall_silent()
        with pytest.raises(ServerUnavailableError):
            handle.result(timeout=30)
        assert time.monotonic() - begin < 8  # of which a silent server may take all but a second


@pytest.mark.parametrize("protocol", ["http"])  # gRPC connects again only after a moment
def test_the_last_attempt_is_ended_too(
    relay: Relay, server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    with Client(relay.address, protocol, retries=0) as client:
        handle = client.submit("sleep 60", request_id=request_id)
        server.wait_for(request_id, "request")
        relay.cut()
        with pytest.raises(ServerUnavailableError):
            handle.result(timeout=20)
        assert server.cancelled(request_id)


def test_a_task_cancelled_between_attempts_is_cancelled_at_the_server(
    relay: Relay,
    server: FakeServer,
    protocol: Protocol,
    request_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qwen_image_client.async_client.FIRST_RETRY_PAUSE", 60.0)

    async def run() -> None:
        async with AsyncClient(relay.address, protocol) as client:
            task = asyncio.create_task(client.generate("sleep 60", request_id=request_id))
            await asyncio.to_thread(server.wait_for, request_id, "request")
            relay.go_down()
            await asyncio.to_thread(wait_until, lambda: relay.refused > 0)
            relay.come_back()
            while not await client.server_ready():  # gRPC connects again after a moment
                await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert server.cancelled(request_id)
    assert server.count(request_id, "request") == 1


def test_closing_while_a_lost_attempt_is_being_ended(
    relay: Relay, server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    client = Client(relay.address, protocol)
    handle = client.submit("sleep 60", request_id=request_id)
    server.wait_for(request_id, "request")
    relay.fall_silent()
    wait_until(lambda: relay.refused > 0)
    client.close()
    with pytest.raises(RequestCancelledError):
        handle.result(timeout=10)


def assert_one_after_the_other(server: FakeServer, request_id: str) -> None:
    events = [e["event"] for e in server.journal(request_id)]
    attempts = [event for event in events if event != "cancel"]
    assert attempts == ["request", "answer", "request", "answer"], events
    assert "cancel" in events[: events.index("answer")], events
    assert server.cancelled(request_id)


def test_a_frozen_server_is_given_up(
    mortal_server: FakeServer, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing closes the connection, as when a machine or its network dies."""
    monkeypatch.setattr("qwen_image_client.async_client.PROBE_INTERVAL", 0.2)
    monkeypatch.setattr("qwen_image_client.async_client.CALL_LIMIT", 0.5)
    urls = mortal_server.urls
    with Client(urls["grpc"], retries=0) as grpc, Client(urls["http"], "http", retries=0) as http:
        assert grpc.submit("sleep 1").result(timeout=5)  # the checks do not disturb a live one
        handles = [grpc.submit("sleep 60"), http.submit("sleep 60", request_id=request_id)]
        mortal_server.wait_for(request_id, "request")
        os.kill(mortal_server.pid, signal.SIGSTOP)
        for handle in handles:
            with pytest.raises(ServerUnavailableError, match=r"stopped answering$"):
                handle.result(timeout=10)
