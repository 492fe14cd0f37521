"""Bounds the work: so many generations in flight, so many waiting in order, no more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from generation import StopSignal, Unavailable


class Admission:
    """First come, first served. Belongs to one event loop."""

    def __init__(
        self, max_in_flight: int, max_queued: int, on_change: Callable[[int, int], None]
    ) -> None:
        """
        Args:
            max_in_flight: generations that may run at once.
            max_queued: generations that may wait behind them.
            on_change: told (in flight, queued) after every change.
        """
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._on_change = on_change
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def place(self, stop: StopSignal) -> AsyncIterator[None]:
        """Holds one of the places in flight, after waiting for it if it must.

        Raises:
            Unavailable: every place and the whole queue are taken.
            Cancelled: `stop` said so while waiting.
        """
        if self._in_flight < self._max_in_flight:
            self._in_flight += 1
            self._changed()
        else:
            await self._wait_for_turn(stop)
        try:
            yield
        finally:
            self._leave()

    async def _wait_for_turn(self, stop: StopSignal) -> None:
        if len(self._waiting) >= self._max_queued:
            raise Unavailable(
                f"{self._max_in_flight} requests are running and {self._max_queued} are waiting, "
                "which is the limit: try again later"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._changed()
        try:
            await stop.wait_for(turn)
        except BaseException:
            if turn.done():
                self._leave()  # the place came at the same moment: pass it on
            else:
                self._waiting.remove(turn)
                self._changed()
            raise

    def _leave(self) -> None:
        """Frees a place, or hands it to whoever has waited longest."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._in_flight -= 1
        self._changed()

    def _changed(self) -> None:
        self._on_change(self._in_flight, len(self._waiting))
