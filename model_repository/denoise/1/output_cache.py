"""A cache of engine outputs: bounded in bytes, least recently used out first, one computation
for simultaneous equal keys."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class CacheMetrics(Protocol):
    """Where a cache reports what it does."""

    def hit(self, count: int) -> None: ...
    def miss(self, count: int) -> None: ...
    def evicted(self, count: int) -> None: ...
    def set_bytes(self, size: int) -> None: ...


class OutputCache(Generic[Key, Value]):
    """Maps keys to finished engine outputs. Belongs to one event loop.

    A computation runs as a task of its own: a caller that gives up does not stop it for the
    others, and only a finished value is ever stored. A failed one leaves nothing behind.
    """

    def __init__(
        self, max_bytes: int, size_of: Callable[[Value], int], metrics: CacheMetrics
    ) -> None:
        """
        Args:
            max_bytes: bound for the sum of the sizes of the stored values; 0 stores nothing.
            size_of: bytes that a value holds.
        """
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._metrics = metrics
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._computing: dict[Key, asyncio.Task[list[Value]]] = {}
        self._positions: dict[Key, int] = {}
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._values)

    async def get_many(
        self,
        keys: Sequence[Key],
        compute: Callable[[list[Key]], Awaitable[list[Value]]],
    ) -> tuple[list[Value], int]:
        """Returns the values of `keys`, and how many of the keys had to be computed.

        Args:
            keys: may repeat.
            compute: makes the values of the missing keys, all in one call, in their order.

        Raises:
            What `compute` raises, to everyone who waits for that computation.
        """
        found: dict[Key, Value] = {}
        sources: dict[Key, tuple[asyncio.Task[list[Value]], int]] = {}
        missing: list[Key] = []
        for key in dict.fromkeys(keys):
            if key in self._values:
                self._values.move_to_end(key)
                found[key] = self._values[key]
            elif key in self._computing:
                sources[key] = (self._computing[key], self._positions[key])
            else:
                missing.append(key)
        self._metrics.hit(len(found) + len(sources))
        self._metrics.miss(len(missing))
        if missing:
            task = asyncio.ensure_future(self._compute(missing, compute))
            for position, key in enumerate(missing):
                self._computing[key] = task
                self._positions[key] = position
                sources[key] = (task, position)
        for key, (task, position) in sources.items():
            results = await asyncio.shield(task)
            found[key] = results[position]
        return [found[key] for key in keys], len(missing)

    async def _compute(
        self, keys: list[Key], compute: Callable[[list[Key]], Awaitable[list[Value]]]
    ) -> list[Value]:
        try:
            values = await compute(keys)
            for key, value in zip(keys, values, strict=True):
                self._store(key, value)
            return values
        finally:
            for key in keys:
                del self._computing[key], self._positions[key]

    def _store(self, key: Key, value: Value) -> None:
        size = self._size_of(value)
        if size > self._max_bytes:
            return
        evicted = 0
        while self._bytes + size > self._max_bytes:
            _, oldest = self._values.popitem(last=False)
            self._bytes -= self._size_of(oldest)
            evicted += 1
        self._values[key] = value
        self._bytes += size
        self._metrics.evicted(evicted)
        self._metrics.set_bytes(self._bytes)
