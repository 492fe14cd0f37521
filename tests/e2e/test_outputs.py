import io

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from PIL import Image

from tests.e2e.serving_helpers import SMALL, generate, tensors

UNSEEDED = {name: value for name, value in SMALL.items() if name != "seed"}


def infer(server, outputs=None, **fields):
    requested = [grpcclient.InferRequestedOutput(name) for name in outputs] if outputs else None
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        return client.infer("qwen_image", tensors(prompt="x", **fields), outputs=requested)


def test_every_image_has_its_seed(server):
    result = infer(server, num_images_per_prompt=3, **SMALL)
    assert result.as_numpy("seeds").tolist() == [1, 2, 3]
    assert result.as_numpy("seed").tolist() == [1]


def test_a_drawn_seed_is_returned_and_repeats_the_picture(server):
    result = infer(server, **UNSEEDED)
    (seed,) = result.as_numpy("seeds").tolist()
    assert 0 <= seed < 2**53
    assert result.as_numpy("seed") is None
    again = infer(server, seed=seed, **UNSEEDED)
    assert again.as_numpy("generated_image")[0] == result.as_numpy("generated_image")[0]
    assert infer(server, **UNSEEDED).as_numpy("seeds")[0] != seed


def test_images_of_one_request_are_those_of_their_seeds_alone(server):
    together = generate(server.grpc_url, prompt="x", num_images_per_prompt=2, **SMALL)
    alone = generate(server.grpc_url, prompt="x", **(SMALL | {"seed": 2}))
    difference = together.images[1].astype(int) - alone.images[0].astype(int)
    assert np.abs(difference).max() <= 1
    assert np.abs(together.images[0].astype(int) - together.images[1].astype(int)).max() > 20


@pytest.mark.parametrize("outputs", [["generated_image"], ["metadata"], ["seeds", "metadata"]])
def test_a_client_may_ask_for_some_of_the_outputs(server, outputs):
    result = infer(server, outputs=outputs, **SMALL)
    assert {output.name for output in result.get_response().outputs} == set(outputs)


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_output_formats(server, output_format):
    response = generate(server.grpc_url, prompt="x", output_format=output_format, **SMALL)
    assert Image.open(io.BytesIO(response.encoded[0])).format == output_format.upper()
    assert response.metadata["output_format"] == output_format


def test_the_checkpoints_own_size_is_the_default(server):
    response = generate(server.grpc_url, prompt="x", num_inference_steps=1)
    assert response.images[0].shape == (256, 256, 3)
