"""The check that runs before anything is installed."""

import ast
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from serving import liveness, preflight

Usage = namedtuple("Usage", "total used free")
STANDALONE = [Path(str(preflight.__file__)), Path(str(liveness.__file__))]


def test_this_machine_passes() -> None:
    problems, _ = preflight.setup_problems()
    assert problems == []


@pytest.mark.parametrize("file", STANDALONE, ids=lambda file: file.name)
def test_needs_no_package(file: Path) -> None:
    command = [sys.executable, "-I", "-S", str(file), "--help"]
    assert subprocess.run(command, capture_output=True, timeout=30).returncode == 0


@pytest.mark.parametrize("file", STANDALONE, ids=lambda file: file.name)
def test_older_pythons_can_read_it(file: Path) -> None:
    ast.parse(file.read_text(), feature_version=(3, 7))


@pytest.mark.parametrize("version", [(3, 9, 1), (3, 13, 0)])
def test_unsupported_pythons(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    problems, _ = preflight.setup_problems()
    assert len(problems) == 1
    assert "is not supported: install Python 3.10 to 3.12" in problems[0]


@pytest.mark.parametrize(
    ("target", "value", "sentence"),
    [
        ("platform.machine", lambda: "aarch64", "x86-64 processor, and this one is aarch64"),
        ("os.confstr", lambda name: "glibc 2.31", "glibc 2.35 or newer, and this system has 2.31"),
        ("os.confstr", lambda name: None, "this system has another C library"),
        ("serving.preflight.libpython", lambda: None, "install the package libpython3."),
    ],
)
def test_a_missing_need_is_named_unless_there_is_another_server(
    target: str,
    value: object,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(target, value)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    problems, notes = preflight.setup_problems()
    assert len(problems) == 1
    assert sentence in problems[0]
    assert notes == []

    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    problems, notes = preflight.setup_problems()
    assert problems == []
    assert sentence in notes[0]
    assert "/opt/tritonserver" in notes[1]


def test_little_shared_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1 << 30, 0, 10 << 20))
    problems, notes = preflight.setup_problems()
    assert problems == []
    assert "/dev/shm has 10 MB free" in notes[0]
    assert "the setup takes up to" in notes[1]


def test_the_command_ends_with_one_sentence_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preflight.main() == 0
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.31")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert preflight.main() == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: The embedded server needs")
