"""Which calibration an export uses that names none."""

import numpy as np
import pytest

from build.calibration import own_calibration
from export import Checkpoint
from export.calibration import FORMAT, save_calibration


@pytest.fixture
def runs(monkeypatch):
    """What `calibrate` was called with: the file, and whether it was there."""
    calls = []

    def calibrate(checkpoint, path, prompts, steps, *_):
        calls.append((path, path.is_file()))

    monkeypatch.setattr("build.calibration.calibrate", calibrate)
    return calls


def saved(path, done):
    settings = {"format": FORMAT, "checkpoint": "", "done": done, "total": 2}
    save_calibration(path, settings, *[{"dit/img_in": np.ones(4, np.float32)}] * 2)


def ignore(*_):
    pass


def test_it_is_made_once(checkpoint, runs, tmp_path):
    opened = Checkpoint(checkpoint)
    path = own_calibration(opened, tmp_path, ignore)
    assert runs == [(path, False)]
    saved(path, 1)
    assert own_calibration(opened, tmp_path, ignore) == path  # goes on
    assert runs[1:] == [(path, True)]
    saved(path, 2)
    assert own_calibration(opened, tmp_path, ignore) == path
    assert len(runs) == 2


def test_it_is_another_for_other_checkpoints_and_prompts(
    checkpoint, other_checkpoint, runs, tmp_path, monkeypatch
):
    own_calibration(Checkpoint(checkpoint), tmp_path, ignore)
    own_calibration(Checkpoint(other_checkpoint), tmp_path, ignore)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red fox")
    monkeypatch.setattr("build.calibration.PROMPTS", prompts)
    own_calibration(Checkpoint(checkpoint), tmp_path, ignore)
    assert len({path for path, _ in runs}) == 3
