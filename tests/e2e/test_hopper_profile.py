"""The profile h200-torch from its checkpoint to pictures: on a Hopper GPU as it is, elsewhere the
same arithmetic in plain torch, through the same weights, runtime and BF16 borders."""

import json

import numpy as np
import pytest

from build.tiny import CALIBRATION
from serving.engines import find_gpu
from serving.errors import ServeError
from serving.server import TritonServer
from tests import conftest
from tests.e2e.serving_helpers import generate, hopper_on_cpu
from tests.e2e.test_direct_calls import one_of_a_batch_fails


@pytest.fixture(scope="module")
def exported(tiny_checkpoint):
    return conftest.exported("h200-torch", tiny_checkpoint, "h200-torch", CALIBRATION)


def test_the_manifest_says_what_is_in_fp8(exported):
    engines = json.loads((exported / "manifest.json").read_text())["engines"]
    # Two of the six blocks: two at either end, and three layers outside, stay in BF16.
    assert engines["dit"]["layers"] == {"fp8": 2 * 12, "bf16": 4 * 12 + 3}
    assert engines["dit"]["attention"] == "fp8"
    # The MLPs of two of its four layers.
    assert engines["text_encoder"]["layers"] == {"fp8": 2 * 3, "bf16": 4 * 4 + 2 * 3}
    for engine in engines.values():
        assert (engine["runtime"], engine["artifact"]) == ("safetensors", "model.safetensors")
        assert engine["verified"]["max_abs_error"] <= 1  # of the graph, in FP32; of pixels, of 255


def test_its_pictures_are_nearly_those_in_fp32(exported, tiny_repository, tmp_path):
    request = {"prompt": "a red circle on the left, white background", "seed": 1}
    request |= {"height": 128, "width": 128, "num_inference_steps": 8}
    with TritonServer(tiny_repository) as server:
        exact = generate(server.grpc_url, **request).images[0].astype(float)
    gpu = find_gpu()
    on_hopper = gpu is not None and gpu.sm == "sm90"
    repository = exported if on_hopper else hopper_on_cpu(exported, tmp_path / "cpu")
    with TritonServer(repository, "h200-torch") as server:
        ours = generate(server.grpc_url, **request, negative_prompt="blue square")
        ours = generate(server.grpc_url, **request).images[0].astype(float)
        one_of_a_batch_fails(server, "input_ids holds ids from 1000000 to 1000000; the text encod")
    assert 0 < np.abs(exact - ours).mean() < 8 < np.std(exact)  # of 255


@pytest.mark.skipif(find_gpu() is not None, reason="there is a GPU")
def test_without_a_gpu_it_is_not_started(exported):
    with pytest.raises(ServeError, match=r"^The profile 'h200-torch' puts \w+ on a GPU, and there"):
        TritonServer(exported, "h200-torch")
