"""What is refused before a server is started."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build import manifest
from serving.errors import ServeError
from serving.repository import check_repository
from tests.serving.repositories import make_repository

CHECKPOINT = Path("model_repository/checkpoint.json")
ENGINE = Path("model_repository/tiny/1/model.onnx")
CONFIG = Path("model_repository/tiny/config.pbtxt")


def edit_manifest(repository: Path, **changes: Any) -> None:
    path = repository / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


def test_an_exported_repository_is_accepted(repository: Path) -> None:
    assert check_repository(repository, "cpu")["profile"] == "cpu"


def test_configs_and_python_files_may_be_edited(repository: Path) -> None:
    (repository / CONFIG).write_text((repository / CONFIG).read_text() + "# slower\n")
    (repository / "backends/engine/model.py").write_text("")
    check_repository(repository, "cpu")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda r: (r / "manifest.json").unlink(), ["not an exported repository"]),
        (lambda r: (r / "manifest.json").write_text("{"), ["manifest.json cannot be read"]),
        (lambda r: (r / "manifest.json").write_text("[]"), ["not a manifest of format 1"]),
        (lambda r: edit_manifest(r, format=2), ["not a manifest of format 1"]),
        (lambda r: edit_manifest(r, files=[]), ["manifest.json", "or lacks fields"]),
        (lambda r: edit_manifest(r, files={"a": {}}), ["manifest.json", "or lacks fields"]),
        (lambda r: edit_manifest(r, checkpoint={}), ["manifest.json", "or lacks fields"]),
        (lambda r: edit_manifest(r, engines={"dit": None}), ["manifest.json", "or lacks fields"]),
        (lambda r: (r / ENGINE).unlink(), [str(ENGINE), "is missing"]),
        (lambda r: (r / CONFIG).unlink(), [str(CONFIG), "is missing"]),
        (lambda r: (r / ENGINE).write_bytes(b"x"), [str(ENGINE), "has 1 bytes", "16384"]),
        (lambda r: flip_a_byte(r / ENGINE), [str(ENGINE), "is corrupt"]),
        (lambda r: flip_a_byte(r / CHECKPOINT), [str(CHECKPOINT), "is corrupt"]),
    ],
)
def test_damage_is_named_and_the_export_is_advised(
    repository: Path, damage: Callable[[Path], object], words: list[str]
) -> None:
    damage(repository)
    with pytest.raises(ServeError) as error:
        check_repository(repository, "cpu")
    sentence = str(error.value)
    assert all(word in sentence for word in [*words, "make export", "PROFILE=cpu"])
    assert "\n" not in sentence


def test_a_repository_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"There is no repository at .*nowhere: run `make export "):
        check_repository(tmp_path / "nowhere", "cpu")
    (tmp_path / "nowhere.onnx").mkdir()
    with pytest.raises(ServeError, match=r"kept in .*nowhere\.onnx: run `make export .* goes on"):
        check_repository(tmp_path / "nowhere", "cpu")


def test_another_profile_is_refused_with_both_names(repository: Path) -> None:
    with pytest.raises(ServeError, match="for the profile 'cpu', not for 'h200'"):
        check_repository(repository, "h200")


def test_of_large_files_samples_are_compared(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("build.manifest", "serving.repository"):
        monkeypatch.setattr(f"{module}.HASHED_BYTES", 1000)
    monkeypatch.setattr("build.manifest._SAMPLE_BYTES", 10)
    edit_manifest(repository, files=manifest.list_files(repository, {}))
    check_repository(repository, "cpu")
    engine = repository / ENGINE
    written = engine.read_bytes()
    for place in (0, len(written) - 1):
        engine.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        with pytest.raises(ServeError, match=r"another file of the same size .* `make export "):
            check_repository(repository, "cpu")
    # The same engine of another checkpoint, say.
    engine.write_bytes(bytes(255 - byte for byte in written))
    with pytest.raises(ServeError, match=r"the SHA-256 \w{12}…, those of the manifest's \w{12}…"):
        check_repository(repository, "cpu")
    # An older export wrote no samples.
    edit_manifest(
        repository,
        files={
            name: {"bytes": entry["bytes"], "sha256": entry["sha256"]}
            for name, entry in manifest.list_files(repository, {}).items()
        },
    )
    check_repository(repository, "cpu")
