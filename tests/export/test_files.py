"""What is said of a file that could not be written."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest

from export.files import reason


def test_a_copy_names_both_ends(tmp_path: Path) -> None:
    """The full disk is the second one's."""
    (tmp_path / "engine").write_bytes(bytes(100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(OSError) as error:
            shutil.copyfile(tmp_path / "engine", tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = reason(error.value, "elsewhere")
    assert said == f"{tmp_path / 'engine'} → {tmp_path / 'copy'}: File too large"


def test_a_write_that_names_no_file_is_placed() -> None:
    with pytest.raises(OSError) as error:
        Path("/dev/full").write_bytes(b"engine")
    assert reason(error.value, "artifacts") == "artifacts: No space left on device"


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(OSError) as error:
        Path("/nowhere").read_bytes()
    assert reason(error.value, "artifacts") == "/nowhere: No such file or directory"
