"""Servers that are not there, die, freeze, or are cut off."""

from __future__ import annotations

import os
import signal
import time

import pytest

from qwen_image_client import Client, Protocol, RequestCancelledError, ServerUnavailableError
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
        time.sleep(0.1)
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
        time.sleep(0.1)
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
