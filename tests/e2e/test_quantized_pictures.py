"""Some of the gate's pictures by quantized engines, served: as good as those in FP32.

Margins of 0.02 for FP8 and INT8 and of 0.05 for NVFP4 hold for all 200 (`bench.quantization`, whose
result `tests/bench/test_quantization.py` reads); of 40 chance alone moves a score by 0.03.
"""

import pytest

from build.tiny import CALIBRATION
from export.progress import ignore_progress
from quality.gate import load_gate
from quality.run import load_run, measure
from quality.served import Served
from serving.server import TritonServer
from tests.conftest import ROOT, exported
from tests.e2e.serving_helpers import with_fewer_prompts

GATE = ROOT / "quality" / "gates" / "tiny"
PICTURES = 40


@pytest.mark.parametrize(
    ("profile", "margin"), [("cpu-fp8", 0.05), ("cpu-int8", 0.05), ("cpu-nvfp4", 0.1)]
)
def test_the_pictures_stay_good(profile, margin, tiny_checkpoint, tmp_path):
    repository = exported(f"tiny-{profile}", tiny_checkpoint, profile, CALIBRATION)
    gate = load_gate(with_fewer_prompts(GATE, tmp_path / "gate", PICTURES))
    with TritonServer(repository, profile) as server, Served(server.grpc_url) as served:
        result = measure(gate, served, tmp_path / "run", None, ignore_progress)
    exact = load_run(load_gate(GATE).reference).result["pictures"][:PICTURES]
    assert [one["prompt"] for one in exact] == [one["prompt"] for one in result["pictures"]]
    wanted = sum(one["score"] for one in exact) / PICTURES
    assert result["score"] >= wanted - margin
