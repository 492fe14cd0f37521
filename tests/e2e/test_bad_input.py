import json
import math
import urllib.error
import urllib.request

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.e2e.serving_helpers import SMALL, generate, metrics, tensors

STEPS = "qwen_image_steps_total"
INVALID = 'qwen_image_requests_total{outcome="invalid"}'

# Changed fields, and what the sentence must say: the field, the value, what is allowed.
CASES = [
    ({"prompt": b"\xff\xfe fox"}, ["prompt", "0xff", "UTF-8"]),
    ({"negative_prompt": b"caf\xe9"}, ["negative_prompt", "0xe9", "UTF-8"]),
    ({"prompt": "1" * 1100}, ["prompt", "1105 tokens", "1024"]),
    ({"negative_prompt": "1" * 1020}, ["negative_prompt", "1025 tokens", "1024"]),
    ({"height": 100}, ["height", "100", "multiple of 16"]),
    ({"width": 1}, ["width", "1", "multiple of 16", "from 16"]),
    ({"height": 0}, ["height", "0", "from 16"]),
    ({"width": -16}, ["width", "-16", "from 16"]),
    ({"height": 1 << 20}, ["height", "1048576", "to 4096"]),
    ({"height": 4096, "width": 4096}, ["4096×4096", "16777216", "2768896"]),
    ({"num_inference_steps": 0}, ["num_inference_steps", "0", "from 1 to 100"]),
    ({"num_inference_steps": -1}, ["num_inference_steps", "-1", "from 1 to 100"]),
    ({"num_inference_steps": 101}, ["num_inference_steps", "101", "from 1 to 100"]),
    ({"true_cfg_scale": math.nan}, ["true_cfg_scale", "nan", "from 1"]),
    ({"true_cfg_scale": math.inf}, ["true_cfg_scale", "inf", "from 1"]),
    ({"true_cfg_scale": -4.0}, ["true_cfg_scale", "-4", "from 1"]),
    ({"true_cfg_scale": 0.99}, ["true_cfg_scale", "0.99", "from 1"]),
    ({"seed": -1}, ["seed", "-1", "from 0"]),
    ({"seed": 2**63 - 1, "num_images_per_prompt": 2}, ["seed", str(2**63 - 1), str(2**63 - 2)]),
    ({"num_images_per_prompt": 0}, ["num_images_per_prompt", "0", "from 1 to 4"]),
    ({"num_images_per_prompt": 5}, ["num_images_per_prompt", "5", "from 1 to 4"]),
    ({"output_format": "gif"}, ["output_format", "'gif'", "png, jpeg, webp"]),
    ({"response_format": "url"}, ["response_format", "'url'", "bytes, b64"]),
]


def refusal(url, **fields):
    with pytest.raises(InferenceServerException) as error:
        generate(url, **({"prompt": "x"} | SMALL | fields))
    assert error.value.status() == "StatusCode.INVALID_ARGUMENT"
    return error.value.message()


@pytest.mark.parametrize(("fields", "said"), CASES, ids=[str(case[0])[:40] for case in CASES])
def test_a_bad_field_is_refused_before_any_work(server, fields, said):
    before = metrics(server.metrics_url)
    message = refusal(server.grpc_url, **fields)
    for part in said:
        assert part in message
    assert "Traceback" not in message and "\n" not in message
    after = metrics(server.metrics_url)
    assert after[STEPS] == before[STEPS]
    assert after[INVALID] == before[INVALID] + 1


def test_missing_prompt(server):
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="prompt is missing"),
    ):
        client.infer("qwen_image", tensors(**SMALL))


@pytest.mark.parametrize(
    ("name", "nearest"), [("guidance_scale", "true_cfg_scale"), ("num_inferense_steps", "num_in")]
)
def test_a_misspelt_field_is_not_ignored(server, name, nearest):
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match=f"'{name}': did you mean '{nearest}"),
    ):
        client.infer("qwen_image", tensors(prompt="x", **SMALL), parameters={name: "7"})


def test_a_bad_timeout_of_the_generate_endpoint(server):
    body = {"prompt": "x", "timeout": "soon", **SMALL}
    url = f"http://{server.http_url}/v2/models/qwen_image/generate"
    request = urllib.request.Request(url, json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert "timeout is 'soon'" in json.loads(error.value.read())["error"]


def test_denoise_called_directly_guards_itself(server):
    ids = grpcclient.InferInput("input_ids", [3], "INT64")
    ids.set_data_from_numpy(np.arange(3))
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="input_ids holds 3 token ids"),
    ):
        client.infer("denoise", [ids])


def test_after_two_hundred_of_them_the_server_is_as_good_as_before(server):
    def memory():
        return sum(psutil.Process(stub.pid).memory_info().rss for stub in server.stubs())

    def refuse(count):
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            for number in range(count):
                fields, _ = CASES[number % len(CASES)]
                with pytest.raises(InferenceServerException):
                    client.infer("qwen_image", tensors(**({"prompt": "x"} | SMALL | fields)))

    refuse(len(CASES))
    before = memory()
    refuse(200)
    assert memory() - before < 20 * 2**20
    assert len(generate(server.grpc_url, prompt="a good one", **SMALL).images) == 1
