"""How far an export is, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tqdm import tqdm

# (what is being done, steps done, steps in all)
Progress = Callable[[str, int, int], None]


def ignore_progress(what: str, done: int, total: int) -> None:
    """For those who do not want to know."""


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
