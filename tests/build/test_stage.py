"""Finished stages are kept, everything else is made anew."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from build.stage import ENTRY, make_stage, place, read_stage
from tests.conftest import ROOT

MADE_FROM = {"checkpoint": "c0ffee", "recipe": {"fp8": ["a", "b"]}, "shapes": (1, 2)}


def make(folder):
    (folder / "engine").write_bytes(b"engine")
    return {"precision": "fp8"}


def never(folder):
    raise AssertionError("it is there already")


def test_a_finished_stage_is_not_made_again(tmp_path):
    stage = tmp_path / "stages" / "dit"
    assert make_stage(stage, MADE_FROM, make) == {"precision": "fp8"}
    assert make_stage(stage, MADE_FROM, never) == {"precision": "fp8"}
    assert [path.name for path in stage.parent.iterdir()] == ["dit"]


def edit(stage, **changes):
    path = stage / ENTRY
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stage: (stage / ENTRY).unlink(),
        lambda stage: (stage / ENTRY).write_text((stage / ENTRY).read_text()[:-10]),
        lambda stage: (stage / ENTRY).write_text("[]"),
        lambda stage: (stage / ENTRY).write_text("{}"),
        lambda stage: (stage / ENTRY).write_text("[" * 100_000),
        lambda stage: edit(stage, result={}),
        lambda stage: edit(stage, digest=None),
        lambda stage: (stage / "engine").write_bytes(b"ENGINE"),
        lambda stage: (stage / "engine").write_bytes(b"engin"),
        lambda stage: (stage / "engine").unlink(),
        lambda stage: (stage / "another").touch(),
    ],
)
def test_what_is_not_whole_is_made_again(spoil, tmp_path):
    stage = tmp_path / "dit"
    make_stage(stage, MADE_FROM, make)
    spoil(stage)
    assert read_stage(stage, MADE_FROM) is None
    make_stage(stage, MADE_FROM, make)
    assert read_stage(stage, MADE_FROM) == {"precision": "fp8"}
    assert {path.name for path in stage.iterdir()} == {"engine", ENTRY}


def test_what_a_file_browser_left_does_not_count(tmp_path):
    make_stage(tmp_path / "dit", MADE_FROM, make)
    (tmp_path / "dit" / ".DS_Store").touch()
    assert read_stage(tmp_path / "dit", MADE_FROM) == {"precision": "fp8"}


def test_a_stage_made_from_something_else_is_made_again(tmp_path):
    stage = tmp_path / "dit"
    make_stage(stage, MADE_FROM, make)
    changed = {**MADE_FROM, "shapes": (1, 3)}
    assert read_stage(stage, changed) is None
    with pytest.raises(AssertionError, match="there already"):
        make_stage(stage, changed, never)
    # The stale one is gone, since the new one needs its place on the disk.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left")])
def test_an_interruption_leaves_nothing(error, tmp_path):
    def fail(folder):
        make(folder)
        raise error

    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        make_stage(tmp_path / "dit", MADE_FROM, fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["build.stage.checksums", "build.stage.write_whole"])
def test_a_kill_before_the_entry_leaves_no_stage(moment, tmp_path):
    script = (
        "import os, sys, pathlib\nimport build.stage\n"
        "from tests.build.test_stage import MADE_FROM, make\n"
        f"{moment} = lambda *_: os.kill(os.getpid(), 9)\n"
        "build.stage.make_stage(pathlib.Path(sys.argv[1]) / 'dit', MADE_FROM, make)\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False)
    assert result.returncode == -9
    assert (tmp_path / "dit" / "engine").is_file()
    assert read_stage(tmp_path / "dit", MADE_FROM) is None
    assert make_stage(tmp_path / "dit", MADE_FROM, make) == {"precision": "fp8"}


@pytest.mark.parametrize("links", [True, False])
def test_files_are_placed_without_copies_where_that_can_be(links, tmp_path, monkeypatch):
    make_stage(tmp_path / "dit", MADE_FROM, make)
    if not links:

        def refuse(source, target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "repository"
    target.mkdir()
    checksums = place(tmp_path / "dit", target)
    assert {name: entry["bytes"] for name, entry in checksums.items()} == {"engine": 6}
    assert [path.name for path in target.iterdir()] == ["engine"]
    assert Path(target, "engine").read_bytes() == b"engine"
    assert Path(target, "engine").samefile(tmp_path / "dit" / "engine") == links


def test_files_that_were_moved_and_linked_are_placed_themselves(tmp_path):
    make_stage(tmp_path / "dit", MADE_FROM, make)
    moved = (tmp_path / "dit" / "engine").rename(tmp_path / "moved")
    (tmp_path / "dit" / "engine").symlink_to("../moved")
    target = tmp_path / "elsewhere" / "repository"
    target.mkdir(parents=True)
    place(tmp_path / "dit", target)
    assert not (target / "engine").is_symlink()
    assert (target / "engine").samefile(moved)
