"""Starting variants of the repository, and talking to them with nothing but tritonclient."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc as grpcclient
from onnx.external_data_helper import ExternalDataInfo
from PIL import Image

from build import manifest
from serving.server import TritonServer

_DTYPES = {
    "prompt": "BYTES",
    "negative_prompt": "BYTES",
    "num_inference_steps": "INT32",
    "true_cfg_scale": "FP32",
    "height": "INT32",
    "width": "INT32",
    "seed": "INT64",
    "num_images_per_prompt": "INT32",
    "output_format": "BYTES",
    "response_format": "BYTES",
}
_NUMPY = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32}

# Small and quick; tests change what they are about.
SMALL = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 1}


def tensors(**fields: Any) -> list[grpcclient.InferInput]:
    """The fields of a request as input tensors of shape [1]."""
    inputs = []
    for name, value in fields.items():
        dtype = _DTYPES[name]
        if dtype == "BYTES":
            data = value.encode() if isinstance(value, str) else value
            array = np.array([data], np.object_)
        else:
            array = np.array([value], _NUMPY[dtype])
        tensor = grpcclient.InferInput(name, [1], dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


class Response:
    """What `qwen_image` answered."""

    def __init__(self, result: grpcclient.InferResult) -> None:
        self.encoded = list(result.as_numpy("generated_image"))
        self.images = [np.array(Image.open(io.BytesIO(data))) for data in self.encoded]
        self.seeds = result.as_numpy("seeds").tolist()
        self.metadata = json.loads(result.as_numpy("metadata")[0])


def generate(url: str, request_id: str = "", timeout: int | None = None, **fields: Any) -> Response:
    """One request over gRPC on a connection of its own; `timeout` in µs."""
    with grpcclient.InferenceServerClient(url) as client:
        return Response(
            client.infer("qwen_image", tensors(**fields), request_id=request_id, timeout=timeout)
        )


class Call(threading.Thread):
    """A call in a thread: its `result` or its `error`, and how long it took."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: function(*args, **kwargs)
        self.result: Any = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        started = time.monotonic()
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error
        self.ended_at = time.monotonic()
        self.seconds = self.ended_at - started

    def outcome(self, timeout: float = 60.0) -> Any:
        """Waits for the end; returns the result or raises the error."""
        self.join(timeout)
        assert not self.is_alive(), f"no answer within {timeout} s"
        if self.error:
            raise self.error
        return self.result


def statistics(url: str, model: str) -> tuple[int, int]:
    """Returns (rows inferred, executions) of a model since its start."""
    with grpcclient.InferenceServerClient(url) as client:
        (stats,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return int(stats.get("inference_count", 0)), int(stats.get("execution_count", 0))


def metrics(url: str) -> dict[str, float]:
    """Returns the values of our metrics by name and labels, as Prometheus would read them."""
    with urllib.request.urlopen(url) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("qwen_image_"))
    return {name: float(value) for name, value in pairs}


@contextmanager
def held(server: TritonServer, model: str) -> Iterator[None]:
    """Meanwhile the model computes nothing: what is sent to it waits."""
    pids = [stub.pid for stub in server.stubs() if stub.model == model]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def with_fewer_prompts(gate: Path, folder: Path, count: int) -> Path:
    """Copies a gate with the first of its prompts; returns the folder, which is made."""
    folder.mkdir()
    shutil.copy(gate / "gate.yaml", folder)
    lines = (gate / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def variant(
    repository: Path, target: Path, changes: dict[str, list[tuple[str, str]]], only: str = "."
) -> Path:
    """Copies a repository (hard links) and replaces texts in some of its served files.

    changes: by path below `model_repository`, (old text, new text) that must occur once.
    only: the part of the repository to copy.
    """
    shutil.copytree(repository / only, target / only, copy_function=os.link)
    for name, replacements in changes.items():
        path = target / "model_repository" / name
        text = path.read_text(encoding="utf-8")
        for old, new in replacements:
            assert text.count(old) == 1, f"{name} does not hold {old!r} once"
            text = text.replace(old, new)
        path.unlink()
        path.write_text(text, encoding="utf-8")
    return target


def parameter(name: str, old: str, new: str) -> tuple[str, str]:
    """The replacement that changes one parameter of a config.pbtxt."""
    line = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}'
    return line.format(name, old), line.format(name, new)


def hopper_on_cpu(repository: Path, target: Path) -> Path:
    """A copy of a repository of the profile h200-torch that computes on the CPU."""
    kind = ("kind: KIND_GPU count: 1 gpus: [ 0 ]", "kind: KIND_CPU count: 1")
    engine = [kind, parameter("device", "cuda", "cpu")]
    models = ("text_encoder", "modulation", "dit", "vae_decoder")
    changes = {f"{model}/configs/h200-torch.pbtxt": engine for model in models}
    changes["denoise/configs/h200-torch.pbtxt"] = [
        kind,
        parameter("engine_device", "cuda:0", "cpu"),
    ]
    return variant(repository, target, changes)


def perturb(repository: Path, target: Path, layer: str) -> Path:
    """A copy in which noise as strong as the weights is added to the DiT's `layer`."""
    variant(repository, target, {})
    folder = target / "model_repository" / "dit" / "1"
    data = folder / "model.onnx.data"
    content = bytearray(data.read_bytes())
    rng = np.random.default_rng(0)
    perturbed = 0
    for tensor in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer:
        if tensor.name.startswith(layer) and tensor.name.endswith(".weight"):
            info = ExternalDataInfo(tensor)
            span = slice(info.offset, info.offset + info.length)
            weights = np.frombuffer(content[span], np.float32)
            noise = weights.std() * rng.standard_normal(weights.shape)
            content[span] = (weights + noise).astype(np.float32).tobytes()
            perturbed += 1
    assert perturbed >= 4
    data.unlink()  # it was a link
    data.write_bytes(content)
    described = manifest.read(target)
    assert described is not None
    (target / "manifest.json").unlink()
    manifest.write(target, {**described, "files": manifest.list_files(target, {})})
    return target
