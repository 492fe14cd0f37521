"""`python -m serving`, as an operator runs it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.processes import descendants, is_alive
from serving.server import TritonServer
from serving.supervisor import Supervisor
from tests.serving.clients import Waiting, infer
from tests.serving.repositories import make_repository
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


class Service:
    """A `python -m serving` process; its output is in `output`."""

    def __init__(self, repository: Path, *options: str) -> None:
        # Chosen here, so that the tests know them.
        ports = TritonServer(repository)
        self.url = ports.http_url
        self.output = repository / "output.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "serving", "--profile=cpu"),
                    *(f"--repository={repository}", f"--log-file={repository / 'server.log'}"),
                    *(f"--http-port={ports.http_port}", f"--grpc-port={ports.grpc_port}"),
                    *(f"--metrics-port={ports.metrics_port}", "--host=127.0.0.1", *options),
                ],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, text: str, times: int = 1, timeout: float = 30.0) -> None:
        said = self.output.read_text
        wait_until(lambda: said().count(text) >= times, timeout, said)

    def descendants(self) -> list[psutil.Process]:
        return descendants(self.process.pid)

    def server(self) -> psutil.Process:
        return next(process for process in self.descendants() if process.name() == "tritonserver")

    def shared_memory(self) -> list[Path]:
        """The running server's files in /dev/shm."""
        prefix = re.search(r"shm-region-prefix-name=(\S+)", " ".join(self.server().cmdline()))
        assert prefix
        files = list(Path("/dev/shm").glob(f"{prefix[1]}*"))
        assert files
        return files

    def stubs(self, model: str) -> list[psutil.Process]:
        found = []
        for process in self.descendants():
            with contextlib.suppress(psutil.Error):
                if f"/{model}/1/model.py" in " ".join(process.cmdline()):
                    found.append(process)
        return found


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(*options: str, **models: Any) -> Service:
        services.append(Service(make_repository(tmp_path, **models), *options))
        return services[-1]

    yield start
    for service in services:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()


def test_a_dead_stub_frees_the_clients_and_the_service_comes_back(
    serve: Callable[..., Service],
) -> None:
    service = serve()
    service.wait_for("Ready: profile cpu")
    waiting = [Waiting(service.url, "sleeper", 20_000) for _ in range(3)]
    time.sleep(0.5)
    killed = time.monotonic()
    shared_memory = service.shared_memory()
    service.stubs("tiny")[0].kill()
    for request in waiting:
        request.join()
        assert request.error is not None
        assert request.ended - killed < 5
    service.wait_for("Ready: profile cpu", times=2)
    assert "of the model 'tiny' has died." in service.output.read_text()
    assert infer(service.url, "tiny", 1) == 1
    assert not any(file.exists() for file in shared_memory)

    # The server itself.
    service.server().kill()
    service.wait_for("The server has ended by itself (killed by SIGKILL).")
    service.wait_for("Ready: profile cpu", times=3)

    # SIGTERM under load: what can end in time does, and the exit is clean.
    waiting = [Waiting(service.url, "sleeper", 20_000) for _ in range(4)]
    waiting.append(Waiting(service.url, "tiny", 1_500))
    time.sleep(0.5)
    descendants = service.descendants()
    shared_memory = service.shared_memory()
    stopped = time.monotonic()
    service.process.terminate()
    assert service.process.wait() == 0
    assert not any(file.exists() for file in shared_memory)
    assert time.monotonic() - stopped < 10
    for request in waiting:
        request.join()
    assert [request.value for request in waiting] == [None, None, None, None, 1500]
    assert not any(is_alive(process) for process in descendants)


def test_a_model_that_hangs_while_stopping(serve: Callable[..., Service]) -> None:
    service = serve(finalize="time.sleep(60)")
    service.wait_for("Ready: profile cpu")
    stopped = time.monotonic()
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait() == 0
    assert time.monotonic() - stopped < 10


def test_a_second_signal_does_not_wait(serve: Callable[..., Service]) -> None:
    service = serve(finalize="time.sleep(60)")
    service.wait_for("Ready: profile cpu")
    service.process.terminate()
    service.wait_for("Stopping the server.")
    service.process.terminate()
    assert service.process.wait(timeout=2) == 0


def test_a_stop_while_starting(serve: Callable[..., Service]) -> None:
    service = serve(initialize="time.sleep(60)")
    wait_until(lambda: bool(service.stubs("sleeper")), timeout=10)
    service.process.terminate()
    assert service.process.wait(timeout=3) == 0


def test_nothing_outlives_a_killed_supervisor(serve: Callable[..., Service]) -> None:
    service = serve()
    service.wait_for("Ready: profile cpu")
    descendants = service.descendants()
    assert len(descendants) >= 5
    shared_memory = service.shared_memory()
    service.process.kill()
    service.process.wait()
    wait_until(lambda: not any(is_alive(process) for process in descendants), timeout=3)
    assert not any(file.exists() for file in shared_memory)


def test_restarts_are_bounded(tmp_path: Path) -> None:
    """One restart is allowed; the second death, right after it, is the end."""
    server = TritonServer(make_repository(tmp_path, engine=False))
    sentences: list[str] = []

    def kill_a_stub() -> None:
        os.kill(server.stubs()[0].pid, signal.SIGKILL)

    supervisor = Supervisor(
        server, max_restarts=1, report=sentences.append, announce=kill_a_stub, start_timeout=30
    )
    assert supervisor.run() == 1
    assert [sentence.count("has died.") for sentence in sentences] == [1, 0, 1, 0]
    assert sentences[1] == "Starting the server again (1 of 1 times within 10 minutes)."
    assert sentences[3].startswith("error: The server failed 2 times within 10 minutes")
    assert server.process is None


def test_a_failed_start_is_one_sentence(tmp_path: Path) -> None:
    make_repository(tmp_path, profile="h200")
    command = [sys.executable, "-m", "serving", "--profile=cpu", f"--repository={tmp_path}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert "'h200', not for 'cpu'" in run.stderr
