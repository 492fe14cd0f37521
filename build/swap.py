"""Puts a finished folder in the place of another one in a single step."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build.profile import BuildError

_AT_FDCWD = -100  # fcntl.h
_RENAME_EXCHANGE = 2  # linux/fs.h


@contextmanager
def replaced_when_done(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target` and, if the body succeeds, makes it `target`.

    Whatever ends the body early leaves `target` as it was; the next call clears the remains.

    Raises:
        BuildError: another process is at it.
    """
    staging = target.parent / f".{target.name}.staging"
    with locked(target):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            yield staging
            if target.exists():
                _exchange(staging, target)
            else:
                staging.rename(target)
        finally:
            # Holds the unfinished folder after a failure, the old one after a success.
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Keeps other exports out of `target`. Raises BuildError if one is at it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.parent / f".{target.name}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have removed the file that was opened here.
            current = path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno()))
        except BlockingIOError:
            current = False
        if not current:
            raise BuildError(f"another export into {target} is running: wait for it")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> None:
    """Swaps two folders atomically (renameat2, Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(other))
