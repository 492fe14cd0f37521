import asyncio
import json
import time
import uuid

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from qwen_image_client import AsyncClient, Client, RequestCancelledError
from tests.e2e.serving_helpers import SMALL, Call, generate, metrics, tensors
from tests.waiting import wait_until

STEPS = "qwen_image_steps_total"
CANCELLED = 'qwen_image_requests_total{outcome="cancelled"}'
# Takes several seconds on any machine.
LONG = {"prompt": "a long one", "height": 512, "width": 512, "num_inference_steps": 100, "seed": 1}


def value(server, name):
    return metrics(server.metrics_url)[name]


def wait_for_a_step(server, before):
    wait_until(lambda: value(server, STEPS) > before, timeout=30)


def assert_freed(server, cancelled_before):
    wait_until(lambda: value(server, CANCELLED) == cancelled_before + 1)
    wait_until(lambda: value(server, "qwen_image_in_flight") == 0)
    steps = value(server, STEPS)
    time.sleep(0.5)
    assert value(server, STEPS) == steps, "it went on"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_through_the_client_without_touching_the_others(server, protocol):
    steps, cancelled = value(server, STEPS), value(server, CANCELLED)
    expected = generate(server.grpc_url, prompt="another", **SMALL)
    url = server.grpc_url if protocol == "grpc" else server.http_url
    with Client(url, protocol) as client:
        handle = client.submit(**LONG)
        wait_for_a_step(server, steps)
        other = Call(generate, server.grpc_url, prompt="another", **SMALL)
        handle.cancel()
        with pytest.raises(RequestCancelledError):
            handle.result(timeout=20)
    assert other.outcome().encoded == expected.encoded
    assert_freed(server, cancelled)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_cancelled_task_of_the_async_client_reaches_the_server(server, protocol):
    steps, cancelled = value(server, STEPS), value(server, CANCELLED)
    url = server.grpc_url if protocol == "grpc" else server.http_url

    async def scenario():
        async with AsyncClient(url, protocol) as client:
            task = asyncio.create_task(client.generate(**LONG))
            while value(server, STEPS) == steps:
                await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    assert_freed(server, cancelled)


def test_directly_at_denoise_by_the_parameter(server):
    steps, cancelled = value(server, STEPS), value(server, CANCELLED)
    request_id = str(uuid.uuid4())
    call = Call(generate, server.grpc_url, request_id=request_id, **LONG)
    wait_for_a_step(server, steps)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        answer = client.infer("denoise", [], parameters={"cancel": request_id})
        assert json.loads(answer.as_numpy("record")[0]) == {"cancelled": 1}
        unknown = client.infer("denoise", [], parameters={"cancel": "no such request"})
        assert json.loads(unknown.as_numpy("record")[0]) == {"cancelled": 0}
        with pytest.raises(InferenceServerException, match="cancel is empty"):
            client.infer("denoise", [], parameters={"cancel": ""})
    with pytest.raises(InferenceServerException, match="cancelled by the parameter") as error:
        call.outcome()
    assert error.value.status() == "StatusCode.CANCELLED"
    assert_freed(server, cancelled)


def test_directly_at_denoise_by_cancelling_the_grpc_call(server):
    """A direct call's cancellation is seen by the model itself."""
    import numpy as np

    steps, cancelled = value(server, STEPS), value(server, CANCELLED)
    inputs = [
        tensor for tensor in tensors(**LONG) if tensor.name() not in ("prompt", "output_format")
    ]
    scale = tensors(true_cfg_scale=4.0, num_images_per_prompt=1)
    for name in ("input_ids", "negative_input_ids"):
        ids = grpcclient.InferInput(name, [40], "INT64")
        ids.set_data_from_numpy(np.arange(40, dtype=np.int64))
        inputs.append(ids)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        call = client.async_infer("denoise", inputs + scale, callback=lambda result, error: None)
        wait_for_a_step(server, steps)
        call.cancel()
        assert_freed(server, cancelled)


def test_a_timeout_ends_it_on_the_server(server):
    cancelled = value(server, CANCELLED)
    with pytest.raises(InferenceServerException, match="deadline of 400 ms exceeded") as error:
        generate(server.grpc_url, timeout=400_000, **LONG)
    assert error.value.status() == "StatusCode.CANCELLED"
    assert_freed(server, cancelled)


def test_a_plain_disconnect_ends_at_the_deadline(server):
    steps, cancelled = value(server, STEPS), value(server, CANCELLED)
    client = grpcclient.InferenceServerClient(server.grpc_url)
    client.async_infer(
        "qwen_image", tensors(**LONG), callback=lambda result, error: None, timeout=1_500_000
    )
    wait_for_a_step(server, steps)
    client.close()
    assert_freed(server, cancelled)
