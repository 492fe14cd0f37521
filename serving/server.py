"""One tritonserver process on an exported repository."""

import collections
import contextlib
import http.client
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

from serving.engines import built_engines, check_gpu, check_machine, find_gpu, find_tensorrt
from serving.errors import ServeError
from serving.installation import Installation, find_installation
from serving.limits import check_limits
from serving.liveness import STUB_NAME
from serving.processes import descendants, kill_group, wait_for_group
from serving.repository import check_repository

__all__ = ["ServeError", "Stub", "TritonServer"]

# What Triton itself waits, in seconds, for requests in flight and for models to unload; below
# the ten seconds in which a service manager expects an end.
EXIT_TIMEOUT = 5
KILL_TIMEOUT = 5.0  # seconds until a killed process has given back its memory
# Bytes on the first GPU for tensors on their way between models, of which Triton keeps 64 MB by
# default: a guided step with 1024 text tokens at 1024² brings 27 MB in BF16, times eight in flight,
# and what engines put out.
GPU_POOL = 512 * 2**20
LOG_TAIL_LINES = 2000  # tritonserver's usage text alone takes 400
# Triton opens its ports only when the models are loaded. Below 32768 no outgoing connection takes
# one of them meanwhile (Linux' default net.ipv4.ip_local_port_range).
FREE_PORTS = range(20000, 32768)

# Ends the server when the process that started it is killed outright: `sh` waits for the end of
# its standard input. A kernel death signal would follow the starting *thread* instead, and would
# leave the stubs and the shared memory behind.
LEASH = """
read -r group && read -r released && exit 0
[ -n "$group" ] && kill -s KILL -- "-$group" && sleep 0.3
rm -rf -- "$1" /dev/shm/"$2"*
"""


@dataclass(frozen=True)
class Stub:
    """The process of one instance of a Python model."""

    pid: int
    model: str


class TritonServer:
    """A tritonserver with its own backend directory, ports and shared memory.

    Ports that are None are chosen free. The server's output goes to `log_path`, or to the stream
    `log`; without either it is dropped but for its end, which explains failures. `extra_args` are
    added to tritonserver's command line. Also a context manager: starts on entry, stops on exit.

    Raises ServeError from the constructor when the repository, its profile or the server
    installation are not right.
    """

    def __init__(
        self,
        repository: Path,
        profile: str = "cpu",
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        log_path: Path | None = None,
        extra_args: Sequence[str] = (),
        *,
        host: str = "127.0.0.1",
        tritonserver: Path | None = None,
        log: IO[str] | None = None,
    ) -> None:
        self.repository = Path(repository).absolute()
        self.profile = profile
        self.host = host
        self.manifest = check_repository(self.repository, profile)
        check_limits(self.repository / "model_repository", profile)
        self.installation = find_installation(tritonserver)
        self._gpu = find_gpu()
        if built_engines(self.manifest):
            tensorrt = find_tensorrt(self.installation.libraries)
            check_machine(self.manifest, self.installation, tensorrt, self._gpu)
        check_gpu(self.repository / "model_repository", profile, self._gpu)
        self.process: subprocess.Popen[bytes] | None = None
        ports = _distinct_ports(host, [http_port, grpc_port, metrics_port])
        self.http_port, self.grpc_port, self.metrics_port = ports
        self._extra_args = list(extra_args)
        self._log_path = log_path
        self._log = log
        self._tail: collections.deque[str] = collections.deque(maxlen=LOG_TAIL_LINES)
        self._reader: threading.Thread | None = None
        self._runtime: Path | None = None
        self._leash: subprocess.Popen[bytes] | None = None
        # Distinct, so that what a killed server leaves in /dev/shm can be told from another's.
        self.shared_memory_prefix = f"qwen_image_{uuid.uuid4().hex[:12]}_"

    @property
    def address(self) -> str:
        """The address at which this machine reaches the server."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    @property
    def http_url(self) -> str:
        return f"{self.address}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{self.address}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.address}:{self.metrics_port}/metrics"

    def start(self, timeout: float = 120.0, cancelled: Callable[[], bool] | None = None) -> None:
        """Starts the server and returns when every model is ready and every port answers.

        timeout: seconds. cancelled: asked while waiting; once true, the start is given up.
        Raises ServeError when a port is busy, a model fails to load, the server ends, or the time
        is over; nothing is left running then.
        """
        if self.process is not None:
            raise ServeError("The server is running already.")
        for name, port in self._ports().items():
            problem = _port_problem(self.host, port)
            if problem:
                raise ServeError(f"{problem}: choose another with {name}_PORT=<port>.")
        self._tail.clear()
        try:
            self._launch()
            self._wait_until_ready(timeout, cancelled)
        except OSError as error:
            self.kill()
            raise ServeError(
                f"The server {self.installation.binary} cannot be run: {error}."
            ) from None
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout: float = 10.0) -> int | None:
        """Asks the server to end and returns its exit code; kills it after `timeout` seconds.

        Returns None if it was not running, a negative signal number if it was killed.
        """
        if self.process is None:
            return None
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.kill()

    def kill(self) -> int | None:
        """Ends the server and all its stubs at once, and removes what they leave behind."""
        code = None
        if self.process is not None:
            kill_group(self.process.pid)
            code = self.process.wait()
            wait_for_group(self.process.pid, KILL_TIMEOUT)
            self.process = None
        self._clean_up()
        return code

    def stubs(self) -> list[Stub]:
        """The living processes of the Python models."""
        if self.process is None:
            return []
        stubs = []
        for child in descendants(self.process.pid):
            try:
                command = child.cmdline()  # empty for a zombie
            except psutil.Error:
                continue
            if len(command) > 1 and Path(command[0]).name == STUB_NAME:
                # The first argument is <model repository>/<model>/<version>/model.py.
                stubs.append(Stub(child.pid, Path(command[1]).parent.parent.name))
        return sorted(stubs, key=lambda stub: (stub.model, stub.pid))

    def log_tail(self) -> list[str]:
        """The last lines that the server wrote."""
        return list(self._tail)

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _ports(self) -> dict[str, int]:
        return {"HTTP": self.http_port, "GRPC": self.grpc_port, "METRICS": self.metrics_port}

    def _launch(self) -> None:
        try:
            file = self._log_path.open("a", encoding="utf-8") if self._log_path else None
        except OSError as error:
            raise ServeError(
                f"The log {self._log_path} cannot be written ({error.strerror})."
            ) from None
        self._runtime = Path(tempfile.mkdtemp(prefix="qwen_image_serving_"))
        backends = self._runtime / "backends"
        _gather_backends(self.installation, self.repository / "backends", backends)
        # A stub does not start from a path with a space in it; this one has none.
        (self._runtime / "model_repository").symlink_to(self.repository / "model_repository")
        self._leash = subprocess.Popen(
            ["/bin/sh", "-c", LEASH, "sh", str(self._runtime), self.shared_memory_prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.process = subprocess.Popen(
            self._command(backends),
            env=self._environment(),
            # The working folder is the first entry of the stubs' sys.path.
            cwd=self._runtime,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._leash.stdin is not None
        self._leash.stdin.write(b"%d\n" % self.process.pid)
        self._leash.stdin.flush()
        assert self.process.stdout is not None
        self._reader = threading.Thread(
            target=self._read_log, args=(self.process.stdout, file), name="triton-log", daemon=True
        )
        self._reader.start()

    def _command(self, backends: Path) -> list[str]:
        command = [
            str(self.installation.binary),
            f"--model-repository={backends.parent / 'model_repository'}",
            f"--model-config-name={self.profile}",
            f"--backend-directory={backends}",
            f"--http-address={self.host}",
            f"--grpc-address={self.host}",
            f"--metrics-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            "--strict-readiness=true",
            # The configurations are complete; to complete them, Triton would start every Python
            # model twice.
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={EXIT_TIMEOUT}",
        ]
        for backend in ("python", "engine"):
            command.append(
                f"--backend-config={backend},shm-region-prefix-name={self.shared_memory_prefix}"
            )
        if self._gpu is not None:
            command.append(f"--cuda-memory-pool-byte-size=0:{GPU_POOL}")
        if self.installation.caches is not None:
            command.append(f"--cache-directory={self.installation.caches}")
        return command + self._extra_args

    def _environment(self) -> dict[str, str]:
        # Paths and texts are UTF-8 whatever the locale of whoever starts it.
        environment = dict(os.environ) | {"LC_ALL": "C.UTF-8"}
        for variable, folders in (
            ("LD_LIBRARY_PATH", self.installation.libraries),
            ("PATH", self.installation.executables),
        ):
            values = [str(folder) for folder in folders]
            if environment.get(variable):
                values.append(environment[variable])
            if values:
                environment[variable] = ":".join(values)
        return environment

    def _read_log(self, output: IO[bytes], file: IO[str] | None) -> None:
        """Copies the server's output to where it belongs, until the last process closes it."""
        sinks = [sink for sink in (self._log, file) if sink is not None]
        for raw in output:
            line = raw.decode("utf-8", "replace")
            self._tail.append(line.rstrip("\n"))
            for sink in list(sinks):
                try:
                    sink.write(line)
                    sink.flush()
                except (OSError, ValueError):  # a full disk, a closed terminal
                    sinks.remove(sink)  # the server would block if nobody read its output
        output.close()
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _wait_until_ready(self, timeout: float, cancelled: Callable[[], bool] | None) -> None:
        assert self.process is not None
        deadline = time.monotonic() + timeout
        # Triton answers that it is ready before it has opened the port of its metrics.
        while not (self.is_ready() and self._listens()):
            ended = self.process.poll() is not None
            if ended and self._reader is not None:
                self._reader.join(1.0)
            # Triton would load the other models, however long they take, before it ends.
            reason = load_failure(self.log_tail())
            if ended and reason is None:
                reason = _end_of_server(self.log_tail(), self.process.returncode)
            if reason is not None:
                raise ServeError(reason)
            if cancelled is not None and cancelled():
                raise ServeError("The start was given up.")
            if time.monotonic() > deadline:
                raise ServeError(
                    f"The server was not ready after {timeout:g} seconds"
                    f"{_still_loading(self.log_tail())}."
                )
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """Whether the server says that it and all its models are ready."""
        connection = http.client.HTTPConnection(self.address, self.http_port, timeout=2.0)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _listens(self) -> bool:
        for port in self._ports().values():
            try:
                socket.create_connection((self.address, port), timeout=2.0).close()
            except OSError:
                return False
        return True

    def _clean_up(self) -> None:
        if self._reader is not None:
            self._reader.join(1.0)
        if self._leash is not None and self._leash.stdin is not None:
            with contextlib.suppress(OSError):  # it was killed
                self._leash.stdin.write(b"released\n" * 2)  # the first may be read as the group
                self._leash.stdin.close()
            self._leash.wait()
        for leftover in Path("/dev/shm").glob(f"{self.shared_memory_prefix}*"):
            leftover.unlink(missing_ok=True)
        if self._runtime is not None:
            shutil.rmtree(self._runtime, ignore_errors=True)
        self._reader = self._leash = self._runtime = None


def load_failure(log: Sequence[str]) -> str | None:
    """The first model that the server's output says failed to load, and why: one sentence."""
    for number, line in enumerate(log):
        failed = re.search(r"failed to load '([^']+)' version \d+: (.*)", line)
        failed = failed or re.search(r"failed to load model '([^']+)': (.*)", line)
        failed = failed or re.search(r"Poll failed for model directory '([^']+)': (.*)", line)
        # Triton itself keeps waiting for a stub that has ended so.
        failed = failed or re.search(
            r"preinitialize Python stub: (?=.*/([^/]+)/\d+/[^/]+$)(.*)", line
        )
        if failed is None:
            continue
        # Python's message; the traceback after it, in which Triton escapes the line ends, is for
        # the log.
        reason = failed[2].split("\\n")[0].rstrip('" ')
        reason = re.sub(r"^(Internal|Unknown): ", "", reason)
        if "failed to read text proto" in reason and "libprotobuf ERROR" in log[number - 1]:
            reason += " (" + log[number - 1].split("] ", 1)[-1].rstrip(".") + ")"
        if "is not healthy" in reason:
            reason = reason.rstrip(".") + " (it died; its last words are in the log)"
        return f"The model {failed[1]!r} failed to load: {reason.rstrip('.')}."
    return None


def _still_loading(log: Sequence[str]) -> str:
    text = "\n".join(log)
    started = re.findall(r'"loading: (\S+):\d+"', text)
    loaded = set(re.findall(r"successfully loaded '(\S+)'", text))
    models = [model for model in dict.fromkeys(started) if model not in loaded]
    return f" (still loading: {', '.join(models)})" if models else ""


def _end_of_server(log: Sequence[str], code: int) -> str:
    """One sentence on why a server ended while starting, from its output and exit code."""
    busy = re.search(
        r"failed to start (\S+) service: \S+ - (.*?)\s*\"?$", "\n".join(log), re.MULTILINE
    )
    if busy:
        return f"The server's {busy[1]} service failed to start: {busy[2]}."
    errors = [line for line in log if line.startswith("error") or "unrecognized option" in line]
    last = next((line for line in reversed(errors or log) if line.strip()), "it wrote nothing")
    return f"The server ended with code {code} while starting: {last.strip()}"


def _gather_backends(installation: Installation, ours: Path, target: Path) -> None:
    """Fills `target` with the installation's backends and our own in `ours`."""
    target.mkdir()
    for name, source in installation.backends.items():
        if isinstance(source, Path):
            (target / name).symlink_to(source)
            continue
        (target / name).mkdir()
        for file in source:
            # Not a link: Triton refuses a library that "escapes backend directory".
            shutil.copy(file, target / name)
    for folder in sorted(ours.iterdir()) if ours.is_dir() else []:
        if folder.is_dir() and not (target / folder.name).exists():
            (target / folder.name).symlink_to(folder)


def _distinct_ports(host: str, ports: Sequence[int | None]) -> list[int]:
    """The given ports, those that are None replaced by free ones."""
    named = [port for port in ports if port is not None]
    if len(set(named)) < len(named):
        raise ServeError(f"HTTP, gRPC and metrics need three different ports, not {named}.")
    problem = _port_problem(host, 0)
    if problem:
        raise ServeError(f"{problem}: choose an address of this machine.")
    chosen: list[int] = []
    for port in ports:
        while port is None:
            candidate = random.SystemRandom().choice(FREE_PORTS)
            if candidate not in named + chosen and _port_problem(host, candidate) is None:
                port = candidate
        chosen.append(port)
    return chosen


def _port_problem(host: str, port: int) -> str | None:
    """Why a server cannot listen there; None if it can."""
    with socket.socket() as probe:
        # As servers do: the connections of one that has just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            place = f"Port {port} on {host}" if port else f"The address {host}"
            return f"{place} cannot be used ({error.strerror})"
    return None
