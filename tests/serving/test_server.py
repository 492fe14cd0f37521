"""Starting, stopping and killing a real tritonserver."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from serving import installation, liveness, preflight
from serving.installation import find_installation
from serving.processes import is_alive
from serving.server import ServeError, Stub, TritonServer
from tests.serving.clients import infer
from tests.serving.repositories import make_repository

# As in a container: a Python without packages.
PROBE = [sys.executable, "-I", "-S", str(liveness.__file__), "--http-port"]


def leftovers(server: TritonServer) -> list[Path]:
    """What of the server is still in /dev/shm."""
    return list(Path("/dev/shm").glob(f"{server.shared_memory_prefix}*"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("served"))


def test_two_servers_start_serve_and_stop(
    repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log_path = tmp_path / "server.log"
    with TritonServer(repository, log_path=log_path) as one, TritonServer(repository) as two:
        for server in (one, two):
            assert infer(server.http_url, "sleeper", 1) == 1
            assert infer(server.http_url, "tiny", 2) == 2
            assert [stub.model for stub in server.stubs()] == ["sleeper", "sleeper", "tiny"]
            assert leftovers(server)
            probe = subprocess.run([*PROBE, str(server.http_port)], capture_output=True, text=True)
            assert probe.stdout == "The server is ready, and its 3 Python processes are alive.\n"
            assert probe.returncode == 0
        ports = {one.http_url, one.grpc_url, one.metrics_url, two.http_url, two.grpc_url}
        assert len(ports) == 5
        processes = [psutil.Process(stub.pid) for stub in one.stubs() + two.stubs()]
        begun = time.monotonic()
        assert two.stop() == 0
        assert time.monotonic() - begun < 10
        assert infer(one.http_url, "sleeper", 1) == 1

        # A dead stub: Triton's own health stays green, the probe says which model.
        os.kill(next(stub.pid for stub in one.stubs() if stub.model == "tiny"), signal.SIGKILL)
        assert one.is_ready()
        capfd.readouterr()
        assert liveness.main(["--http-port", str(one.http_port)]) == 1
        assert "'tiny' has 0 living Python processes of 1" in capfd.readouterr().err
        assert one.kill() == -signal.SIGKILL
    assert liveness.main(["--http-port", str(one.http_port)]) == 1
    assert "does not answer" in capfd.readouterr().err
    assert not any(is_alive(process) for process in processes)
    assert leftovers(one) == leftovers(two) == []
    assert "successfully loaded 'tiny'" in log_path.read_text()
    assert one.stop() is None
    assert one.stubs() == []


def test_a_busy_port_is_named(repository: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = TritonServer(repository, metrics_port=port)
        with pytest.raises(ServeError, match=rf"Port {port} on .* choose another .*METRICS_PORT="):
            server.start()
    assert server.process is None
    with pytest.raises(ServeError, match="three different ports"):
        TritonServer(repository, http_port=8000, grpc_port=8000)


def test_what_cannot_be_run_is_named(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"The address no.such.host cannot be used"):
        TritonServer(repository, host="no.such.host")
    with pytest.raises(ServeError, match=r"while starting: .*colour"):
        TritonServer(repository, extra_args=["--colour=1"]).start()

    (tmp_path / "backends/python").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    binary = tmp_path / "bin/tritonserver"
    binary.write_bytes(b"\x7fELF")
    binary.chmod(0o755)
    server = TritonServer(repository, tritonserver=binary)
    with pytest.raises(ServeError, match=r"bin/tritonserver cannot be run: .*Exec format error"):
        server.start()
    log_path = tmp_path / "nowhere/server.log"
    with pytest.raises(ServeError, match=r"The log .* cannot be written"):
        TritonServer(repository, log_path=log_path).start()


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("1/model.py", "import nosuch", "ModuleNotFoundError: No module named 'nosuch'."),
        ("1/model.py", None, "Python model file not found in '"),
        (
            "config.pbtxt",
            'backend: "nosuch"',
            "unable to find backend library for backend 'nosuch'",
        ),
        ("config.pbtxt", "colour: 1", 'has no field named "colour"'),
    ],
)
def test_a_model_that_fails_to_load_is_named(
    file: str, content: str | None, sentence: str, tmp_path: Path
) -> None:
    path = make_repository(tmp_path, engine=False) / "model_repository/sleeper" / file
    server = TritonServer(tmp_path)
    path.unlink()
    if content:
        path.write_text(content)
    with pytest.raises(ServeError) as error:
        server.start(timeout=20)
    assert str(error.value).startswith("The model 'sleeper' failed to load: ")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert server.process is None


def test_a_model_that_raises_or_dies_in_initialize(tmp_path: Path) -> None:
    make_repository(tmp_path / "raises", initialize='raise ValueError("weights do not fit")')
    with pytest.raises(ServeError, match="'sleeper' failed to load: ValueError: weights do not"):
        TritonServer(tmp_path / "raises").start()
    make_repository(tmp_path / "dies", engine=False, initialize="import os; os._exit(3)")
    with pytest.raises(ServeError, match=r"'sleeper' failed to load: Stub process .*it died"):
        TritonServer(tmp_path / "dies").start()


def test_a_model_that_never_gets_ready(tmp_path: Path) -> None:
    server = TritonServer(make_repository(tmp_path, engine=False, initialize="time.sleep(60)"))
    with pytest.raises(ServeError, match=r"not ready after 1 seconds \(still loading: sleeper\)"):
        server.start(timeout=1)
    assert leftovers(server) == []


def test_a_started_server_listens_on_every_port(tmp_path: Path, monkeypatch) -> None:
    # Triton says that it is ready a moment before its metrics' port is open.
    monkeypatch.setattr(TritonServer, "is_ready", lambda server: True)
    with TritonServer(make_repository(tmp_path, engine=False)) as server:
        for port in (server.grpc_port, server.http_port, server.metrics_port):
            socket.create_connection((server.address, port), timeout=2).close()


def test_a_model_that_hangs_while_stopping_is_killed(tmp_path: Path) -> None:
    server = TritonServer(make_repository(tmp_path, engine=False, finalize="time.sleep(60)"))
    server.start()
    stubs = [psutil.Process(stub.pid) for stub in server.stubs()]
    begun = time.monotonic()
    assert server.stop(timeout=2) == -signal.SIGKILL
    assert time.monotonic() - begun < 30
    assert not any(is_alive(stub) for stub in stubs)
    assert leftovers(server) == []


def test_a_server_with_its_own_backends(repository: Path, tmp_path: Path) -> None:
    """The layout of NVIDIA's container: a `tritonserver` on the PATH, its backends beside it."""
    embedded = find_installation()
    python = tmp_path / "stock/backends/python"
    python.mkdir(parents=True)
    files = embedded.backends["python"]
    assert isinstance(files, list)
    for file in files:
        shutil.copy(file, python)
    binary = tmp_path / "stock/bin/tritonserver"
    binary.parent.mkdir()
    libraries, executables = (
        ":".join(map(str, folders)) for folders in (embedded.libraries, embedded.executables)
    )
    binary.write_text(
        f"#!/bin/sh\nexport LD_LIBRARY_PATH={libraries} PATH={executables}:$PATH\n"
        f'exec {embedded.binary} "$@"\n'
    )
    binary.chmod(0o755)
    server = TritonServer(repository, tritonserver=binary)
    assert server.installation.binary == binary
    try:
        server.start()
        assert infer(server.http_url, "tiny", 3) == 3
        assert Stub(server.stubs()[0].pid, "sleeper") == server.stubs()[0]
    finally:
        server.kill()


def test_which_server_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pytriton" in str(find_installation().binary)

    monkeypatch.setattr(preflight, "glibc_version", lambda: (2, 31))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ServeError, match=r"glibc 2.35 .* no `tritonserver` on the PATH either"):
        find_installation()
    monkeypatch.setattr(installation, "_pytriton", lambda: None)
    with pytest.raises(ServeError, match="nvidia-pytriton, which carries the embedded server"):
        find_installation()

    (tmp_path / "bin").mkdir()
    (tmp_path / "backends/python").mkdir(parents=True)
    binary = tmp_path / "bin/tritonserver"
    with pytest.raises(ServeError, match="is not an executable file"):
        find_installation(binary)
    binary.write_text("")
    binary.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(binary))
    assert find_installation().binary == binary
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("TRITONSERVER", str(binary))
    assert find_installation().binary == binary


def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.4.6")
    assert "exchanges garbage with numpy 2.4.6" in str(installation.embedded_problem())
