"""A real Triton server whose models are fakes (fake_models/denoise.py says what they do)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "fake_models"


class FakeServer:
    """Takes free ports and keeps them over `kill` and `start`."""

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec("pytriton")
        if spec is None or spec.origin is None:
            raise RuntimeError("nvidia-pytriton, which carries the server, is not installed")
        self._triton = Path(spec.origin).parent / "tritonserver"
        self._folder = folder
        self._journal = folder / "journal"
        http_port, grpc_port, metrics_port = free_ports(3)
        self.urls = {"http": f"127.0.0.1:{http_port}", "grpc": f"127.0.0.1:{grpc_port}"}
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        backend = folder / "backends" / "python"
        shutil.copytree(self._triton / "backends" / "python", backend)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = self._triton / "python_backend_stubs" / version / "triton_python_backend_stub"
        shutil.copy(stub, backend)
        (backend / stub.name).chmod(0o755)
        for config in MODELS.glob("*.pbtxt"):
            model = folder / "models" / config.stem
            (model / "1").mkdir(parents=True)
            shutil.copy(config, model / "config.pbtxt")
            if config.with_suffix(".py").exists():
                shutil.copy(config.with_suffix(".py"), model / "1" / "model.py")
        self._command = [
            str(self._triton / "bin" / "tritonserver"),
            f"--model-repository={folder / 'models'}",
            f"--backend-directory={folder / 'backends'}",
            f"--http-port={http_port}",
            f"--grpc-port={grpc_port}",
            f"--metrics-port={metrics_port}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
        ]

    def start(self) -> None:
        libraries = self._triton.parent.parent / "nvidia_pytriton.libs"
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": f"{libraries}:{sysconfig.get_config_var('LIBDIR')}",
            # The stub finds packages by one or the other, depending on the machine.
            "PYTHONPATH": sysconfig.get_path("purelib"),
            "VIRTUAL_ENV": sys.prefix,
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "JOURNAL": str(self._journal),
        }
        log = self._folder / "log"
        with log.open("w") as output:
            self.process = subprocess.Popen(
                self._command, env=environment, stdout=output, stderr=output
            )
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://{self.urls['http']}/v2/health/ready"):
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the fake server did not start:\n{log.read_text()[-3000:]}")

    def kill(self) -> None:
        """Its stubs end by themselves a moment later."""
        self.process.send_signal(signal.SIGCONT)  # in case a test stopped it
        self.process.kill()
        self.process.wait()

    def journal(self, request_id: str | None = None) -> list[dict[str, Any]]:
        """What happened at the server, in order: to one request, or to all."""
        if not self._journal.exists():
            return []
        entries = map(json.loads, self._journal.read_text().splitlines())
        return [entry for entry in entries if request_id in (None, entry["id"])]

    def count(self, request_id: str, event: str) -> int:
        return [entry["event"] for entry in self.journal(request_id)].count(event)

    def cancelled(self, request_id: str) -> bool:
        """Whether the last cancellation that came for this request hit it."""
        cancels = [e for e in self.journal(request_id) if e["event"] == "cancel"]
        return bool(cancels) and cancels[-1]["cancelled"] == 1

    def id_of(self, negative_prompt: str, seconds: float = 10.0) -> str:
        """Waits for the request with this negative prompt."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for entry in self.journal():
                tensors = entry.get("tensors", {})
                if tensors.get("negative_prompt", ["", [], ""])[2] == negative_prompt:
                    return entry["id"]
            time.sleep(0.02)
        raise AssertionError(f"no request with the negative prompt {negative_prompt!r} came")

    def wait_for(self, request_id: str, event: str, seconds: float = 5.0) -> dict[str, Any]:
        """The journal's first such entry, which may be about to come."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for entry in self.journal(request_id):
                if entry["event"] == event:
                    return entry
            time.sleep(0.01)
        raise AssertionError(f"no {event} of {request_id}: {self.journal(request_id)}")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
