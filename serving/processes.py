"""Processes of a server that are not children of this one."""

import collections
import contextlib
import os
import signal
import time

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Whether the process runs; a zombie, which only waits for its parent to notice, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """The process's children, theirs and so on; none when it has ended.

    psutil's own children() leaves out those that seem older than their parent, which all do for
    whom the system's clock is set back a little in between.
    """
    children = collections.defaultdict(list)
    for number in psutil.pids():  # process_iter() keeps processes whose ids others have by now
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(number)
            children[process.ppid()].append(process)
    found: list[psutil.Process] = []
    parents = [pid]
    while parents:
        young = children.pop(parents.pop(), [])
        found += young
        parents += [process.pid for process in young]
    return found


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def wait_for_group(group: int, timeout: float) -> None:
    """Returns when no process of the group lives, or after `timeout` seconds.

    A killed process takes a while to give back its memory, and that of a GPU.
    """
    deadline = time.monotonic() + timeout
    while _living_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    # Orphans become children of a process that is the first of its container.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            pass


def _living_members(group: int) -> list[int]:
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == group and is_alive(psutil.Process(pid)):
                members.append(pid)
    return members
