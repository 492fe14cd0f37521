"""Progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tqdm import tqdm


class ProgressBar:
    """One bar for each thing that is being done; without a terminal, one line for each."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
            self._what = what
            if sys.stderr.isatty():
                self._bar = tqdm(total=total, desc=what, initial=done)
            else:
                print(what, file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def say_once(what: str = "exporting to engines (kept for the next time) …") -> Callable[..., None]:
    """A progress that prints one line when something begins, and nothing where nothing is done."""
    said: list[bool] = []

    def progress(*_: object) -> None:
        if not said:
            print(what, flush=True)
            said.append(True)

    return progress
