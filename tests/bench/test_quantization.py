"""What was measured of quantized engines' pictures keeps its margins."""

import json

import pytest

from bench.common import RESULTS
from tests.conftest import ROOT

REFERENCE = ROOT / "quality" / "gates" / "tiny" / "reference" / "quality.json"


@pytest.mark.parametrize(
    ("profile", "margin"), [("cpu-fp8", 0.02), ("cpu-int8", 0.02), ("cpu-nvfp4", 0.05)]
)
def test_scores_stay_near_those_in_fp32(profile, margin):
    found = json.loads((RESULTS / "quantization.json").read_text())["profiles"][profile]
    assert found["score"] >= json.loads(REFERENCE.read_text())["score"] - margin
    assert not found["comparison"]["worse"]
