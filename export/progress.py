"""How far an export is."""

from __future__ import annotations

from collections.abc import Callable

# (what is being done, steps done, steps in all)
Progress = Callable[[str, int, int], None]


def ignore_progress(what: str, done: int, total: int) -> None:
    """For those who do not want to know."""
