"""Keeps a server running: ends it when one of its Python processes dies, and starts it again.

Triton does not notice a dead stub: its requests are never answered, the server stays "ready", and
an orderly shutdown waits for it in vain. So the whole server is killed then, which gives every
waiting client an error at once.
"""

import collections
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import psutil

from serving.errors import ServeError
from serving.liveness import Unhealthy, expected_stubs
from serving.processes import is_alive, kill_group
from serving.server import TritonServer

# Seconds between two looks at the stubs: a dead one is seen far within the five seconds promised.
WATCH_INTERVAL = 0.25
# Service managers kill after ten seconds (Docker's default), and cleaning up takes some of them.
STOP_TIMEOUT = 8.0
PAUSE_BEFORE_RESTART = 0.5
ANSWER_TIMEOUT = 10.0  # seconds, for the models' configs


class Supervisor:
    """Runs `server` until it is told to stop or has failed too often.

    max_restarts within window seconds are allowed. report is called with each sentence for the
    operator. announce is called whenever the server is ready.
    """

    def __init__(
        self,
        server: TritonServer,
        *,
        start_timeout: float = 600.0,
        max_restarts: int = 5,
        window: float = 600.0,
        report: Callable[[str], None] = print,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        self.server = server
        self._start_timeout = start_timeout
        self._max_restarts = max_restarts
        self._window = window
        self._report = report
        self._announce = announce
        self._stopping = threading.Event()
        self._restarts: collections.deque[float] = collections.deque()

    def run(self) -> int:
        """Blocks until the end; returns the exit code: 0 after a wanted stop, 1 otherwise.

        In the main thread, SIGTERM, SIGINT and SIGHUP stop it; a second one kills the server.
        """
        with self._signals():
            try:
                failure = self._serve()
            except ServeError as error:
                if not self._stopping.is_set():
                    self._report(f"error: {error}")
                    return 1
                return 0
            while failure is not None:
                self._report(f"error: {failure}")
                if not self._may_restart():
                    self._report(
                        f"error: The server failed {self._max_restarts + 1} times within "
                        f"{self._window / 60:g} minutes and is not started again."
                    )
                    return 1
                self._report(
                    f"Starting the server again ({len(self._restarts)} of {self._max_restarts} "
                    f"times within {self._window / 60:g} minutes)."
                )
                if self._stopping.wait(PAUSE_BEFORE_RESTART):
                    break
                try:
                    failure = self._serve()
                except ServeError as error:
                    failure = None if self._stopping.is_set() else str(error)
            return 0

    def stop(self) -> None:
        """Makes run() end; may be called from any thread."""
        self._stopping.set()

    def _serve(self) -> str | None:
        """Runs the server once; returns what ended it, or None when it was told to stop."""
        self.server.start(self._start_timeout, cancelled=self._stopping.is_set)
        self._announce()
        try:
            failure = self._watch()
            if failure is None:
                self._report("Stopping the server.")
                told = time.monotonic()
                killed = self.server.stop(STOP_TIMEOUT) == -signal.SIGKILL
                if killed and time.monotonic() - told >= STOP_TIMEOUT:
                    self._report(f"It did not end within {STOP_TIMEOUT:g} seconds and was killed.")
                elif killed:
                    self._report("It was killed before it had ended.")
            return failure
        finally:
            self.server.kill()

    def _watch(self) -> str | None:
        """Waits for the stop, or for the death of a process: returns which, as a sentence."""
        server = self.server
        stubs = server.stubs()
        try:
            # One that has died since its model was loaded is not among the living any more.
            expected = expected_stubs(server.address, server.http_port, ANSWER_TIMEOUT)
            expected.subtract(stub.model for stub in stubs)
            for model in (model for model, missing in expected.items() if missing > 0):
                return f"A Python process of the model {model!r} has died."
            processes = [(psutil.Process(stub.pid), stub) for stub in stubs]
        except (Unhealthy, psutil.NoSuchProcess) as error:
            return str(error)
        while not self._stopping.wait(WATCH_INTERVAL):
            code = server.process.poll() if server.process is not None else None
            if code is not None:
                return f"The server has ended by itself ({_ended(code)})."
            for process, stub in processes:
                if not is_alive(process):
                    return f"The Python process {stub.pid} of the model {stub.model!r} has died."
        return None

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._window:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return False
        self._restarts.append(now)
        return True

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if self._stopping.is_set() and self.server.process is not None:
                kill_group(self.server.process.pid)
            self._stopping.set()

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under `nohup`
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
