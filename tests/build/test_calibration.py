"""Which calibration an export uses that names none."""

import numpy as np
import pytest

from build.calibration import own_calibration
from export import Checkpoint, ExportError
from export.calibration import save_calibration


@pytest.fixture
def opened(checkpoint):
    return Checkpoint(checkpoint)


@pytest.fixture
def runs(monkeypatch):
    """What `calibrate` finds when it is called."""
    calls = []
    monkeypatch.setattr(
        "build.calibration.calibrate", lambda checkpoint, path, *_: calls.append(path.is_file())
    )
    return calls


def saved(path, checkpoint, done):
    settings = {"format": 1, "checkpoint": checkpoint, "done": done, "total": 2}
    save_calibration(path, settings, {"dit/img_in": np.ones(4, np.float32)})


def ignore(*_):
    pass


def test_it_is_made_once(opened, runs, tmp_path):
    path, fingerprint = tmp_path / "ranges", opened.describe()["fingerprint"]
    own_calibration(opened, path, ignore)
    assert runs == [False]
    saved(path, fingerprint, 1)
    own_calibration(opened, path, ignore)  # goes on
    assert runs == [False, True]
    saved(path, fingerprint, 2)
    own_calibration(opened, path, ignore)
    assert runs == [False, True]


def test_another_checkpoints_is_replaced(opened, runs, tmp_path):
    saved(tmp_path / "ranges", "0" * 64, 2)
    own_calibration(opened, tmp_path / "ranges", ignore)
    assert runs == [False]


def test_a_damaged_one_is_named(opened, runs, tmp_path):
    (tmp_path / "ranges").write_bytes(b"half")
    with pytest.raises(ExportError, match=r"ranges is no calibration file, or a damaged one"):
        own_calibration(opened, tmp_path / "ranges", ignore)
