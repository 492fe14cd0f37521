"""A real Triton server whose models are fakes (fake_models/denoise.py says what they do)."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from serving.server import TritonServer
from tests.waiting import wait_until

MODELS = Path(__file__).parent / "fake_models"


class FakeServer:
    """Takes free ports and keeps them over `kill` and `start`."""

    def __init__(self, folder: Path) -> None:
        self._journal = folder / "journal"
        for config in MODELS.glob("*.pbtxt"):
            model = folder / "model_repository" / config.stem
            (model / "1").mkdir(parents=True)
            shutil.copy(config, model / "config.pbtxt")
            if config.with_suffix(".py").exists():
                shutil.copy(config.with_suffix(".py"), model / "1" / "model.py")
        manifest = {
            "format": 1,
            "profile": "cpu",
            "inputs": "",
            "checkpoint": {"fingerprint": ""},
            "versions": {},
            "engines": {},
            "files": {},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
        self._triton = TritonServer(folder, log_path=folder / "log")
        self.urls = {"http": self._triton.http_url, "grpc": self._triton.grpc_url}
        self.metrics_url = self._triton.metrics_url

    def start(self) -> None:
        self._triton.start(timeout=60.0)

    def kill(self) -> None:
        self._triton.kill()

    @property
    def pid(self) -> int:
        assert self._triton.process is not None
        return self._triton.process.pid

    def journal(self, request_id: str | None = None) -> list[dict[str, Any]]:
        """What happened at the server, in order: to one request, or to all."""
        if not self._journal.exists():
            return []
        entries = map(json.loads, self._journal.read_text().splitlines())
        return [entry for entry in entries if request_id in (None, entry["id"])]

    def count(self, request_id: str, event: str) -> int:
        return [entry["event"] for entry in self.journal(request_id)].count(event)

    def cancelled(self, request_id: str) -> bool:
        """Whether a cancellation that came for this request hit it."""
        return any(entry.get("cancelled") == 1 for entry in self.journal(request_id))

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

    def wait_for(self, request_id: str, event: str, seconds: float = 5.0) -> None:
        """Waits for the journal's first such entry."""
        wait_until(
            lambda: self.count(request_id, event) > 0,
            seconds,
            lambda: f"no {event} of {request_id}: {self.journal(request_id)}",
        )
