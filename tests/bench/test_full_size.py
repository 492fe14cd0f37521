"""The full-size benchmarks: what they refuse, and their export at a small size."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import compile_full_size, full_size
from bench.common import measured_export
from export import Checkpoint
from tests.make_checkpoint import cached_checkpoint


@pytest.mark.parametrize("bench", [full_size, compile_full_size])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--blocks", "0"], r"argument --blocks: invalid positive value: '0'$"),
        (["--work", "/nowhere"], r"/nowhere is no folder$"),
        (["--blocks", "99999"], r" has \d+ GB free, but \d+ are needed: name another folder"),
    ],
)
def test_impossible_arguments(
    bench: Any,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        bench.main()
    assert re.search(sentence, capsys.readouterr().err.strip().splitlines()[-1])


def test_the_measured_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small checkpoint, with the same made-up calibration and recipes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # its threads would only wait for each other
    checkpoint = cached_checkpoint(blocks=3)
    calibration = full_size.made_up_calibration(Checkpoint(checkpoint), tmp_path / "ranges")
    recipes = full_size.PRECISIONS["nvfp4"]
    result = measured_export(checkpoint, tmp_path / "engines", recipes, calibration)
    assert result["layers"]["dit"]["nvfp4"] and result["layers"]["text_encoder"]["fp8"]
    assert result["imports_gb"] < result["peak_gb"] < 4
    assert result["engines_gb"].keys() == recipes.keys()
    assert {"dit: trace", "dit: verify", "dit: weights"} <= result["step_seconds"].keys()


def test_random_weights_have_the_right_sizes() -> None:
    pool = np.random.default_rng(0).standard_normal(compile_full_size.POOL, np.float32)
    shape = (1200, 4096)  # more than a piece
    tensors = [compile_full_size.RandomTensor(name, shape, pool) for name in ("one", "other")]
    one, other = (np.concatenate(list(tensor.chunks())).reshape(shape) for tensor in tensors)
    assert (one != other).mean() > 0.99
    assert one.std() * 4096**0.5 == pytest.approx(1, rel=1e-2)
