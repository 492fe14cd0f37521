import itertools
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from serving.processes import descendants, is_alive
from tests.waiting import wait_until


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process with one child, which has a child of its own and has told its process id."""
    script = "sh -c 'sleep 60 & echo $$; wait' & wait"
    with subprocess.Popen(
        ["/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        for child in [psutil.Process(process.pid), *descendants(process.pid)]:
            child.kill()


def test_descendants(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    found = descendants(parent.pid)
    assert [process.pid for process in found][:1] == [child]
    assert len(found) == 2
    wait_until(lambda: [process.name() for process in found] == ["sh", "sleep"])
    assert descendants(found[-1].pid) == []
    assert all(is_alive(process) for process in found)


def test_a_clock_that_is_set_back_hides_none(
    parent: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parent.stdout is not None
    parent.stdout.readline()
    booted, calls = psutil.boot_time(), itertools.count()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted - next(calls))
    assert len(descendants(parent.pid)) == 2


def test_a_process_with_the_id_of_an_earlier_one_is_found(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    parent.stdout.readline()
    for process in psutil.process_iter():  # it remembers them
        process._ident = (process.pid, -1.0)  # as if the one that it has met had ended
    try:
        assert len(descendants(parent.pid)) == 2
    finally:
        psutil.process_iter.cache_clear()
