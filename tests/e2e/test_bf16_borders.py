"""BF16 between `denoise` and the engines, as GPU profiles have it: here with engines that convert
at their borders, on the CPU, and a server that passes what numpy cannot hold."""

import os
import re

import numpy as np

from quality.distances import cosine
from quality.gate import Prompt
from quality.served import Served
from serving.server import TritonServer
from tests.e2e.serving_helpers import generate, variant

# Takes the place of runtimes/onnx.py, which moves to _onnx.py: FP32 inside, BF16 at the borders.
RUNTIME = """
import torch

from runtimes import TensorSpec, _onnx

EXACT = ("timestep", "latents")


class Runtime:
    device = "cpu"

    def __init__(self, artifact, parameters, gpu):
        self._runtime = _onnx.Runtime(artifact, parameters, gpu)
        self.inputs, self.outputs = (
            [
                TensorSpec(name, "BF16" if dtype == "FP32" and name not in EXACT else dtype)
                for name, dtype in specs
            ]
            for specs in (self._runtime.inputs, self._runtime.outputs)
        )

    def run(self, batch):
        arrays = {}
        for name, dtype in self.inputs:
            assert (batch[name].dtype == torch.bfloat16) == (dtype == "BF16")
            arrays[name] = (batch[name].float() if dtype == "BF16" else batch[name]).numpy()
        results = self._runtime.run(arrays)
        return {
            name: torch.from_numpy(results[name]).to(
                torch.bfloat16 if dtype == "BF16" else torch.uint8
            )
            for name, dtype in self.outputs
        }

    def close(self):
        pass
"""


def bf16_repository(repository, target):
    variant(repository, target, {})
    runtime = target / "backends" / "engine" / "runtimes" / "onnx.py"
    os.link(runtime, runtime.with_name("_onnx.py"))
    edit(runtime, lambda text: RUNTIME)
    models = target / "model_repository"
    for model in ("text_encoder", "modulation", "dit"):
        edit(models / model / "config.pbtxt", bf16_borders)
    placed = 'parameters { key: "engine_dtype" value { string_value: "BF16" } }\n'
    edit(models / "denoise" / "config.pbtxt", lambda text: text + placed)
    return target


def bf16_borders(config):
    return re.sub(r'("(?!timestep)\w+" data_type: TYPE_)FP32', r"\1BF16", config)


def edit(path, change):
    text = change(path.read_text(encoding="utf-8"))
    path.unlink()  # a link to the repository that other tests serve
    path.write_text(text, encoding="utf-8")


def test_pictures_through_bf16_borders_are_almost_those_through_fp32(tiny_repository, tmp_path):
    request = {"prompt": "a red circle on the left, white background", "seed": 1}
    request |= {"height": 128, "width": 128, "num_inference_steps": 8, "num_images_per_prompt": 2}
    prompt = Prompt(request)
    latents = np.random.default_rng(0).standard_normal((16, 16, 16), np.float32)
    with TritonServer(tiny_repository) as server, Served(server.grpc_url) as served:
        exact = generate(server.grpc_url, **request)
        exact_noise = served.predict_noise(prompt, latents, 0.6)
    with TritonServer(bf16_repository(tiny_repository, tmp_path / "bf16")) as server:
        rounded = generate(server.grpc_url, **request)
        again = generate(server.grpc_url, **request)
        with Served(server.grpc_url) as served:  # past the ensemble, from outside
            noise = served.predict_noise(prompt, latents, 0.6)
    assert again.metadata["cache"]["prompt"] == "hit" and again.encoded == rounded.encoded
    difference = np.abs(np.array(exact.images, float) - np.array(rounded.images, float))
    assert 0 < difference.mean() < 4 < np.std(exact.images)  # of 255
    assert noise.dtype == np.float32 and 0.999 < cosine(noise, exact_noise) < 1 - 1e-7
