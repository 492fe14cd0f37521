"""Models called past the ensemble: what one caller does wrong must not reach the others."""

import threading

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.e2e.serving_helpers import SMALL, Call, generate, tensors

TYPES = {"float32": "FP32", "int32": "INT32", "int64": "INT64", "bool": "BOOL"}


def as_inputs(arrays):
    inputs = []
    for name, array in arrays.items():
        tensor = grpcclient.InferInput(name, list(array.shape), TYPES[str(array.dtype)])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def denoise_inputs(**changes):
    ids = {name: np.arange(40) for name in ("input_ids", "negative_input_ids")} | changes
    scalars = tensors(true_cfg_scale=4.0, num_images_per_prompt=1, **SMALL)
    return as_inputs(ids) + scalars


def infer(server, model, inputs, outputs=None):
    requested = [grpcclient.InferRequestedOutput(name) for name in outputs] if outputs else None
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        return client.infer(model, inputs, outputs=requested)


def test_a_batch_that_fails_is_answered_request_by_request(server):
    one_of_a_batch_fails(server, "the engine failed on")


def one_of_a_batch_fails(server, said):
    """Eight `text_encoder` calls of one shape, one with an id beyond the vocabulary."""
    start = threading.Barrier(8)

    def encode(number):
        ids = np.full((1, 50), 10**6 if number == 3 else number, np.int64)
        start.wait()
        return infer(server, "text_encoder", as_inputs({"input_ids": ids}))

    for _ in range(3):  # the eight need not meet in a batch every time
        start.reset()
        calls = [Call(encode, number) for number in range(8)]
        for number, call in enumerate(calls):
            if number == 3:
                with pytest.raises(InferenceServerException, match=said):
                    call.outcome()
            else:
                assert call.outcome().as_numpy("hidden_states").shape[1] == 50 - 34
    assert generate(server.grpc_url, prompt="x", **SMALL).images


@pytest.mark.parametrize("outputs", [["record"], ["seeds"], ["latents"], ["latents", "seeds"]])
def test_denoise_gives_any_of_its_outputs(server, outputs):
    for _ in range(3):
        result = infer(server, "denoise", denoise_inputs(), outputs)
        assert {output.name for output in result.get_response().outputs} == set(outputs)


def test_denoise_refuses_ids_beyond_the_vocabulary(server):
    ids = np.arange(40)
    ids[7] = 10**6
    with pytest.raises(InferenceServerException, match="input_ids holds ids from 0 to 1000000"):
        infer(server, "denoise", denoise_inputs(input_ids=ids))


def test_encode_image_with_a_broken_record_answers_in_one_sentence(server):
    pixels = grpcclient.InferInput("pixels", [1, 16, 16, 3], "UINT8")
    pixels.set_data_from_numpy(np.zeros((1, 16, 16, 3), np.uint8))
    texts = []
    for name, text in (("record", "{}"), ("output_format", "png"), ("response_format", "bytes")):
        tensor = grpcclient.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode()], np.object_))
        texts.append(tensor)
    with pytest.raises(InferenceServerException) as error:
        infer(server, "encode_image", [pixels, *texts])
    assert "Traceback" not in error.value.message() and "File" not in error.value.message()
