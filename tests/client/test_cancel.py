"""Every way to give up a request ends it at the server, under its own id, over both protocols."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
import time

import pytest

from qwen_image_client import (
    AsyncClient,
    Client,
    DeadlineExceededError,
    Protocol,
    RequestCancelledError,
)

from .fake_server import FakeServer


def test_the_server_s_deadline_comes_first(
    client: Client, server: FakeServer, request_id: str
) -> None:
    with pytest.raises(DeadlineExceededError, match=r"^deadline of \d+ ms exceeded$") as caught:
        client.generate("sleep 30", timeout=0.3, request_id=request_id)
    # What was left of the timeout when the request went out.
    assert 0 < int(str(caught.value).split()[2]) <= 300
    assert [e["event"] for e in server.journal(request_id)] == ["request", "answer"]


def test_a_timeout_that_the_server_misses_cancels(
    client: Client, server: FakeServer, request_id: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"^no answer by the deadline"):
        client.generate("stubborn 30", timeout=0.2, request_id=request_id)
    assert time.monotonic() - begin < 20
    assert server.cancelled(request_id)


def test_a_handle_cancels_from_another_thread(
    client: Client, server: FakeServer, request_id: str
) -> None:
    neighbour = client.submit("sleep 1")
    handle = client.submit("sleep 30", request_id=request_id)
    with pytest.raises(concurrent.futures.TimeoutError):
        handle.result(timeout=0.05)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(handle.cancel()))
    thread.start()
    with pytest.raises(RequestCancelledError, match=r"^cancelled by a client$"):
        handle.result(timeout=5)
    thread.join()
    assert answers == [True]
    assert server.cancelled(request_id)
    assert neighbour.result().images
    assert handle.done()
    assert not handle.cancel()


def test_keyboard_interrupt_cancels_at_the_server(
    client: Client, server: FakeServer, request_id: str
) -> None:
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            client.generate("sleep 30", request_id=request_id)
        assert server.cancelled(request_id)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_another_client_cancels_by_id(
    client: Client, server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    handle = client.submit("sleep 30", request_id=request_id)
    server.wait_for(request_id, "request")
    with Client(server.urls[protocol], protocol) as other:
        assert other.cancel(request_id)
    with pytest.raises(RequestCancelledError):
        handle.result(timeout=5)


def test_cancelling_repeats_until_the_server_knows_the_request(
    client: Client, server: FakeServer, request_id: str
) -> None:
    handle = client.submit("late 0.3", request_id=request_id)
    assert handle.cancel()
    with pytest.raises(RequestCancelledError):
        handle.result(timeout=5)
    tries = [e["cancelled"] for e in server.journal(request_id) if e["event"] == "cancel"]
    assert len(tries) > 1
    assert tries == [0] * (len(tries) - 1) + [1]


@pytest.mark.usefixtures("short_pauses")
def test_cancelling_what_does_not_exist_is_false(client: Client, request_id: str) -> None:
    assert not client.cancel(request_id)


def test_cancelling_between_attempts_ends_the_retries(
    server: FakeServer, protocol: Protocol, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_image_client.async_client.FIRST_RETRY_PAUSE", 5.0)
    with Client(server.urls[protocol], protocol) as client:
        handle = client.submit("refuse 99 queue full", request_id=request_id)
        server.wait_for(request_id, "cancel")
        assert handle.cancel()
        with pytest.raises(RequestCancelledError):
            handle.result(timeout=4)
    assert server.count(request_id, "request") == 1


def test_closing_cancels_what_is_in_flight(
    server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    with Client(server.urls[protocol], protocol) as client:
        handle = client.submit("sleep 30", request_id=request_id)
    with pytest.raises(RequestCancelledError):
        handle.result(timeout=4)
    assert server.cancelled(request_id)


def test_cancelling_the_task_cancels_at_the_server(
    server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    async def run() -> None:
        async with AsyncClient(server.urls[protocol], protocol) as client:
            neighbour = asyncio.create_task(client.generate("sleep 0.5"))
            task = asyncio.create_task(client.generate("sleep 30", request_id=request_id))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert server.cancelled(request_id)
            assert (await neighbour).images

    asyncio.run(run())


def test_wait_for_cancels_at_the_server(
    server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    async def run() -> None:
        async with AsyncClient(server.urls[protocol], protocol) as client:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.generate("sleep 30", request_id=request_id), 0.2)

    asyncio.run(run())
    assert server.cancelled(request_id)


def test_explicit_cancel_of_the_async_client(
    server: FakeServer, protocol: Protocol, request_id: str
) -> None:
    async def run() -> None:
        async with AsyncClient(server.urls[protocol], protocol) as client:
            task = asyncio.create_task(client.generate("sleep 30", request_id=request_id))
            await asyncio.sleep(0.1)
            assert await client.cancel(request_id)
            with pytest.raises(RequestCancelledError):
                await task

    asyncio.run(run())
    assert server.cancelled(request_id)
