"""Small exported repositories for a real tritonserver, with models that misbehave when told to."""

import hashlib
import json
import textwrap
from pathlib import Path

MODEL = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
{initialize}

    def execute(self, requests):
        responses = []
        for request in requests:
            milliseconds = pb_utils.get_input_tensor_by_name(request, "milliseconds").as_numpy()
            time.sleep(float(milliseconds.flat[0]) / 1000)
            output = pb_utils.Tensor("slept", milliseconds.astype(np.float32))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses

    def finalize(self):
{finalize}
"""

CONFIG = """
backend: "{backend}"
max_batch_size: 0
input [{{ name: "milliseconds" data_type: TYPE_INT32 dims: [1] }}]
output [{{ name: "slept" data_type: TYPE_FP32 dims: [1] }}]
instance_group [{{ count: {instances} kind: KIND_CPU }}]
"""


def make_repository(
    folder: Path,
    *,
    profile: str = "cpu",
    engine: bool = True,
    instances: int = 2,
    initialize: str = "pass",
    finalize: str = "pass",
) -> Path:
    """Writes a REPOSITORY with the model `sleeper` and, if `engine`, the model `tiny`.

    `sleeper` is a Python model with `instances` processes; it sleeps for the milliseconds of its
    input. `initialize` and `finalize` are statements for its methods of these names. `tiny` is
    the same model through a backend named "engine". Both have an artifact and a manifest.
    """
    files: dict[str, bytes] = {}
    source = _model_source(initialize, finalize)
    files["model_repository/sleeper/config.pbtxt"] = _config("python", instances)
    files["model_repository/sleeper/1/model.py"] = source
    files["model_repository/checkpoint.json"] = b'{"format": 1}'
    if engine:
        files["model_repository/tiny/config.pbtxt"] = _config("engine", 1)
        files["model_repository/tiny/1/model.onnx"] = bytes(range(256)) * 64
        files["backends/engine/model.py"] = _model_source("import neighbour", "pass")
        files["backends/engine/neighbour.py"] = b"VALUE = 1\n"
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_manifest(folder, profile, files)
    return folder


def write_manifest(folder: Path, profile: str, files: dict[str, bytes]) -> None:
    """The manifest of a repository without engines, by the contents of its files."""
    manifest = {
        "format": 1,
        "profile": profile,
        "inputs": "",
        "checkpoint": {"fingerprint": ""},
        "versions": {},
        "engines": {},
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _config(backend: str, instances: int) -> bytes:
    return CONFIG.format(backend=backend, instances=instances).encode()


def _model_source(initialize: str, finalize: str) -> bytes:
    indented = [textwrap.indent(code, " " * 8) for code in (initialize, finalize)]
    return MODEL.format(initialize=indented[0], finalize=indented[1]).encode()
