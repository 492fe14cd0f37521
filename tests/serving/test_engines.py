"""Engines of another GPU, library, checkpoint or recipe are refused before a server is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from serving.engines import Gpu, check_machine, find_tensorrt
from serving.errors import ServeError
from serving.installation import Installation
from serving.repository import check_repository
from serving.server import TritonServer
from tests.serving.repositories import make_repository

CHECKPOINT, OTHER = "c0ffee" * 10 + "0000", "decade" * 10 + "0000"
B300 = Gpu("NVIDIA B300", "sm103")
TENSORRT = Installation(Path("/opt/tritonserver/bin/tritonserver"), {"tensorrt": Path("/")}, [], [])
PLAN = {
    "artifact": "model.plan",
    "precision": "fp8",
    "library": "tensorrt",
    "version": "10.13.3.9",
    "target": "sm103",
    "device": "NVIDIA B300",
    "made_from": {"checkpoint": CHECKPOINT, "recipe": "a" * 64},
}
RTX = {
    **PLAN,
    "artifact": "model.rtx",
    "library": "tensorrt_rtx",
    "target": "sm120",
    "device": None,
}


def manifest_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {"checkpoint": {"fingerprint": CHECKPOINT}, "engines": {"dit": entry}}


def served(folder: Path, entry: dict[str, Any], description: dict[str, Any] | str) -> Path:
    """A repository whose manifest says `entry`, with `description` beside the engine."""
    make_repository(folder, profile="b300")
    engine = folder / "model_repository/dit/1"
    engine.mkdir(parents=True)
    text = description if isinstance(description, str) else json.dumps(description)
    (engine / "model.json").write_text(text)
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **manifest_of(entry)}))
    return folder


def test_an_engine_where_it_belongs_is_accepted(tmp_path: Path) -> None:
    check_repository(served(tmp_path, PLAN, PLAN), "b300")
    for version in ("10.13.3", None):
        check_machine(manifest_of(PLAN), TENSORRT, version, B300)
    check_machine(manifest_of(RTX), TENSORRT, None, Gpu("NVIDIA GeForce RTX 5090", "sm120"))
    check_machine({"engines": {"dit": {"artifact": "model.onnx"}}}, TENSORRT, None, None)


@pytest.mark.parametrize(
    ("entry", "tensorrt", "gpu", "said"),
    [
        (PLAN, "10.14.1", B300, "built by TensorRT 10.13.3, and the server here has 10.14.1"),
        (PLAN, None, None, r"built for NVIDIA B300 \(sm103\), and there is no GPU here"),
        (RTX, None, None, r"built for GPUs \(sm120\), and there is no GPU here: .*--gpus all"),
        (
            PLAN,
            None,
            Gpu("NVIDIA H200", "sm90"),
            "built for sm103, and the GPU here, NVIDIA H200, is sm90: .* a profile for sm90",
        ),
        (
            PLAN,
            None,
            Gpu("NVIDIA B300 PCIe", "sm103"),
            "timed on NVIDIA B300, and the GPU here is NVIDIA B300 PCIe",
        ),
    ],
)
def test_another_machine_is_refused_with_both_sides(
    entry: dict[str, Any], tensorrt: str | None, gpu: Gpu | None, said: str
) -> None:
    with pytest.raises(ServeError, match=said) as error:
        check_machine(manifest_of(entry), TENSORRT, tensorrt, gpu)
    assert str(error.value).startswith(f"The engine dit ({entry['artifact']})")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"made_from": {**PLAN["made_from"], "checkpoint": OTHER}}, "checkpoint decade.*c0ffee"),
        ({"made_from": {**PLAN["made_from"], "recipe": "b" * 64}}, "the recipe b{12}….* a{12}…"),
        ({"version": "11.0.0.1"}, "library tensorrt 11.0.0.1, .* tensorrt 10.13.3.9"),
        ({"target": "sm100"}, "architecture sm100, and this repository is of sm103"),
    ],
)
def test_a_foreign_engine_is_refused_with_both_sides(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ServeError, match=rf"dit/1/model\.plan is of .*{said}.*make export"):
        check_repository(served(tmp_path, PLAN, {**PLAN, **changed}), "b300")


@pytest.mark.parametrize(
    "description",
    [
        "",
        "[" * 100_000,
        "[]",
        "null",
        "{}",
        json.dumps({**PLAN, "made_from": None}),
        json.dumps({**PLAN, "made_from": {}}),
    ],
)
def test_an_engine_without_a_description_is_refused(description: str, tmp_path: Path) -> None:
    with pytest.raises(
        ServeError, match=r"model\.json (cannot be read \(|does not describe)[^\n']*$"
    ):
        check_repository(served(tmp_path, PLAN, description), "b300")


def test_a_server_without_the_backend_is_refused(tmp_path: Path) -> None:
    repository = served(tmp_path, PLAN, PLAN)
    (repository / "model_repository/dit/config.pbtxt").write_text("max_batch_size: 8")
    with pytest.raises(ServeError, match=r"TensorRT backend, and .* has none: .*tritonserver:<yy"):
        TritonServer(repository, "b300")


def test_tensorrt_is_known_by_its_librarys_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.engines.LIBRARY_FOLDERS", ())
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert find_tensorrt([tmp_path]) is None
    for name in ("libnvinfer.so.10", "libnvinfer.so.10.13.3", "libnvinfer_plugin.so.10.14.1"):
        (tmp_path / name).touch()
    assert find_tensorrt([tmp_path]) == "10.13.3"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert find_tensorrt() == "10.13.3"
    (tmp_path / "libnvinfer.so.11.0.0").touch()
    assert find_tensorrt() is None  # which of them the server takes is not known
