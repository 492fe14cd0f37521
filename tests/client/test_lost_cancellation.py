"""A check of the server that drops its cancellation must not go on for ever."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest

from qwen_image_client import AsyncClient

from .fake_server import FakeServer


def test_a_dropped_cancellation_ends_with_the_answer(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_image_client.async_client.PROBE_INTERVAL", 0.01)

    async def run() -> None:
        async with AsyncClient(server.urls["grpc"]) as client:

            async def limited(call: Coroutine[Any, Any, Any]) -> None:
                call.close()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(30)

            monkeypatch.setattr(client, "_limited", limited)
            await client.generate("sleep 0.3")
            for _ in range(100):
                checks = [t for t in asyncio.all_tasks() if "_until_lost" in repr(t.get_coro())]
                if not checks:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"still running: {checks}")

    asyncio.run(run())
