"""The profiles' configurations, read and checked by a real tritonserver.

It has no TensorRT backend and no GPU here: a stand-in answers to the names of the engines'
backends, and instances are put on the CPU.
"""

import json
import shutil
import urllib.request
from pathlib import Path

import pytest

from build.profile import load_profile, profile_names
from serving.server import TritonServer
from tests.conftest import ROOT
from tests.serving.repositories import write_manifest

MODELS = ROOT / "model_repository"
STAND_IN = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
GPU, CPU = "kind: KIND_GPU count: 1 gpus: [ 0 ]", "kind: KIND_CPU count: 1"
PROFILES = [name for name in profile_names() if load_profile(name).on_gpu]


def test_only_what_differs_is_a_file_of_its_own() -> None:
    names = {path.stem for path in MODELS.glob("*/configs/*.pbtxt")}
    assert names == set(PROFILES)


# The others are links to b300.
@pytest.mark.parametrize("profile", ["ampere", "b300", "h200-torch", "rtx"])
def test_a_server_takes_every_configuration(profile: str, tmp_path: Path) -> None:
    shutil.copytree(MODELS, tmp_path / "model_repository")
    for model in ("tokenize", "denoise", "encode_image"):
        (tmp_path / "model_repository" / model / "1" / "model.py").write_text(STAND_IN)
    for path in tmp_path.glob("model_repository/*/configs/*.pbtxt"):
        text = path.read_text(encoding="utf-8")
        assert text.count(GPU) == (0 if path.parts[-3] == "tokenize" else 1)
        path.write_text(text.replace(GPU, CPU), encoding="utf-8")
    for backend in ("engine", "tensorrt"):
        (tmp_path / "backends" / backend).mkdir(parents=True)
        (tmp_path / "backends" / backend / "model.py").write_text(STAND_IN)
    write_manifest(tmp_path, profile, {})
    with TritonServer(tmp_path, profile) as server:
        url = f"http://{server.http_url}/v2/models/dit/config"
        with urllib.request.urlopen(url) as answer:
            served = json.load(answer)
    engine = load_profile(profile).engines["dit"]
    assert served["max_batch_size"] == (engine.shapes[0]["batch"][2] if engine.shapes else 8)
    assert served["backend"] == ("tensorrt" if engine.runtime == "tensorrt" else "engine")
