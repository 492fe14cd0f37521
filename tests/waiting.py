from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], bool], timeout: float = 10.0, explanation: Callable[[], str] = str
) -> None:
    """explanation: what is told when it did not become so in `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, explanation() or f"not so within {timeout} s"
        time.sleep(0.05)
